"""Which modules of a model are attention, when no adapter knows their class.

Three signs, each set enough by itself: the names of projections, the code of the class, its name.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

# Operators that are attention by themselves.
KERNELS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "flex_attention",
    "memory_efficient_attention",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
}
# What explicit attention is written with; other things are too.
NORMALISERS = {"softmax", "Softmax"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "@"}

# Libraries whose classes adapters list, so that their code need not be judged.
_LISTED = {"torch", "torchvision", "torchaudio", "timm", "transformers"}

# Names under which people keep projections: W_Q, fc_q, q_proj, w_qs, query_layer, to_keys, linear_k, ...
_AFFIX = r"(?:projection|proj|linear|lin|layer|dense|conv|weight|net|map|in|to|up|down|fc|w|a|b)"


def _projection(of: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{_AFFIX}_?)*(?:{of})(?:_?(?:{_AFFIX}|\d))*", re.IGNORECASE)


_QUERY = _projection(r"qs?|query|queries")
_KEY = _projection(r"ks?|keys?|kvs?|key_?values?|keys_?values")
_PACKED = _projection(r"qkvs?|query_key_value|queries_keys_values")
_PACKED_NAMES = {"in_proj_weight", "c_attn"}

_NAME = re.compile(r"attention|attn|(?:^|_)mhsa?(?:$|_)|MSA$|MHSA?$", re.IGNORECASE)

# Parts of attention that are none: what follows it in a block, or what is added to its logits.
_PART = re.compile(r"(?:output|mlp|bias|norm|embeddings?|mask)$", re.IGNORECASE)


def looks_like_attention(module: nn.Module) -> bool:
    """Whether the children and parameters of a module, its code, or the name of its class are attention's."""
    if _has_projections(module) or _attends(module):
        return True
    name = type(module).__name__
    return bool(_NAME.search(name)) and not _PART.search(name) and any(True for _ in module.parameters())


def strangers(model: nn.Module, known: set[str]) -> list[tuple[str, nn.Module]]:
    """Modules that look like attention, and that no adapter knows.

    What lies inside a known module belongs to it; what contains a known or another suspect one and neither
    has projections of its own nor attends in its own code is a block around it (`BertAttention` around
    `BertSelfAttention`).

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
        if _has_projections(module)
        or _attends(module)
        or not any(_contains(path, other) for other in everyone)
    ]


@functools.cache
def names_used(cls: type, but: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names that the methods of a class use, with "@" for the operator; also in functions of its own file.

    Args:
        cls: a class of modules; the methods of `nn.Module` are none of its own.
        but: libraries whose base classes are not read.
    """
    used: set[str] = set()
    for base in cls.__mro__:
        if base is nn.Module:
            break
        if base.__module__.partition(".")[0] in but:
            continue
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else member
            if isinstance(getattr(function, "__code__", None), CodeType):
                used |= _names(function.__code__)
    return frozenset(used)


def names_of(code: CodeType) -> set[str]:
    """Names that a piece of code uses, and those of the functions defined in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_of(constant)
    return names


def _names(code: CodeType) -> set[str]:
    """As :func:`names_of`, with "@" where two things are multiplied by it."""
    names = names_of(code)
    return names | {"@"} if any(step.argrepr in ("@", "@=") for step in _steps(code)) else names


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _steps(constant)


@functools.cache
def _operations(cls: type) -> frozenset[str]:
    """Names in the methods of a class that no adapter's library defines, and in helpers beside it."""
    used = set(names_used(cls, frozenset(_LISTED)))
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in _LISTED or base is object:
            continue
        for member in vars(base).values():
            scope: dict[str, Any] = getattr(member, "__globals__", {})
            for name in names_of(member.__code__) if isinstance(member, FunctionType) else ():
                helper = scope.get(name)
                if isinstance(helper, FunctionType) and helper.__module__ == base.__module__:
                    used |= _names(helper.__code__)
    return frozenset(used)


def _attends(module: nn.Module) -> bool:
    """Whether the code of the class attends: by an operator, or by products and a softmax of projections."""
    used = _operations(type(module))
    if used & KERNELS:
        return True
    children = list(module._modules.values())
    normalises = bool(used & NORMALISERS) or any(isinstance(child, nn.Softmax) for child in children)
    return normalises and bool(used & _PRODUCTS) and _projects_thrice(children)


def _projects_thrice(children: list[nn.Module | None]) -> bool:
    """Three linear maps of the same input, or one that is three times as wide."""
    widths: list[tuple[int, int]] = []
    for child in children:
        if isinstance(child, nn.Linear):
            widths.append((child.in_features, child.out_features))
        elif isinstance(child, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            widths.append((child.in_channels, child.out_channels))
    inputs = [a for a, _ in widths]
    return any(inputs.count(a) >= 3 or b == 3 * a for a, b in widths)


def _has_projections(module: nn.Module) -> bool:
    names = {*module._modules, *module._parameters}
    if names & _PACKED_NAMES or any(_PACKED.fullmatch(name) for name in names):
        return True
    queries, keys = ({n for n in names if pattern.fullmatch(n)} for pattern in (_QUERY, _KEY))
    return bool(queries) and bool(keys)


def _contains(outer: str, inner: str) -> bool:
    return inner != outer and (outer == "" or inner.startswith(f"{outer}."))
