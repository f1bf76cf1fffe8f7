"""Models as a directory of two files, `config.json` and `model.safetensors`, usable without the suite."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xsa_core.files import whole

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
FORMAT = 1


def save_model(model: nn.Module, config: Any, directory: str | Path) -> None:
    """Write a model and its configuration.

    Args:
        model: its `state_dict` is written, tied tensors once.
        config: a dataclass of JSON values, from which `type(model)` can be built.
        directory: made if it is not there. The weights are written first: a directory with a config is
            complete.
    """
    _, save_file = _safetensors()
    directory = Path(directory)
    names: dict[tuple[int, int, tuple[int, ...]], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and key in names:
            tied[name] = names[key]
        else:
            names[key] = name
            tensors[name] = tensor.detach().cpu().contiguous()
    metadata = {"format": "pt", "tied": json.dumps(tied, sort_keys=True)}
    content = {"format": FORMAT, "model": type(model).__name__, **asdict(config)}
    directory.mkdir(parents=True, exist_ok=True)
    with whole(directory / WEIGHTS_FILE) as path:
        save_file(tensors, path, metadata=metadata)
    with whole(directory / CONFIG_FILE) as path:
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_model(kind: type[nn.Module], config_kind: type, directory: str | Path) -> Any:
    """The model that `save_model` wrote, in evaluation mode, on the CPU, in the dtypes it was saved in.

    Raises:
        ValueError: a file is missing or damaged, or belongs to another model; the message names it.
    """
    directory = Path(directory)
    config = _read_config(kind, config_kind, directory / CONFIG_FILE)
    path = directory / WEIGHTS_FILE
    safe_open, _ = _safetensors()
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        raise ValueError(f"{path} is not there: expected the weights that save_pretrained writes") from None
    except Exception as error:  # safetensors raises several types of its own for a damaged file
        raise ValueError(f"{path} cannot be read ({error}): save the model again") from None
    for name, source in json.loads(metadata.get("tied", "{}")).items():
        if source in tensors:
            tensors[name] = tensors[source]
    with torch.device("meta"):
        model = kind(config)
    try:
        model.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit {directory / CONFIG_FILE}: {_one_line(error)}") from None
    retie = getattr(model, "tie_weights", None)
    if retie is not None:
        retie()
    return model.eval()


def _read_config(kind: type[nn.Module], config_kind: type, path: Path) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is not there: expected a directory that save_pretrained wrote") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict) or content.get("model") != kind.__name__:
        found = content.get("model") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} describes {found!r}, expected {kind.__name__!r}")
    version = content.pop("format", None)
    if version != FORMAT:
        raise ValueError(f"{path} has format {version!r}, this version of xsa_core reads {FORMAT}")
    content.pop("model")
    unknown = sorted(set(content) - {f.name for f in fields(config_kind)})
    if unknown:
        raise ValueError(
            f"{path} has unknown settings {', '.join(unknown)}: it is from another version of xsa_core"
        )
    try:
        return config_kind(**content)
    except TypeError as error:
        raise ValueError(f"{path} is incomplete: {error}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _safetensors() -> tuple[Any, Any]:
    """`safe_open` and `save_file`, imported on use: the library itself works without them."""
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError:
        raise ImportError("saving and loading models needs safetensors: pip install safetensors") from None
    return safe_open, save_file
