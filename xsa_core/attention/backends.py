"""Who can compute what: a record per backend, the choice among them, and errors that say what would work."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xsa_core.attention.constants import compile_time_constant
from xsa_core.attention.masks import Mask

ALL_MASKS = frozenset({"causal", "prefix", "padding", "window", "documents", "exclude_self"})
_INSTALLED: dict[str, bool] = {}
FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Capability:
    """What a backend supports. ``head_sizes`` is (largest, multiple of)."""

    name: str
    summary: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    masks: frozenset[str]
    bias: bool
    bias_gradient: bool
    gqa: bool
    head_sizes: tuple[int | None, int]
    different_value_size: bool
    dropout: bool
    lse: bool
    fused: bool
    second_derivative: bool
    unavailable: Callable[[], str | None] = field(repr=False)


@dataclass(frozen=True)
class Request:
    """What one call needs. ``masks`` are the features of its mask."""

    device: str
    dtype: str
    masks: frozenset[str]
    T: int
    S: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    bias: bool = False
    bias_gradient: bool = False
    dropout: bool = False
    lse: bool = False

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        bias: Tensor | None = None,
        dropout_p: float = 0.0,
        lse: bool = False,
    ) -> Request:
        """The request of a call with these tensors (layouts B T H D)."""
        return cls(
            device=q.device.type,
            dtype=str(q.dtype).removeprefix("torch."),
            masks=mask.features,
            T=q.shape[1],
            S=k.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            key_size=q.shape[3],
            value_size=v.shape[3],
            bias=bias is not None,
            bias_gradient=bias is not None and bias.requires_grad and torch.is_grad_enabled(),
            dropout=dropout_p > 0,
            lse=lse,
        )


def _always() -> None:
    return None


def _installed(package: str) -> bool:
    """Whether a package can be imported; looked up once, since this is asked at every call."""
    if package not in _INSTALLED:
        _INSTALLED[package] = importlib.util.find_spec(package) is not None
    return _INSTALLED[package]


# To a traced graph the machine is a constant.
@compile_time_constant
def _no_xformers() -> str | None:
    if not _installed("xformers"):
        return "xformers is not installed (pip install 'xsa-core[xformers]')"
    if not torch.cuda.is_available():
        return "xformers has no CPU operator and there is no CUDA device"
    return None


@compile_time_constant
def _no_flex() -> str | None:
    if not torch.cuda.is_available():
        return "FlexAttention is used on CUDA only and there is no CUDA device"
    if not _installed("triton"):
        return "FlexAttention compiles through triton, which is not installed"
    return None


BACKENDS: dict[str, Capability] = {
    "reference": Capability(
        name="reference",
        summary="explicit softmax, plain autograd: the specification",
        devices=("cpu", "cuda"),
        dtypes=FLOATS,
        masks=ALL_MASKS,
        bias=True,
        bias_gradient=True,
        gqa=True,
        head_sizes=(None, 1),
        different_value_size=True,
        dropout=True,
        lse=True,
        fused=False,
        second_derivative=True,
        unavailable=_always,
    ),
    "sdpa": Capability(
        name="sdpa",
        summary="torch's flash kernels, efficient and math ones where flash does not apply",
        devices=("cpu", "cuda"),
        dtypes=FLOATS,
        masks=ALL_MASKS,
        bias=True,
        bias_gradient=True,
        gqa=True,
        head_sizes=(None, 1),
        different_value_size=True,
        dropout=True,
        lse=True,
        fused=True,
        second_derivative=False,
        unavailable=_always,
    ),
    "xformers": Capability(
        name="xformers",
        summary="memory_efficient_attention, forward with log-sum-exp and backward",
        devices=("cuda",),
        dtypes=("float32", "bfloat16", "float16"),
        masks=ALL_MASKS,
        bias=True,
        bias_gradient=False,
        gqa=True,
        head_sizes=(256, 8),
        different_value_size=False,
        dropout=False,
        lse=True,
        fused=True,
        second_derivative=False,
        unavailable=_no_xformers,
    ),
    "flex": Capability(
        name="flex",
        summary="FlexAttention, block-sparse masks; exclusion follows as a pass of its own",
        devices=("cuda",),
        dtypes=("float32", "bfloat16", "float16"),
        masks=frozenset({"causal", "prefix", "padding", "window", "documents"}),
        bias=False,
        bias_gradient=False,
        gqa=True,
        head_sizes=(256, 16),
        different_value_size=True,
        dropout=False,
        lse=True,
        fused=False,
        second_derivative=False,
        unavailable=_no_flex,
    ),
}


def refusals(backend: Capability, request: Request) -> list[str]:
    """Why ``backend`` cannot serve ``request``; empty when it can."""
    reasons = []
    if missing := backend.unavailable():
        reasons.append(missing)
    if request.device not in backend.devices:
        reasons.append(f"it runs on {' and '.join(backend.devices)}, not on {request.device}")
    if request.dtype not in backend.dtypes:
        reasons.append(f"it takes {', '.join(backend.dtypes)}, not {request.dtype}")
    if unknown := sorted(request.masks - backend.masks):
        reasons.append(f"it has no {' or '.join(unknown)} mask")
    largest, multiple = backend.head_sizes
    for size in {request.key_size, request.value_size}:
        if (largest is not None and size > largest) or size % multiple:
            reasons.append(f"it takes head sizes up to {largest} in multiples of {multiple}, not {size}")
    needs = {
        "an additive bias": (request.bias, backend.bias),
        "the gradient of a bias": (request.bias_gradient, backend.bias_gradient),
        "grouped key/value heads": (request.heads != request.kv_heads, backend.gqa),
        "values of another size than keys": (
            request.key_size != request.value_size,
            backend.different_value_size,
        ),
        "dropout": (request.dropout, backend.dropout),
        "the log-sum-exp": (request.lse, backend.lse),
    }
    return reasons + [
        f"it does not support {what}" for what, (asked, able) in needs.items() if asked and not able
    ]


def check_backend_name(name: str) -> None:
    """Refuse what is neither 'auto' nor a backend.

    Raises:
        ValueError: with the names there are.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; use 'auto' or one of {', '.join(BACKENDS)}")


