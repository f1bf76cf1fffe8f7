"""Which modules of a model are attention, when no adapter knows their class."""

from __future__ import annotations

import re

from torch import nn

# Names under which people keep projections of queries, keys and values, each set enough by itself.
_PROJECTIONS = (
    {"qkv"},
    {"qkv_proj"},
    {"to_qkv"},
    {"in_proj_weight"},
    {"c_attn"},
    {"Wqkv"},
    {"query_key_value"},
    {"q_proj", "k_proj"},
    {"q_proj", "kv_proj"},
    {"query", "key"},
    {"to_q", "to_k"},
    {"to_q", "to_kv"},
    {"wq", "wk"},
    {"w_q", "w_k"},
    {"q", "k"},
    {"q", "kv"},
    {"q_lin", "k_lin"},
    {"linear_q", "linear_k"},
    {"q_proj_weight", "k_proj_weight"},
)
_NAME = re.compile(r"attention|attn|(?:^|_)mhsa?(?:$|_)|MSA$|MHSA?$", re.IGNORECASE)

# Parts of attention that are none: what follows it in a block, or what is added to its logits.
_PART = re.compile(r"(?:output|mlp|bias|norm|embeddings?|mask)$", re.IGNORECASE)


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a module's children and parameters, or the name of its class, are those of attention."""
    names = {*module._modules, *module._parameters}
    if any(projections <= names for projections in _PROJECTIONS):
        return True
    name = type(module).__name__
    return bool(_NAME.search(name)) and not _PART.search(name) and any(True for _ in module.parameters())


def strangers(model: nn.Module, known: set[str]) -> list[tuple[str, nn.Module]]:
    """Modules that look like attention, and that no adapter knows.

    What lies inside a known module belongs to it; what contains a known or another suspect one and has no
    projections of its own is a block around it (`BertAttention` around `BertSelfAttention`).

    Args:
        model: the model. known: paths of the modules that adapters know.

    Returns:
        (path, module), in model order.
    """
    suspects: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        inside = any(path == outer or outer == "" or path.startswith(f"{outer}.") for outer in known)
        if not inside and looks_like_attention(module):
            suspects[path] = module
    everyone = [*known, *suspects]
    return [
        (path, module)
        for path, module in suspects.items()
        if _has_projections(module) or not any(_contains(path, other) for other in everyone)
    ]


def _has_projections(module: nn.Module) -> bool:
    names = {*module._modules, *module._parameters}
    return any(projections <= names for projections in _PROJECTIONS)


def _contains(outer: str, inner: str) -> bool:
    return inner != outer and (outer == "" or inner.startswith(f"{outer}."))
