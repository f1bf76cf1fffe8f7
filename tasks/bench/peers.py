"""What people write today: the two lines of XSA after an attention kernel, and plain attention.

Axis legend: B batch, T tokens, H query heads, Hkv key/value heads, D channels of a head.
"""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xsa_core.attention.variants import Call, Variant
from xsa_core.gpt import GPT


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by torch's own choice of kernel, `B T H D -> B T H D`."""
    grouped = q.shape[2] != k.shape[2]
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=grouped
    )
    return y.transpose(1, 2)


def two_lines(y: Tensor, v: Tensor) -> Tensor:
    """The exclusion as the paper's pseudo-code has it, in the dtype of the tensors; `B T H D`."""
    direction = F.normalize(v, dim=-1)
    return y - (y * direction).sum(dim=-1, keepdim=True) * direction


def two_line_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's attention followed by the two lines."""
    y = torch_attention(q, k, v)
    return two_lines(y, v.repeat_interleave(q.shape[2] // v.shape[2], dim=2))


class TwoLineVariant(Variant):
    """The two lines inside our own layer: what its fused operator is compared with."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, own_v: Tensor, call: Call) -> Tensor:
        """See `Variant.forward`."""
        y = call.attend(q, k, v)
        return two_lines(y, own_v.repeat_interleave(q.shape[2] // own_v.shape[2], dim=2))


def with_two_lines(model: GPT) -> GPT:
    """Put the two lines into every attention layer of a model of variant `sa`; returns the model."""
    for module in model.modules():
        if isinstance(getattr(module, "variant", None), Variant):
            module.variant = TwoLineVariant(module.n_heads, module.head_dim)
    return model


def compiled(function: nn.Module | object) -> object:
    """Return `torch.compile` of a function for fixed shapes, compiled from scratch."""
    # Inductor imports torch's extension builder, which warns where a CUDA toolkit has no device to serve.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)
