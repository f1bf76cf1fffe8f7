"""Walk over every model type of transformers: python -m xsa_core.adapters.hf.walk [TYPE ... | I/N]

Builds one model of each type on the meta device from its default config, cut to a few layers, looks for its
attention, and where all of it can be converted, converts it and runs it once (on the meta device too, so that
shapes are checked and nothing is computed). Writes what it found to `coverage.json`, which is the coverage
table; takes some minutes. With types, or with a part such as 1/8, only their entries are written anew.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xsa_core.adapters.base import LEFT_ALONE, SELF, UNSUPPORTED
from xsa_core.adapters.layer import plain_class
from xsa_core.files import whole

FILE = Path(__file__).with_name("coverage.json")
LAYERS = 3
_DEPTHS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers")


def model_types() -> dict[str, str]:
    """Every model type of transformers -> a class of it, a whole model rather than one with a head."""
    from transformers.models.auto import modeling_auto

    maps = ["MODEL_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]
    maps += sorted(n for n in dir(modeling_auto) if n.startswith("MODEL_") and n.endswith("_MAPPING_NAMES"))
    types: dict[str, str] = {}
    for name in maps:
        for key, cls in getattr(modeling_auto, name).items():
            types.setdefault(key, cls if isinstance(cls, str) else cls[0])
    return types


def build(model_type: str, cls: str) -> nn.Module:
    """A model of a type on the meta device, few layers deep where its config lets itself be cut."""
    import transformers

    model_class = getattr(transformers, cls)
    known = transformers.CONFIG_MAPPING
    config = known[model_type]() if model_type in known else model_class.config_class()
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for depth in _DEPTHS:
            listed = getattr(part, "layer_types", None) is not None
            if part is not None and not listed and isinstance(getattr(part, depth, None), int):
                setattr(part, depth, min(LAYERS, getattr(part, depth)))
    with torch.device("meta"):
        return model_class(config).eval()


def look(model: nn.Module) -> dict[str, Any]:
    """Attention classes of a model by kind, and whether it can be converted."""
    from xsa_core.adapters.registry import describe

    classes: dict[str, dict[str, str]] = {}
    kinds: set[str] = set()
    for row in describe(model):
        cls = plain_class(model.get_submodule(row.path))
        entry = {"kind": row.kind, "reason": row.reason, "adapter": row.adapter, "path": row.path}
        if row.kind not in (SELF, UNSUPPORTED, *LEFT_ALONE):
            entry |= {"kind": UNSUPPORTED, "reason": "no adapter knows it", "adapter": ""}
        kinds.add(entry["kind"])
        name = f"{cls.__module__}.{cls.__qualname__}"
        before = classes.get(name, entry)
        if {before["kind"], entry["kind"]} == {SELF, UNSUPPORTED}:  # converted in one place, not in another
            before, entry = (before, entry) if before["kind"] == SELF else (entry, before)
            before["elsewhere"] = entry["reason"]
        elif before["kind"] in LEFT_ALONE and entry["kind"] in (SELF, UNSUPPORTED):
            before = entry  # what decides about the model
        classes[name] = before
    return {"convertible": SELF in kinds and UNSUPPORTED not in kinds, "classes": classes}


def run(model: nn.Module) -> list[str]:
    """Convert a model on the meta device and run it; the attention classes that were seen to attend."""
    from xsa_core.adapters.registry import convert, converted_layers

    convert(model.to(torch.bfloat16))  # experts multiply in nothing else on the meta device
    model.set_attn_implementation("xsa_eager")
    seen: set[str] = set()
    for path, exclusion in converted_layers(model).items():
        cls = plain_class(model.get_submodule(path))
        name = f"{cls.__module__}.{cls.__qualname__}"
        exclusion.observer = lambda *call, name=name: seen.add(name)
    with torch.device("meta"), torch.no_grad():
        arguments = example(model)
        model(**{k: x.bfloat16() if x.is_floating_point() else x for k, x in arguments.items()})
    return sorted(seen)


def example(model: nn.Module) -> dict[str, torch.Tensor]:
    """Arguments for one forward, of zeros."""
    config, name = model.config, model.main_input_name
    ids = torch.zeros(1, 8, dtype=torch.long)
    if name == "pixel_values":
        part = getattr(config, "vision_config", config)
        size = getattr(part, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        arguments = {name: torch.zeros(1, getattr(part, "num_channels", 3), height, width)}
    elif name == "input_values":
        arguments = {name: torch.zeros(1, 8000)}
    elif name == "input_features":
        bins = getattr(config, "num_mel_bins", 80)
        arguments = {name: torch.zeros(1, bins, 2 * getattr(config, "max_source_positions", 64))}
    else:
        arguments = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        arguments["decoder_input_ids"] = ids
    return arguments


def visit(model_type: str, cls: str) -> dict[str, Any]:
    """One entry of the file."""
    try:
        model = build(model_type, cls)
        entry = {"model": cls, **look(model)}
    except Exception as error:
        return {"model": cls, "not_built": _line(error)}
    if entry["convertible"]:
        try:
            entry["ran"] = run(model)
        except Exception as error:
            entry["not_run"] = _line(error)
    return entry


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def main(arguments: list[str]) -> None:
    """Visit the types named, a part of all, or all, and write the file."""
    import transformers
    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    types = model_types()
    chosen = list(types)
    if arguments:
        part, _, parts = arguments[0].partition("/")
        chosen = sorted(types)[int(part) - 1 :: int(parts)] if parts else arguments
    entries = {name: visit(name, types[name]) for name in chosen}
    old = json.loads(FILE.read_text(encoding="utf-8"))["types"] if arguments and FILE.exists() else {}
    content = {"transformers": transformers.__version__, "types": dict(sorted({**old, **entries}.items()))}
    with whole(FILE) as path:
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
