"""What the config of a model says of its conversion: at run time, in config.json, and back from it.

An entry `xsa` holds `replaces` (the attention function before), and in a file `layers`: path, variant,
strength and backend of each, one entry with the path `*` where all are alike.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from xsa_core.adapters.base import SELF, UNSUPPORTED, Found, Settings
from xsa_core.adapters.exclusion import CHILD, Exclusion, guard_loading
from xsa_core.adapters.hf.adapter import ADAPTER, FUSED, IMPLEMENTATIONS
from xsa_core.adapters.hf.attention import MARK
from xsa_core.adapters.hf.layer import holders

NAMES = (*IMPLEMENTATIONS.values(), FUSED)
BY_NAME = "by_name"  # in a mark: a model was built under one of our names, all of it


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


def name_plain_function(config: Any, parts: bool = True) -> None:
    """Let the modules of a config attend as before the conversion; `parts`: forget it in its parts too."""
    mark = getattr(config, MARK, None) or {}
    if config._attn_implementation in NAMES:
        config._attn_implementation_internal = mark.get("replaces") or "sdpa"
    forget(config, parts)


def forget(config: Any, parts: bool = True) -> None:
    """Take from a config, and from its parts, what it says of a conversion."""
    for each in tree(config) if parts else (config,):
        for name in (MARK, "attn_implementation"):
            each.__dict__.pop(name, None)


def tree(config: Any) -> list[Any]:
    """A config and its parts."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return [config, *(c for part in parts if part is not None for c in tree(part))]


def shared(model: nn.Module) -> bool:
    """Whether another model, which is converted, holds the config of this one or a part of it."""
    held = {
        id(c): c for m in (model, *model.modules()) if isinstance(c := getattr(m, "config", None), _config())
    }
    every = {id(c): c for config in held.values() for c in tree(config)}
    return any(holders(config, but=model) for config in every.values())


def separate(model: nn.Module) -> None:
    """Give a model configs of its own; those under which nothing of it is converted name a plain function.

    One copy stands for all that was one object, so that parts which shared a config still do.
    """
    memo: dict[int, Any] = {}
    fresh: dict[int, Any] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, _config()):
                own = copy.deepcopy(value, memo)
                module.__dict__[name] = own
                fresh |= {id(c): c for c in tree(own)}
    used = {id(getattr(m, "config", None)) for m in model.modules() if CHILD in m._modules}
    for key, config in fresh.items():
        if key not in used:
            name_plain_function(config, parts=False)


def _config() -> type:
    from transformers import PreTrainedConfig

    return PreTrainedConfig


def write_mark(model: nn.Module) -> bool:
    """Let the config of a model say which of its layers are converted, and how; whether any is.

    The root says it for all: parts may hold copies of configs that are never written.

    Raises:
        ValueError: layers of other libraries are converted, which a config could not bring back.
    """
    _refuse_others(model)
    rows = [row for row in ADAPTER.find(model) if row.kind == SELF]
    layers = [
        {"path": row.path, "variant": e.variant_name, "strength": e.strength, "backend": e.backend}
        for row, e in ((row, row.module._modules.get(CHILD)) for row in rows)
        if isinstance(e, Exclusion)
    ]
    if not layers:
        forget(model.config)
        return False
    if len(layers) == len(rows) and len({(x["variant"], x["strength"], x["backend"]) for x in layers}) == 1:
        layers = [{**layers[0], "path": "*"}]
    setattr(model.config, MARK, {**(getattr(model.config, MARK, None) or {}), "layers": layers})
    model.config.attn_implementation = _implementations(model.config, _names_in_use(rows))
    return True


def _refuse_others(model: nn.Module) -> None:
    mine = {row.path for row in ADAPTER.find(model)}
    others = [
        path
        for path, module in model.named_modules()
        if isinstance(module, Exclusion) and path.rpartition(".")[0] not in mine
    ]
    if others:
        raise ValueError(
            f"{len(others)} exclusive layers ({others[0].rpartition('.')[0]}, ...) are of other libraries, "
            "and config.json tells of those of transformers only: keep model.state_dict() with torch.save "
            "and convert the model it is loaded into, or revert the model before save_pretrained"
        )


