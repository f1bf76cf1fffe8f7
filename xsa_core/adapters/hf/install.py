"""Registration with transformers, and what makes a converted model load as converted or not at all.

Besides its public registries (`AttentionInterface`, `AttentionMaskInterface`), `Cache.update` (see `layer`)
and five methods of `PreTrainedModel` are wrapped, because the library has no other place for it:

    set_attn_implementation                  a name of ours converts the model, another one reverts it
    _check_and_adjust_attn_implementation    names with "flash" are looked up as kernels of a hub otherwise
    post_init                                a config that says so gives a converted model
    save_pretrained                          the config says what is converted, with which strength
    _move_missing_keys_from_meta_to_device   from_pretrained empties buffers that are in no file: the strength

config.json then holds `attn_implementation`, a name that transformers refuses as long as
`xsa_core.adapters.transformers` is not imported, and `xsa`, from which the layers are converted.
"""

from __future__ import annotations

import functools

from xsa_core.adapters.base import SELF
from xsa_core.adapters.exclusion import Exclusion
from xsa_core.adapters.hf import attention, masks
from xsa_core.adapters.hf.adapter import ADAPTER, FUSED
from xsa_core.adapters.hf.attention import MARK
from xsa_core.adapters.hf.layer import recording
from xsa_core.adapters.hf.marks import (
    NAMES,
    configs,
    mark_plain_parts,
    read_mark,
    separate,
    shared,
    tree,
    write_mark,
)

_installed = False


def install() -> None:
    """Register the attention functions, once."""
    global _installed
    if _installed:
        return
    from transformers import AttentionInterface
    from transformers.cache_utils import Cache, StaticLayer
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
    from transformers.modeling_utils import PreTrainedModel

    mask_functions = {"xsa_eager": eager_mask, "xsa_sdpa": sdpa_mask, "xsa_flash": masks.flash_style_mask}
    for name in NAMES:
        AttentionInterface.register(name, getattr(attention, name))
        AttentionMaskInterface.register(name, mask_functions[name])
    for name, wrapper in _WRAPPERS.items():
        setattr(PreTrainedModel, name, wrapper(getattr(PreTrainedModel, name)))
    Cache.update = recording(Cache.update, StaticLayer)
    _installed = True


def _set_attn_implementation(plain):
    @functools.wraps(plain)
    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        from xsa_core.adapters.registry import convert, revert

        if shared(self):
            separate(self)
        rows = [r for r in ADAPTER.find(self) if r.kind == SELF]
        before = {id(c): (c, c._attn_implementation) for c in configs(rows)}
        plain(self, attn_implementation, *args, **kwargs)
        if any(c._attn_implementation in NAMES for c, _ in before.values()):
            _complete(self, rows, before, convert)
        elif attn_implementation in NAMES:
            convert(self)  # none of its attention took the name: say which and why
        mark_plain_parts(ADAPTER.find(self))
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
        read_mark(self)

    return post_init


def _save_pretrained(plain):
    @functools.wraps(plain)
    def save_pretrained(self, *args, **kwargs):
        kept = [(c, getattr(c, MARK, None)) for c in tree(self.config)]
        converted = write_mark(self)
        try:
            return plain(self, *args, **kwargs)
        finally:
            self.config.__dict__.pop("attn_implementation", None)
            (getattr(self.config, MARK, None) or {}).pop("layers", None)
            if not converted and shared(self):  # what the config says is said of another model
                for config, mark in kept:
                    if mark is not None:
                        setattr(config, MARK, mark)

    return save_pretrained


def _move_missing_keys(plain):
    @functools.wraps(plain)
    def _move_missing_keys_from_meta_to_device(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        for module in self.modules():
            if isinstance(module, Exclusion) and module.strength is not None:
                module.set_strength(module.strength)

    return _move_missing_keys_from_meta_to_device


_WRAPPERS = {
    "set_attn_implementation": _set_attn_implementation,
    "_check_and_adjust_attn_implementation": _check_and_adjust,
    "post_init": _post_init,
    "save_pretrained": _save_pretrained,
    "_move_missing_keys_from_meta_to_device": _move_missing_keys,
}
