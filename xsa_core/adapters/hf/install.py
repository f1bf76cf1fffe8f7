"""Registration with transformers, and what makes a converted model load as converted or not at all.

Besides its public registries (`AttentionInterface`, `AttentionMaskInterface`), four methods of
`PreTrainedModel` are wrapped, because the library has no other place for it:

    set_attn_implementation                  a name of ours converts the model, another one reverts it
    _check_and_adjust_attn_implementation    names with "flash" are looked up as kernels of a hub otherwise
    post_init                                a config that says so gives a converted model
    save_pretrained                          the config says what is converted, with which strength

config.json then holds `attn_implementation`, a name that transformers refuses as long as
`xsa_core.adapters.transformers` is not imported, and `xsa`, from which the layers are converted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from xsa_core.adapters.base import SELF, Found, Settings
from xsa_core.adapters.exclusion import CHILD
from xsa_core.adapters.hf import attention
from xsa_core.adapters.hf.adapter import ADAPTER, FUSED, IMPLEMENTATIONS
from xsa_core.adapters.hf.attention import MARK

NAMES = (*IMPLEMENTATIONS.values(), FUSED)
_installed = False


def install() -> None:
    """Register the attention functions, once."""
    global _installed
    if _installed:
        return
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
    from transformers.modeling_utils import PreTrainedModel

    masks = {"xsa_eager": eager_mask, "xsa_sdpa": sdpa_mask, "xsa_flash": attention.flash_style_mask}
    for name in NAMES:
        AttentionInterface.register(name, getattr(attention, name))
        AttentionMaskInterface.register(name, masks[name])
    for name, wrapper in _WRAPPERS.items():
        setattr(PreTrainedModel, name, wrapper(getattr(PreTrainedModel, name)))
    _installed = True


def configs(found: Iterable[Found]) -> list[Any]:
    """The configs of these modules, each once."""
    return list({id(row.module.config): row.module.config for row in found}.values())


def name_function(config: Any, backend: str = "auto", name: str | None = None) -> None:
    """Let the modules of a config attend by our function: the one that replaces the present one.

    Args:
        backend: of the layers; one that was asked for needs the fused operator.
        name: of the function, instead.
    """
    present = config._attn_implementation
    if name is None:
        name = present if present in NAMES else IMPLEMENTATIONS.get(present, FUSED)
        if name == "xsa_eager" and backend != "auto":
            name = "xsa_sdpa"
    if present not in NAMES:
        setattr(config, MARK, {"replaces": present})
    elif getattr(config, MARK, None) is None:
        setattr(config, MARK, {"replaces": name.replace("xsa_", "").replace("flash", "sdpa")})
    config._attn_implementation_internal = name


def name_plain_function(config: Any) -> None:
    """Let the modules of a config attend as before the conversion."""
    mark = getattr(config, MARK, None)
    if mark is None:
        return
    if config._attn_implementation in NAMES:
        config._attn_implementation_internal = mark.get("replaces") or "sdpa"
    for name in (MARK, "attn_implementation"):
        config.__dict__.pop(name, None)


def write_marks(model: nn.Module) -> list[Any]:
    """Let every config say what of its modules is converted; the configs that do."""
    by_config: dict[int, list[Found]] = {}
    for row in ADAPTER.find(model):
        if row.kind == SELF and getattr(row.module, "config", None) is not None:
            by_config.setdefault(id(row.module.config), []).append(row)
    marked = []
    for rows in by_config.values():
        config = rows[0].module.config
        on = [row for row in rows if CHILD in row.module._modules]
        if not on:
            continue
        children = [row.module._modules[CHILD] for row in on]
        layers = [
            {"path": row.path, "variant": e.variant_name, "strength": e.strength, "backend": e.backend}
            for row, e in zip(on, children, strict=True)
        ]
        mark = {"replaces": getattr(config, MARK, {}).get("replaces", "sdpa"), "layers": layers}
        alike = {(x["variant"], x["strength"], x["backend"]) for x in layers}
        if len(on) == len(rows) and len(alike) == 1:
            mark["layers"] = [{**layers[0], "path": "*"}]
        setattr(config, MARK, mark)
        config.attn_implementation = config._attn_implementation
        marked.append(config)
    return marked


def read_marks(model: nn.Module) -> None:
    """Convert what the configs of a model say is converted.

    Raises:
        ValueError: the config says exclusive and the attention function asked for is a plain one.
    """
    rows = [
        r for r in ADAPTER.find(model) if r.kind == SELF and getattr(r.module, "config", None) is not None
    ]
    for config in configs(rows):
        mark = getattr(config, MARK, None)
        mine = [row for row in rows if row.module.config is config]
        if mark is None and config._attn_implementation in NAMES:
            name_function(config)
            _convert(model, mine, [{"path": "*"}])
        elif mark is not None and "layers" in mark:
            if config._attn_implementation not in NAMES:
                raise ValueError(
                    f"this checkpoint is exclusive, and attn_implementation={config._attn_implementation!r} "
                    f"is not: use one of {', '.join(NAMES)}, or remove {MARK!r} and 'attn_implementation' "
                    "from its config.json to load it as a plain model"
                )
            _convert(model, mine, mark["layers"])


def _convert(model: nn.Module, rows: Sequence[Found], layers: Sequence[dict[str, Any]]) -> None:
    from xsa_core.adapters.exclusion import guard_loading

    for layer in layers:
        strength = layer.get("strength")
        settings = Settings(
            layer.get("variant", "xsa"), 1.0 if strength is None else strength, layer.get("backend", "auto")
        )
        chosen = [r for r in rows if CHILD not in r.module._modules and _same(layer["path"], r.path)]
        ADAPTER.check(model, chosen, settings)
        ADAPTER.attach(model, chosen, settings)
    guard_loading(model)


def _same(saved: str, path: str) -> bool:
    """Whether a saved path is this one; a model may sit inside another, on either side."""
    return saved in ("*", path) or path.endswith(f".{saved}") or saved.endswith(f".{path}")


def _set_attn_implementation(plain):
    @functools.wraps(plain)
    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        from xsa_core.adapters.registry import convert, revert

        rows = [r for r in ADAPTER.find(self) if r.kind == SELF]
        before = {id(c): (c, c._attn_implementation) for c in configs(rows)}
        plain(self, attn_implementation, *args, **kwargs)
        if any(c._attn_implementation in NAMES for c, _ in before.values()):
            _complete(self, rows, before, convert)
        for config, _ in before.values():
            if config._attn_implementation not in NAMES and getattr(config, MARK, None) is not None:
                mine = {r.path for r in rows if r.module.config is config}
                name = config._attn_implementation
                revert(self, layers=lambda path, mine=mine: path in mine)
                config._attn_implementation_internal = name

    return set_attn_implementation


def _complete(model, rows, before, convert) -> None:
    """Convert the modules whose config came to name one of our functions; undo all where that fails."""
    new = [c for c, name in before.values() if c._attn_implementation in NAMES and name not in NAMES]
    ids = {id(c) for c in new}
    mine = {r.path for r in rows if id(r.module.config) in ids}
    try:
        if mine:
            for config in new:
                setattr(config, MARK, {"replaces": before[id(config)][1]})
            whole = len(mine) == len(rows)
            convert(model, layers="all" if whole else (lambda path: path in mine))
    except ValueError:
        for config in new:
            config._attn_implementation_internal = before[id(config)][1]
            config.__dict__.pop(MARK, None)
        raise


def _check_and_adjust(plain):
    @functools.wraps(plain)
    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        if attn_implementation == FUSED:
            return attn_implementation
        return plain(self, attn_implementation, *args, **kwargs)

    return _check_and_adjust_attn_implementation


def _post_init(plain):
    @functools.wraps(plain)
    def post_init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        read_marks(self)

    return post_init


def _save_pretrained(plain):
    @functools.wraps(plain)
    def save_pretrained(self, *args, **kwargs):
        marked = write_marks(self)
        try:
            return plain(self, *args, **kwargs)
        finally:
            for config in marked:
                config.__dict__.pop("attn_implementation", None)

    return save_pretrained


_WRAPPERS = {
    "set_attn_implementation": _set_attn_implementation,
    "_check_and_adjust_attn_implementation": _check_and_adjust,
    "post_init": _post_init,
    "save_pretrained": _save_pretrained,
}
