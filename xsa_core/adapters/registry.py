"""The adapters, and conversion by whichever of them knows a model's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from xsa_core.adapters import timm, torch_nn, torchaudio
from xsa_core.adapters.base import SELF, UNSUPPORTED, Adapter, Coverage, Found, Settings
from xsa_core.adapters.checks import (
    as_indices,
    as_number,
    check_model,
    refuse_changed,
    refuse_sharded,
    refuse_wrapped,
)
from xsa_core.adapters.exclusion import Exclusion, guard_loading
from xsa_core.adapters.hf.adapter import ADAPTER as TRANSFORMERS
from xsa_core.adapters.hf.classes import dispatches
from xsa_core.adapters.layer import plain_class, qualified
from xsa_core.adapters.recognize import strangers
from xsa_core.attention.backends import BACKENDS
from xsa_core.attention.module import SelfAttention, select_layers
from xsa_core.attention.variants import VARIANTS, check_strength

# The first that knows a module has it, so libraries that build on torch.nn come before it.
ADAPTERS: dict[str, Adapter] = {
    "transformers": TRANSFORMERS,
    "timm": timm.ADAPTER,
    "torchaudio": torchaudio.ADAPTER,
    "torch.nn": torch_nn.ADAPTER,
}

Layers = str | Sequence[int] | Callable[[str], bool]


@dataclass(frozen=True)
class LayerReport:
    """What :func:`describe` says of one attention module.

    Attributes:
        path, adapter, cls: where it is, who knows it, its class before conversion.
        kind: "self", why it is left alone (cross, pooling, class, channel, ...), or "unknown".
        variant: of a converted layer, else None.
        strength: of a converted layer whose variant has a fixed one, else None.
        reason: why it is not covered; empty for "self".
    """

    path: str
    adapter: str
    cls: str
    kind: str
    variant: str | None
    strength: float | None
    reason: str


def convert(
    model: nn.Module,
    layers: Layers = "all",
    strength: float = 1.0,
    variant: str = "xsa",
    backend: str = "auto",
) -> nn.Module:
    """Make the self attention of a model exclusive, in place.

    Parameters keep their names and shapes, so weights of the plain model load as before; the learned variants
    add `<layer>.exclusion.variant.*`. Cross, class and pooling attention stay as they are: :func:`describe`
    lists them. Converting again changes the layers chosen by that call and no others: only the strength,
    where the variant is the same, so that what was learned stays. Convert before wrapping in DDP or FSDP, and
    before building the optimizer.

    Args:
        model: a model, or an attention module itself.
        layers: which of its self attention layers, counted in the order of the model: "all", "first:k",
            "last:k", a list of numbers (negative ones from the end), or a function of the module path.
        strength: 1 removes all of the own-value component, 0 nothing.
        variant: a name of :data:`xsa_core.VARIANTS`.
        backend: "auto" or a name of :data:`xsa_core.attention.BACKENDS`.

    Returns:
        The model.

    Raises:
        ValueError: nothing to convert, an attention that no adapter knows or can convert, or wrong settings.
            The model is then as it was.
    """
    check_model(model)
    settings = _settings(variant, strength, backend)
    found = _find(model)
    chosen = _choose(model, found, layers)
    _refuse_strangers(model, found, layers)
    fresh = [f for f in chosen if not _holds(f, settings)]
    for name, rows in _by_adapter(fresh).items():
        ADAPTERS[name].check(model, rows, settings)
    refuse_wrapped(model, fresh, settings)
    again = [f for f in fresh if _exclusion(f) is not None]
    refuse_changed(again)
    _detach(model, again)
    for name, rows in _by_adapter(fresh).items():
        ADAPTERS[name].attach(model, rows, settings)
    for row in chosen:
        exclusion = _exclusion(row)
        if exclusion is not None and exclusion.strength is not None:
            exclusion.set_strength(settings.strength)
    guard_loading(model)
    return model


def revert(model: nn.Module, layers: Layers = "all") -> nn.Module:
    """Make converted layers plain again, in place; what a learned variant learned is gone.

    Args:
        model: as :func:`convert` takes it. layers: as there, counted over all its self attention layers.

    Returns:
        The model.

    Raises:
        ValueError: layers that are not there, or sharded ones.
    """
    check_model(model)
    found = [f for f in _find(model) if f.kind == SELF]
    if found:
        chosen = [f for f in _select(found, layers) if _exclusion(f) is not None]
        refuse_sharded(chosen)
        refuse_changed(chosen)
        _detach(model, chosen)
    guard_loading(model)
    return model


def set_strength(model: nn.Module, strength: float) -> nn.Module:
    """Set the strength of every converted layer: a schedule calls it between steps.

    Raises:
        ValueError: no converted layer, not a finite number, or a variant without a fixed strength. No layer
            is changed then.
    """
    check_model(model)
    strength = as_number(strength)
    exclusions = converted_layers(model)
    if not exclusions:
        raise ValueError(f"{type(model).__name__} has no converted layer: call xsa_core.convert(model) first")
    for exclusion in exclusions.values():
        exclusion.check_strength(strength)
    for exclusion in exclusions.values():
        exclusion.set_strength(strength)
    return model


def converted_layers(model: nn.Module) -> dict[str, Exclusion]:
    """Path of each converted layer -> its :class:`Exclusion`."""
    return {
        path.rpartition(".")[0]: module
        for path, module in model.named_modules()
        if isinstance(module, Exclusion)
    }


def describe(model: nn.Module) -> list[LayerReport]:
    """Every attention module of a model: converted, plain, or left alone with the reason.

    What looks like attention and no adapter knows comes last, with the kind "unknown".
    """
    rows = []
    found = _find(model)
    for f in found:
        exclusion = _exclusion(f)
        variant = strength = None
        if exclusion is not None:
            variant, strength = exclusion.variant_name, exclusion.strength
        rows.append(LayerReport(f.path, f.adapter, f.cls, f.kind, variant, strength, f.reason))
    for path, module in _strangers(model, found):
        name = type(module).__name__
        rows.append(LayerReport(path, "", name, "unknown", None, None, "no adapter knows it"))
    return rows


def coverage() -> list[Coverage]:
    """The coverage table of all adapters: a row per class that is converted or known and left alone."""
    return [row for adapter in ADAPTERS.values() for row in adapter.coverage()]


def _settings(variant: str, strength: float, backend: str) -> Settings:
    if variant not in VARIANTS:
        raise ValueError(f"unknown attention variant {variant!r}: expected one of {', '.join(VARIANTS)}")
    strength = as_number(strength)
    check_strength(variant, strength)
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; use 'auto' or one of {', '.join(BACKENDS)}")
    return Settings(variant, float(strength), backend)


def _find(model: nn.Module) -> list[Found]:
    """Attention modules that adapters know, each once, in model order."""
    order = {path: i for i, (path, _) in enumerate(model.named_modules())}
    taken: dict[str, Found] = {}
    for name, adapter in ADAPTERS.items():
        for row in adapter.find(model):
            assert row.adapter == name, f"adapter {name} signs as {row.adapter}"
            if not any(row.path == p or p == "" or row.path.startswith(f"{p}.") for p in taken):
                taken[row.path] = row
    return sorted(taken.values(), key=lambda row: order[row.path])


def _choose(model: nn.Module, found: Sequence[Found], layers: Layers) -> list[Found]:
    own = [f for f in found if f.kind == SELF]
    if own:
        return _select(own, layers)
    if any(f.kind == UNSUPPORTED for f in found) or _strangers(model, found):
        return []  # the error about those says more
    seen = sorted({f"{f.cls} ({f.kind})" for f in found})
    what = f"its attention is {', '.join(seen)}" if seen else "it has no attention that is known here"
    ours = any(isinstance(m, SelfAttention) for m in model.modules())
    hint = "; models of xsa_core take variant= when they are built" if ours else ""
    raise ValueError(f"{type(model).__name__} has no self attention to convert: {what}{hint}")


def _select(own: Sequence[Found], layers: Layers) -> list[Found]:
    if callable(layers):
        chosen = [f for f in own if layers(f.path)]
        if not chosen:
            raise ValueError(
                f"layers chose none of the {len(own)} self attention layers, {own[0].path!r} to "
                f"{own[-1].path!r}: the function gets the module path"
            )
        return chosen
    chosen_rows = select_layers(layers if isinstance(layers, str) else as_indices(layers), len(own))
    if not chosen_rows:
        raise ValueError(f"layers {layers!r} chose none of the {len(own)} self attention layers")
    return [f for i, f in enumerate(own) if i in chosen_rows]


def _strangers(model: nn.Module, found: Sequence[Found]) -> list[tuple[str, nn.Module]]:
    """Attention that no adapter knows; this library's own takes its variant when it is built."""
    rows = strangers(model, {f.path for f in found})
    return [(path, module) for path, module in rows if not isinstance(module, SelfAttention)]


