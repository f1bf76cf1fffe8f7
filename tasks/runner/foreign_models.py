"""Models of timm and Hugging Face transformers, and the images or the text that they read.

Nothing is downloaded unless it was asked for: weights come from files, or are random and said to be.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.errors import UserError

IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}
READ = 1 << 20  # characters of text read at a time
SPECIAL = "timm:NAME or hf:DIRECTORY"
RANDOM = "random weights: give --weights FILE, or --pretrained to download them"


@dataclass(frozen=True)
class Foreign:
    """A model of another library and what it reads.

    Attributes:
        model: in evaluation mode. name: as the user gave it. weights: where they come from, in words.
        image: path -> a tensor `C H W`, or None for a model of text.
        tokens: text -> ids, or None for a model of images.
    """

    model: nn.Module
    name: str
    weights: str
    image: Callable[[Path], Tensor] | None = None
    tokens: Callable[[str], list[int]] | None = None


def load(spec: str, *, images: bool, weights: str | None, pretrained: bool) -> Foreign:
    """Return the model that `timm:NAME` or `hf:DIRECTORY` names.

    Raises:
        UserError: no such model, directory or file, or one that does not fit.
    """
    library, _, name = spec.partition(":")
    if library not in ("timm", "hf") or not name:
        raise UserError(f"--model {spec}: expected {SPECIAL}")
    if library == "timm":
        return _timm(spec, name, images, weights, pretrained)
    if weights is not None:
        raise UserError("--weights belongs to timm:NAME; the weights of hf:DIRECTORY lie in the directory")
    return _transformers(spec, name, images, pretrained)


def _timm(spec: str, name: str, images: bool, weights: str | None, pretrained: bool) -> Foreign:
    import timm

    if not images:
        raise UserError(f"--model {spec} reads images: give --images DIRECTORY")
    if weights is not None and not Path(weights).is_file():
        raise UserError(f"--weights {weights}: no such file")
    known = timm.list_models()
    if name.partition(".")[0] not in known:
        close = ", ".join(difflib.get_close_matches(name, known, n=3)) or "one of timm.list_models()"
        raise UserError(f"--model {spec}: timm has no model {name!r}; did you mean {close}?")
    try:
        model = timm.create_model(name, pretrained=pretrained, checkpoint_path=weights or "").eval()
    except Exception as error:  # whatever a file or a hub throws: one line, not a traceback of theirs
        raise UserError(f"--model {spec}: {first_line(error)}") from error
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    origin = f"weights from {weights}" if weights else "pretrained weights of timm"
    if not weights and not pretrained:
        origin = RANDOM
    return Foreign(model, spec, origin, image=lambda path: transform(_picture(path)))


def _transformers(spec: str, name: str, images: bool, pretrained: bool) -> Foreign:
    import transformers

    import xsa_core.adapters.transformers  # noqa: F401  a saved exclusive model loads as one

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where = Path(name).expanduser()
    if not pretrained and not (where / "config.json").is_file():
        raise UserError(
            f"--model {spec}: no config.json in {where}; expected a directory that save_pretrained wrote, or "
            "--pretrained with a name on the hub"
        )
    source: str = str(where) if where.is_dir() else name
    local = not pretrained
    try:
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=local)
        stored = pretrained or any(any(where.glob(f"*.{end}")) for end in ("safetensors", "bin"))
        if stored:
            model = transformers.AutoModel.from_pretrained(source, local_files_only=local)
        else:
            model = transformers.AutoModel.from_config(config)
        reader: Any = transformers.AutoImageProcessor if images else transformers.AutoTokenizer
        reader = reader.from_pretrained(source, local_files_only=local)
    except Exception as error:  # as above
        raise UserError(f"--model {spec}: {first_line(error)}") from error
    origin = f"weights from {source}" if stored else "random weights: the directory holds none"
    if images:
        return Foreign(
            model.eval(),
            spec,
            origin,
            image=lambda path: reader(_picture(path), return_tensors="pt")["pixel_values"][0],
        )
    return Foreign(
        model.eval(), spec, origin, tokens=lambda text: reader(text, add_special_tokens=False)["input_ids"]
    )


def _picture(path: Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise UserError(
            f"--images: {path} is no image that can be read ({first_line(error)}); remove it"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of a message that another library wrote."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def image_files(directory: str) -> list[Path]:
    """Return the images below a directory, in the order of their names.

    Raises:
        UserError: no such directory, or no image in it.
    """
    folder = Path(directory).expanduser()
    if not folder.is_dir():
        raise UserError(f"--images {directory}: no such directory")
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGES and p.is_file())
    if not found:
        raise UserError(
            f"--images {directory}: no image there; expected files that end in {', '.join(sorted(IMAGES))}"
        )
    return found


def image_batches(foreign: Foreign, directory: str, samples: int, batch: int) -> Iterator[Tensor]:
    """Yield batches `B C H W` of at most `samples` images; one batch is in memory at a time."""
    assert foreign.image is not None
    files = image_files(directory)[:samples]
    for start in range(0, len(files), batch):
        pictures = [foreign.image(path) for path in files[start : start + batch]]
        if len({p.shape for p in pictures}) > 1:
            raise UserError(
                "--images: the model's preprocessing gives images of several sizes; use --batch 1"
            )
        yield torch.stack(pictures)


def text_windows(foreign: Foreign, file: str, length: int, samples: int) -> Iterator[list[int]]:
    """Yield at most `samples` windows of `length` tokens, one after the other, from the start of a file.

    Raises:
        UserError: no such file, not UTF-8, or too short for one window.
    """
    assert foreign.tokens is not None
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"--text {file}: no such file")
    held: list[int] = []
    given = 0
    try:
        with path.open(encoding="utf-8") as stream:
            while given < samples and (text := stream.read(READ)):
                held += foreign.tokens(text)
                while len(held) >= length and given < samples:
                    yield held[:length]
                    held, given = held[length:], given + 1
    except UnicodeDecodeError as error:
        raise UserError(f"--text {file}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not given:
        raise UserError(
            f"--text {file}: {len(held)} tokens, and a window has {length}; give --length or more text"
        )


def text_batches(foreign: Foreign, file: str, length: int, samples: int, batch: int) -> Iterator[dict]:
    """Yield keyword arguments for the model: ids `B T`."""
    windows: list[list[int]] = []
    for window in text_windows(foreign, file, length, samples):
        windows.append(window)
        if len(windows) == batch:
            yield _arguments(foreign.model, windows)
            windows = []
    if windows:
        yield _arguments(foreign.model, windows)


def _arguments(model: nn.Module, windows: list[list[int]]) -> dict[str, Any]:
    ids = torch.tensor(windows)
    arguments: dict[str, Any] = {"input_ids": ids}
    config: Any = model.config
    if config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids
    if hasattr(config, "use_cache"):
        arguments["use_cache"] = False
    return arguments


def longest(model: nn.Module) -> int | None:
    """Return how many tokens a model of text takes, if its config says."""
    config: Any = getattr(model.config, "text_config", model.config)
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    return next((getattr(config, n) for n in names if isinstance(getattr(config, n, None), int)), None)
