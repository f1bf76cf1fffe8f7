"""Cross entropy of a vocabulary projection that never holds the logits of all tokens.

Axes: N tokens, C channels, V vocabulary.

`linear_cross_entropy(h, W, targets)` is `F.cross_entropy(h @ W.T, targets)` with the projection and the
softmax done over blocks of tokens. Gradients of `h` and `W` come out of the same sweep (the logits are at
hand then), so they are exact, nothing is recomputed and the backward only scales them. Beyond the gradients
themselves the peak is one block of float32 logits. The idea is known from fused linear cross entropy
kernels (Hsu et al., arXiv:2410.10989).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
# Logits of one block of tokens, in the dtype of the products. Smaller blocks make the products inefficient
# and add more passes over the gradient of the weight; larger ones only cost memory.
BLOCK_BYTES = 64 * 2**20
# On a CPU the softmax of a block runs in strips of this many bytes that stay in cache: measured with a
# vocabulary of 50,304 it is five times faster than in one go.
STRIP_BYTES = 2 * 2**20


@torch.library.custom_op("xsa::linear_cross_entropy", mutates_args=())
def _sweep(
    hidden: Tensor, weight: Tensor, targets: Tensor, with_gradient: bool, block_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss and, if wanted, its gradients, block by block.

    Args:
        hidden: `N C` in the dtype of the products.
        weight: `V C`, same dtype.
        targets: `N` int64; `IGNORE_INDEX` drops a token.
        with_gradient: whether to form the gradients (else empty tensors come back).
        block_bytes: bound on one block of logits.

    Returns:
        The sum of losses (float32, float64 for float64), `dhidden` (`N C`, dtype of hidden) and `dweight`
        (`V C`, in the accumulation dtype), both of the *summed* loss.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    n, vocabulary = hidden.shape[0], weight.shape[0]
    total = torch.zeros((), dtype=exact, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if with_gradient else hidden.new_empty(0)
    # The first block writes the gradient of the weight, later ones add: no pass to clear it.
    grad_weight = hidden.new_empty(0, dtype=exact)
    rows = max(1, block_bytes // (vocabulary * hidden.dtype.itemsize))
    buffer = hidden.new_empty(min(rows, n), vocabulary)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, n, rows):
            h, t = hidden[start : start + rows], targets[start : start + rows]
            logits = buffer[: h.shape[0]]
            torch.mm(h, weight.T, out=logits)
            total += _softmax_strips(logits, t, exact, with_gradient)
            if not with_gradient:
                continue
            torch.mm(logits, weight, out=grad_hidden[start : start + rows])
            if start == 0:
                grad_weight = torch.mm(logits.T, h).to(exact)
            elif exact == hidden.dtype:
                grad_weight.addmm_(logits.T, h)
            else:
                grad_weight += torch.mm(logits.T, h)
        if with_gradient and n == 0:
            grad_weight = torch.zeros_like(weight, dtype=exact)
    return total, grad_hidden, grad_weight


def _softmax_strips(logits: Tensor, targets: Tensor, exact: torch.dtype, with_gradient: bool) -> Tensor:
    """Summed loss of a block; its logits `n V` are overwritten by their gradient where that is wanted.

    Args:
        logits: `n V`. targets: `n`, -100 where there is none. exact: dtype of softmax and sums.
    """
    n, vocabulary = logits.shape
    total = torch.zeros((), dtype=exact, device=logits.device)
    strip = max(1, STRIP_BYTES // (vocabulary * exact.itemsize)) if logits.device.type == "cpu" else n
    wide = torch.empty(min(strip, n), vocabulary, dtype=exact, device=logits.device)
    for start in range(0, n, strip):
        low, t = logits[start : start + strip], targets[start : start + strip]
        kept = (t != IGNORE_INDEX)[:, None]
        index = torch.where(kept, t[:, None], 0)  # n 1
        x = wide[: low.shape[0]].copy_(low)
        largest = x.amax(dim=-1, keepdim=True)
        at_target = x.gather(1, index) - largest
        x.sub_(largest).exp_()
        norm = x.sum(dim=-1, keepdim=True)
        total += (norm.log() - at_target).masked_fill(~kept, 0).sum()
        if with_gradient:
            x.mul_(kept / norm)  # softmax, or 0 for a token without target
            x.scatter_add_(1, index, -kept.to(exact))
            low.copy_(x)
    return total


@_sweep.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, with_gradient: bool, block_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.promote_types(hidden.dtype, torch.float32)
    if not with_gradient:
        return hidden.new_empty((), dtype=exact), hidden.new_empty(0), hidden.new_empty(0, dtype=exact)
    return hidden.new_empty((), dtype=exact), torch.empty_like(hidden), torch.empty_like(weight, dtype=exact)


class _LinearCrossEntropy(torch.autograd.Function):
    """Differentiable face of `_sweep`.

    The weight comes in its own dtype, so under autocast its gradient never passes through a half type.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, block_bytes: int) -> Tensor:
        total, grad_hidden, grad_weight = _sweep(hidden, weight.to(hidden.dtype), targets, True, block_bytes)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # Gradients are enabled here only under create_graph=True; the saved ones would count as constants.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "linear_cross_entropy has no second derivative: use F.cross_entropy on the logits"
            )
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), (grad_weight * grad).to(ctx.weight_dtype), None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, block_bytes: int = BLOCK_BYTES
) -> Tensor:
    """Mean cross entropy of `hidden @ weight.T` against `targets`, over the tokens that are not ignored.

    Args:
        hidden: `... C`.
        weight: `V C`, the (possibly tied) output embedding.
        targets: `...` int64, `IGNORE_INDEX` (-100) where a token has no target.
        block_bytes: bound on the logits held at once.

    Returns:
        Scalar, float32 (float64 for float64 inputs). Without any target it is 0, and so are its gradients.
        Under autocast the products run in autocast's dtype, softmax and sums in float32.

    Raises:
        ValueError: shapes do not fit.
    """
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            "expected hidden (..., C), weight (V, C) and targets (...), got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    hidden = hidden.reshape(-1, hidden.shape[-1])  # ... C -> N C
    targets = targets.reshape(-1)
    count = (targets != IGNORE_INDEX).sum().clamp(min=1)
    device = hidden.device.type
    hidden = hidden.to(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    )
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        total = _LinearCrossEntropy.apply(hidden, weight, targets, block_bytes)
    else:
        total = _sweep(hidden, weight.to(hidden.dtype), targets, False, block_bytes)[0]
    return total / count


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss of every token, `B T V` and `B T -> B T` in float32: for evaluation, where logits are at hand."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    flat = F.cross_entropy(
        logits.flatten(0, -2).to(exact), targets.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )
    return flat.view(targets.shape)
