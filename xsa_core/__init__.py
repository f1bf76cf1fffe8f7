"""Exclusive Self Attention (XSA): the operator, the layer and the models.

Names are imported on first use, so that `import xsa_core` costs next to nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "exclude": "xsa_core.attention",
    "exclusive_attention": "xsa_core.attention",
    "Mask": "xsa_core.attention",
    "SelfAttention": "xsa_core.attention.module",
    "select_layers": "xsa_core.attention.module",
    "VARIANTS": "xsa_core.attention.variants",
    "KVCache": "xsa_core.attention.cache",
    "probe": "xsa_core.attention.probe",
    "GPT": "xsa_core.gpt",
    "GPTConfig": "xsa_core.gpt",
    "Encoder": "xsa_core.encoder",
    "EncoderConfig": "xsa_core.encoder",
    "initialize": "xsa_core.initialization",
    "weights_sha256": "xsa_core.initialization",
    "Role": "xsa_core.roles",
    "ParameterRole": "xsa_core.roles",
    "parameter_roles": "xsa_core.roles",
    "linear_cross_entropy": "xsa_core.loss",
    "convert": "xsa_core.adapters",
    "revert": "xsa_core.adapters",
    "set_strength": "xsa_core.adapters",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
