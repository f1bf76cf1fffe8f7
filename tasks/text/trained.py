"""A trained decoder with its tokenizer and its history, from a checkpoint or an exported directory.

An exported directory holds `config.json` and `model.safetensors`, which `xsa_core.GPT.from_pretrained` reads
without the suite, and `xsa.json`: the tokenizer's name and which run the weights come from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.errors import UserError
from tasks.text.files import write_whole
from tasks.text.task import build_gpt
from tasks.text.tokenizer import ByteTokenizer
from xsa_core import GPT, weights_sha256

HISTORY_FILE = "xsa.json"
FORMAT = "xsa-export"
VERSION = 1
NEWLINE = 10  # stands before a text where the tokenizer has no end of text: documents begin on a new line


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode with what is needed to use it and to say what it is.

    Attributes:
        model: the decoder, on the CPU, in the dtype it was saved in.
        tokenizer: with `name`, `vocab_size`, `encode`, `decode` and, but for plain bytes, `end_of_text`.
        history: what is known of the training: run_id, experiment, variant, attention, optimizer, seed, step,
            config_hash, pair_hash, cell_hash, data_fingerprint. Empty for a model without history.
    """

    model: GPT
    tokenizer: Any
    history: dict[str, Any] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return [int(i) for i in self.tokenizer.encode(text)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; those beyond the tokenizer's (a padded vocabulary's) become nothing."""
        return self.tokenizer.decode(i for i in ids if i < self.tokenizer.vocab_size)

    @property
    def end_of_text(self) -> int | None:
        """The token between documents, if the tokenizer has one."""
        return getattr(self.tokenizer, "end_of_text", None)

    @property
    def prefix_token(self) -> int:
        """The token a text without context follows: end of text, a newline where there is none."""
        return NEWLINE if self.end_of_text is None else self.end_of_text

    def weights_sha256(self) -> str:
        """Return the hash of all parameters: names, shapes, dtypes and bits."""
        both = weights_sha256(self.model) + weights_sha256(self.model, variant=True)
        return hashlib.sha256(both.encode()).hexdigest()


def tokenizer_for(vocab_size: int, name: str | None = None) -> Any:
    """Return the tokenizer of a model: by name, else the one that its vocabulary is known for.

    256 ids are bytes, 257 bytes with an end of text, 50257 and more (padded) GPT-2's.

    Raises:
        UserError: none has so many, or the named one has more than the model.
    """
    if name is None and vocab_size not in (256, 257) and vocab_size < 50257:
        raise UserError(
            f"a vocabulary of {vocab_size} is none of a known tokenizer's (256 or 257 bytes, 50257 or more "
            "GPT-2's); name one with --tokenizer"
        )
    name = name or ("bytes" if vocab_size < 50257 else "gpt2")
    if name == "bytes" and vocab_size == 256:
        return ByteTokenizer()
    from tasks.text.prepare.tokenizers import make_tokenizer

    tokenizer = make_tokenizer(name)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer {name} has {tokenizer.vocab_size} tokens, the model {vocab_size}; name the one that "
            "it was trained with"
        )
    return tokenizer


def from_weights(
    config: Any, weights: Mapping[str, Tensor], history: dict[str, Any], tokenizer: str | None = None
) -> Trained:
    """Return the model of a run's config with a checkpoint's weights, in their dtype.

    Raises:
        UserError: weights of another model.
    """
    try:
        vocab_size = weights["embedding.weight"].shape[0]
        with torch.device("meta"):
            model = build_gpt(config, vocab_size)
        model.load_state_dict(dict(weights), assign=True)
    except (KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the checkpoint's weights do not fit its own config ({reason}); use another"
        ) from None
    model.tie_weights()
    return Trained(model.eval().requires_grad_(False), tokenizer_for(vocab_size, tokenizer), history)


def is_exported(directory: Path) -> bool:
    """Return whether a directory looks like one that `save_pretrained` or `export_model` wrote."""
    return (directory / "config.json").is_file() and (directory / "model.safetensors").is_file()


def export_model(trained: Trained, directory: Path) -> None:
    """Write `config.json`, `model.safetensors` and `xsa.json`, each whole.

    Raises:
        UserError: the directory cannot be written, or is a run directory.
    """
    history = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": trained.tokenizer.name,
        "weights_sha256": trained.weights_sha256(),
        "history": trained.history,
    }
    if (directory / "checkpoints").exists():
        raise UserError(f"{directory}: a run directory; export into another one")
    try:
        trained.model.save_pretrained(directory)
        write_whole(directory / HISTORY_FILE, [(json.dumps(history, indent=2) + "\n").encode()])
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written ({error.strerror or error}); give a directory that can"
        ) from None


def import_model(directory: Path, tokenizer: str | None = None) -> Trained:
    """Return what `export_model` wrote; a directory of `save_pretrained` alone has no history.

    Raises:
        UserError: not such a directory, damaged, or weights that are not those that were exported.
    """
    try:
        model = GPT.from_pretrained(directory).requires_grad_(False)
    except ValueError as error:
        raise UserError(str(error)) from None
    content = _read_history(directory / HISTORY_FILE)
    named = tokenizer or (content["tokenizer"] if content else None)
    found = Trained(
        model,
        tokenizer_for(model.config.vocab_size, named),
        content["history"] if content else {"variant": model.config.variant},
    )
    if content and found.weights_sha256() != content["weights_sha256"]:
        raise UserError(
            f"{directory}: model.safetensors holds other weights than {HISTORY_FILE} speaks of; export again"
        )
    return found


def _read_history(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        content = None
    wanted = {"tokenizer": str, "weights_sha256": str, "history": dict}
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: damaged, not what ./xsa export writes; export again, or remove the file")
    if content.get("version") != VERSION:
        raise UserError(
            f"{path}: of export version {content.get('version')}, this version of the suite reads {VERSION}"
        )
    if any(not isinstance(content.get(key), kind) for key, kind in wanted.items()):
        raise UserError(f"{path}: incomplete, expected {', '.join(wanted)}; export again")
    return content
