"""The manifest of a prepared set: what it was made from and how, what it holds, how to check it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.text.files import write_whole
from tasks.text.prepare.parts import SPLITS, Counts
from tasks.text.prepare.tokenizers import Tokenizer

MANIFEST = "manifest.json"
FORMAT = 1


def build(
    settings: dict[str, Any],
    source: dict[str, Any],
    tokenizer: Tokenizer,
    counts: Counts,
    shards: dict[str, list[dict[str, Any]]],
    corrupt: list[str],
) -> dict[str, Any]:
    """Return the manifest of a finished job; a pure function of its arguments."""
    splits = {
        split: {
            "documents": counts.documents[split],
            "tokens": counts.tokens[split],
            "text_bytes": counts.text_bytes[split],
            "shards": shards[split],
        }
        for split in SPLITS
    }
    result: dict[str, Any] = {
        "format": FORMAT,
        "settings": settings,
        "source": source,
        "tokenizer": {
            "name": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text,
            "sha256": tokenizer.identity,
        },
        "splits": splits,
        "skipped": {
            "documents": dict(sorted(counts.skipped.items())),
            "examples": counts.examples,
            "corrupt": [*corrupt, *counts.corrupt],
        },
    }
    result["notes"] = notes(result)
    return {"fingerprint": fingerprint(result), **result}


def fingerprint(manifest: dict[str, Any]) -> str:
    """Return the sha256 of what decides the tokens: equal for equal shards of the same tokenizer."""
    shards = {split: [row["sha256"] for row in manifest["splits"][split]["shards"]] for split in SPLITS}
    text = json.dumps([manifest["tokenizer"]["sha256"], shards], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def notes(manifest: dict[str, Any]) -> list[str]:
    """Return what a user of the set should know, a line each."""
    result = []
    skipped = manifest["skipped"]
    if not manifest["splits"]["validation"]["documents"]:
        share, count = manifest["settings"]["held_out"], manifest["splits"]["train"]["documents"]
        result.append(f"no document is held out ({share:.6g} of {count}); a larger --held-out gives some")
    if count := sum(skipped["documents"].values()):
        reasons = ", ".join(f"{reason} {number}" for reason, number in skipped["documents"].items())
        result.append(f"{count} documents were skipped ({reasons})")
    if skipped["corrupt"]:
        result.append(f"{len(skipped['corrupt'])} places in the source could not be read")
    return result


def write(directory: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest, whole. Raises OSError."""
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    write_whole(directory / MANIFEST, [text.encode("utf-8")])


def read(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of a set, None without one. Raises UserError for one that cannot be used."""
    path = directory / MANIFEST
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise UserError(f"{path}: cannot be read; prepare the set again with --fresh") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise UserError(f"{path}: format {found}, expected {FORMAT}; prepare the set again with --fresh")
    try:
        if fingerprint(data) != data["fingerprint"]:
            raise UserError(f"{path}: was changed by hand, its fingerprint does not fit; restore it")
    except (KeyError, TypeError):
        raise UserError(f"{path}: not complete; prepare the set again with --fresh") from None
    return data