def _names_in_use(rows: Sequence[Found]) -> list[str]:
    return [c._attn_implementation for c in configs(rows) if c._attn_implementation in NAMES]


def _implementations(config: Any, used: Sequence[str]) -> str | dict[str, Any]:
    """The attention functions of a config and its parts, as transformers reads them from a file.

    Where only copies of a config name one of ours (T5), the root does, so that it is refused without us.
    """

    def of(part: Any) -> str | dict[str, Any]:
        parts = {name: getattr(part, name, None) for name in part.sub_configs}
        inner = {name: of(each) for name, each in parts.items() if each is not None}
        return {"": part._attn_implementation, **inner} if inner else part._attn_implementation

    found = of(config)
    if any(repr(name) in repr(found) for name in NAMES):
        return found
    return {**found, "": used[0]} if isinstance(found, dict) else used[0]


def read_mark(model: nn.Module) -> None:
    """Convert what the config of a model says is converted, while the model is built.

    Parts of a model are built before it, and see only the ends of the paths: what they make of them is
    corrected by the model around them.

    Raises:
        ValueError: the config says exclusive and the attention function asked for is a plain one.
    """
    found = ADAPTER.find(model)
    rows = [row for row in found if row.kind == SELF]
    layers = (getattr(model.config, MARK, None) or {}).get("layers")
    if layers is not None:
        _refuse_plain(model.config)
        for row in rows:
            _make(model, row, _saved(layers, row.path))
    else:
        for row in found:
            config = getattr(row.module, "config", model.config)
            if row.kind == UNSUPPORTED and getattr(config, "_attn_implementation", None) in NAMES:
                raise ValueError(f"{row.path} ({row.cls}) cannot be converted: {row.reason}")
        for config in configs(rows):
            mark = getattr(config, MARK, None)
            if config._attn_implementation in NAMES and (mark is None or BY_NAME in mark):
                name_function(config)
                getattr(config, MARK)[BY_NAME] = True  # parts that share it are built one after the other
                for row in (row for row in rows if row.module.config is config):
                    _make(model, row, {})
    mark_plain_parts(found)
    guard_loading(model)


def mark_plain_parts(found: Sequence[Found]) -> None:
    """Let parts without self attention, whose configs got one of our names too, compute plain attention."""
    for config in configs(row for row in found if hasattr(row.module, "config")):
        if config._attn_implementation in NAMES and getattr(config, MARK, None) is None:
            name_function(config)


def _refuse_plain(config: Any) -> None:
    """Refuse a plain attention function that was asked for by name, or would be the default."""
    parts = [getattr(config, name, None) for name in config.sub_configs]
    names = {c._attn_implementation for c in (config, *parts) if c is not None}
    if not names & set(NAMES):
        asked = config._attn_implementation
        raise ValueError(
            f"this checkpoint is exclusive, and attn_implementation={asked!r} is not: use one of "
            f"{', '.join(NAMES)}, or remove {MARK!r} and 'attn_implementation' from its config.json to load "
            "it as a plain model"
        )


def _saved(layers: Sequence[dict[str, Any]], path: str) -> dict[str, Any] | None:
    """What was saved for a path: the same one, or the longest that is its end or has it as its end."""
    fits = [
        x
        for x in layers
        if x["path"] in ("*", path) or path.endswith(f".{x['path']}") or x["path"].endswith(f".{path}")
    ]
    exact = [x for x in fits if x["path"] == path]
    return (exact or sorted(fits, key=lambda x: -len(x["path"])) or [None])[0]


def _make(model: nn.Module, row: Found, wanted: dict[str, Any] | None) -> None:
    """Convert one layer as it was saved; make it plain where it was not converted."""
    present = row.module._modules.get(CHILD)
    if wanted is None:
        if present is not None:
            ADAPTER.detach(model, [row])
        return
    strength = wanted.get("strength")
    settings = Settings(
        wanted.get("variant", "xsa"), 1.0 if strength is None else strength, wanted.get("backend", "auto")
    )
    if present is not None:
        if (present.variant_name, present.backend) == (settings.variant, settings.backend):
            if present.strength is not None:
                present.set_strength(settings.strength)
            return
        ADAPTER.detach(model, [row])
    ADAPTER.check(model, [row], settings)
    ADAPTER.attach(model, [row], settings)