def check_backend(name: str, request: Request) -> str:
    """``name`` if that backend can serve the request.

    Raises:
        ValueError: for an unknown backend, or one that cannot; says why and which could.
    """
    check_backend_name(name)
    if reasons := refusals(BACKENDS[name], request):
        others = [n for n, b in BACKENDS.items() if not refusals(b, request)]
        able = f"would work here: {', '.join(others)}" if others else "no backend can do this here"
        raise ValueError(f"attention backend {name!r} cannot do this: {'; '.join(reasons)}; {able}")
    return name


def choose_backend(request: Request) -> str:
    """The backend ``auto`` stands for: the fastest one whose record covers the request.

    On CUDA in half precision: flex for masks with blocks to skip (window, documents, prefix), else xformers.
    Everywhere else, and where those two cannot: sdpa.
    """
    order = ["sdpa"]
    if request.device == "cuda" and request.dtype in ("bfloat16", "float16"):
        order.insert(0, "xformers")
        if request.masks & {"window", "documents", "prefix"}:
            order.insert(0, "flex")
    for name in order:
        if not refusals(BACKENDS[name], request):
            return name
    return check_backend("sdpa", request)


def sdpa_kernel(request: Request, dense_mask: bool) -> str:
    """The kernel pair of the sdpa backend; ``dense_mask``: a mask or a bias goes in as a tensor."""
    same_size = request.key_size == request.value_size
    if request.device == "cpu":
        fits = same_size and not request.dropout and not request.bias_gradient
        return "flash_cpu" if fits else "math"
    half = request.dtype in ("bfloat16", "float16")
    size = max(request.key_size, request.value_size)
    if request.device == "cuda" and half and same_size and size <= 256 and size % 8 == 0 and not dense_mask:
        return "flash_cuda"
    aligned = request.key_size % 8 == 0 and request.value_size % 8 == 0
    if request.device == "cuda" and request.dtype != "float64" and aligned:
        return "efficient"
    return "math"


def backend_matrix() -> list[dict[str, object]]:
    """One row per backend, for ``./xsa info attention``: its record, and why it is unavailable."""
    rows = []
    for name, record in BACKENDS.items():
        reason = record.unavailable()
        row = {key: value for key, value in vars(record).items() if key not in ("name", "unavailable")}
        row["masks"] = tuple(sorted(record.masks))
        rows.append({"name": name, "available": reason is None, "reason": reason, **row})
    return rows