def _refuse_strangers(model: nn.Module, found: Sequence[Found], layers: Layers) -> None:
    """A model is converted wholly or not at all; a function of the path speaks for what it leaves out."""
    out = "leave it out with layers=lambda path: ..."
    wanted = layers if callable(layers) else lambda path: True
    for f in found:
        if f.kind == UNSUPPORTED and wanted(f.path):
            raise ValueError(f"{f.path or 'the model'} ({f.cls}) cannot be converted: {f.reason}; {out}")
    for path, module in _strangers(model, found):
        if wanted(path):
            if dispatches(plain_class(module)):
                raise ValueError(
                    f"{path or 'the model'} ({qualified(type(module))}) is a part of a transformers model: "
                    "convert the whole model, and choose with layers=lambda path: ..."
                )
            raise ValueError(
                f"{path or 'the model'} ({qualified(type(module))}) looks like attention and no adapter "
                f"knows it; if it is none, or is to stay plain, {out}"
            )


def _exclusion(found: Found) -> Exclusion | None:
    child = found.module._modules.get("exclusion")
    return child if isinstance(child, Exclusion) else None


def _holds(found: Found, settings: Settings) -> bool:
    """Whether a layer is converted so already, but for the strength."""
    exclusion = _exclusion(found)
    return exclusion is not None and (exclusion.variant_name, exclusion.backend) == (
        settings.variant,
        settings.backend,
    )


def _by_adapter(found: Sequence[Found]) -> dict[str, list[Found]]:
    rows: dict[str, list[Found]] = {}
    for f in found:
        rows.setdefault(f.adapter, []).append(f)
    return rows


def _detach(model: nn.Module, found: Sequence[Found]) -> None:
    for name, rows in _by_adapter(found).items():
        ADAPTERS[name].detach(model, rows)
