"""Which modules of a transformers model are token self attention, and what is known of their classes."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from xsa_core.adapters.base import LEFT_ALONE, SELF, UNSUPPORTED
from xsa_core.adapters.layer import plain_class
from xsa_core.adapters.recognize import KERNELS, NORMALISERS, names_of, names_used
from xsa_core.attention.constants import compile_time_constant

INTERFACE = "ALL_ATTENTION_FUNCTIONS"

# Ways to attend that leave traces in the code of a class which does not use the interface.
_OPERATIONS = KERNELS | NORMALISERS | {"logsumexp"}
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
# Projections in front of an attention core that lies in a module of its own.
_PARTS = re.compile(r"output|adapter|intermediate|norm|mask|bias|gate$|mlp$", re.IGNORECASE)

# (pattern over class names, pattern over the last parts of the module path, kind): what is no self attention.
_ROLES = (
    (
        r"cross|encdec|injector|attentionmap|attentionresidual",
        r"cross|encoder_attn|EncDecAttention|enc_attn|encoder_attention|token_to_image|image_to_token|x_attn",
        "cross",
    ),
    (r"pool(er|ing)|perceiver|resampler|qformer.*cross|probe", r"attention_pool|attn_pool", "pooling"),
    (
        r"linear(self)?attention|lightning|delta(net|attention)|rwkv|xlstmlayer|efficientadditive",
        r"",
        "linear",
    ),
    (r"multiscaleattention$|segformerattention", r"", "subsampled"),
    (r"channel", r"channel_(attn|attention)", "channel"),
    (r"classattention", r"", "class"),
    (r"gatedattention|attentiongrucell", r"", "gate"),
    (r"deformableattention", r"", "deformable"),
    (r"mergedattention|assistantattention|deepseekv4attention", r"", "merged"),
)

# Blocks in which the latents of a perceiver attend to each other.
_AMONG_LATENTS = re.compile(r"(?:^|\.)self_attends\.")

_REFUSED = {
    "deformable": "deformable attention samples places between tokens: there is no own value",
    "merged": "it attends to the tokens and to a context (or a summary of them) at once",
}
_SHARED = "it attends with the keys and values of an earlier layer, not with its own"
_CLASSES = {kind: pattern for pattern, _, kind in _ROLES}

# Keyword arguments that turn a call into cross attention.
_FOREIGN = ("key_value_states", "encoder_hidden_states", "encoder_states", "memory")


def transformers_loaded() -> bool:
    """Whether a transformers model can exist in this process."""
    import sys

    return "transformers.modeling_utils" in sys.modules


def model_paths(root: nn.Module) -> list[str]:
    """Paths of the outermost transformers models inside a module."""
    if not transformers_loaded():
        return []
    from transformers.modeling_utils import PreTrainedModel

    paths: list[str] = []
    for path, module in root.named_modules():
        inside = any(outer == "" or path == outer or path.startswith(f"{outer}.") for outer in paths)
        if not inside and isinstance(module, PreTrainedModel):
            paths.append(path)
    return paths


def candidates(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, str]]:
    """(path, module, kind, reason) of every attention module of the transformers models inside `root`."""
    outer = model_paths(root)
    if not outer:
        return
    rows = [
        (path, module)
        for path, module in root.named_modules()
        if any(p == "" or path.startswith(f"{p}.") for p in outer)
    ]
    dispatching = [path for path, module in rows if dispatches(plain_class(module))]
    for path, module in rows:
        cls = plain_class(module)
        kind = role(path, cls)
        if dispatches(cls):
            shared = getattr(module, "is_kv_shared_layer", False)
            yield (path, module, *_judged(kind, _SHARED if shared else ""))
        elif attends_by_itself(cls, kind) and not any(p.startswith(f"{path}.") for p in dispatching):
            yield (path, module, *_judged(kind, "it does not use transformers' AttentionInterface"))


def _judged(kind: str, reason: str) -> tuple[str, str]:
    if kind in _REFUSED:
        return UNSUPPORTED, _REFUSED[kind]
    if kind != SELF:
        return kind, LEFT_ALONE[kind]
    return (UNSUPPORTED, reason) if reason else (SELF, "")


def role(path: str, cls: type) -> str:
    """SELF, or what a module is instead, by its class and the last two names of its path."""
    if _AMONG_LATENTS.search(path):
        return SELF
    place = ".".join(path.split(".")[-2:])
    for class_pattern, path_pattern, kind in _ROLES:
        if re.search(class_pattern, cls.__name__, re.IGNORECASE):
            # The registry knows softmax attention only, whatever the rest of the model is.
            return SELF if kind == "linear" and dispatches(cls) else kind
        if path_pattern and re.search(path_pattern, place, re.IGNORECASE):
            return kind
    return SELF


@functools.cache
def dispatches(cls: type) -> bool:
    """Whether the forward of a class takes its attention function from transformers' registry."""
    if not issubclass(cls, nn.Module) or cls.forward is nn.Module.forward:
        return False
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and {INTERFACE, "_attn_implementation"} <= names_of(code)


@functools.cache
def attends_by_itself(cls: type, kind: str = SELF) -> bool:
    """Whether a class looks like attention that does not use the registry."""
    name = cls.__name__
    elsewhere = cls.__module__.partition(".")[0] in ("torch", "timm", "torchaudio", "torchvision")
    if elsewhere or _PARTS.search(name):
        return False
    if kind in ("pooling", "linear", "cross") and re.search(_CLASSES[kind], name, re.IGNORECASE):
        return kind == "linear" or bool(_ATTENTION.search(name))
    if not _ATTENTION.search(name):
        return False
    return bool(names_used(cls) & _OPERATIONS)


@compile_time_constant
def eager_function(cls: type) -> Callable[..., Any]:
    """The explicit attention of the file that defines a class, as its forward would call it."""
    return _eager_function(cls)


@functools.cache
def _eager_function(cls: type) -> Callable[..., Any]:
    for base in cls.__mro__:
        if "forward" not in vars(base):
            continue
        forward = inspect.unwrap(vars(base)["forward"])
        names = [n for n in forward.__code__.co_names if n.endswith("eager_attention_forward")]
        if names:
            return forward.__globals__[names[0]]
    raise ValueError(f"{cls.__name__} has no explicit attention: use the implementation xsa_sdpa")


@compile_time_constant
def foreign_arguments(cls: type) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments of a forward that bring the keys of other tokens."""
    names = list(inspect.signature(inspect.unwrap(cls.forward)).parameters)[1:]  # type: ignore[attr-defined]
    return tuple((i, name) for i, name in enumerate(names) if name in _FOREIGN)


_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attention_head", "heads")
_SIZES = (
    "v_head_dim",
    "value_head_dim",
    "head_dim",
    "attention_head_size",
    "key_value_proj_dim",
    "head_size",
)


def sizes(module: nn.Module) -> tuple[int, int] | None:
    """(query heads, channels of a value head) of a dispatching module; None where they cannot be told.

    The module's own numbers count before those of its config.
    """
    config = getattr(module, "config", None)
    heads = _number(module, _HEADS) or _number(config, _HEADS)
    if heads is None:
        return None
    size = _number(module, _SIZES) or _number(config, _SIZES)
    if size is None:
        width = _number(module, ("embed_dim", "hidden_size", "all_head_size")) or _number(
            config, ("hidden_size", "d_model")
        )
        size = None if width is None or width % heads else width // heads
    return None if size is None else (heads, size)


def _number(owner: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
