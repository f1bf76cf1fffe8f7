"""Checks of a prepared set: every byte against the manifest, every token against the tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.errors import UserError
from tasks.text.files import sha256_of
from tasks.text.prepare import manifest as manifests
from tasks.text.prepare.parts import SPLITS
from tasks.text.shards import open_shard

CHUNK_TOKENS = 1 << 24


@dataclass
class Check:
    """What was found in one shard, or in a split as a whole (`shards` counts them)."""

    split: str
    shards: int
    tokens: int
    documents: int
    problems: list[str]


def verify(directory: Path, *, quick: bool = False) -> tuple[dict[str, Any], list[Check]]:
    """Return the manifest and what was found, a row per split.

    `quick` compares sizes and headers alone; otherwise every token is read. Raises UserError where there is
    no set to check.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory, expected one that ./xsa data prepare made")
    manifest = manifests.read(directory)
    if manifest is None:
        left = (
            " (its preparation did not finish: give the same command again)" if _unfinished(directory) else ""
        )
        raise UserError(f"{directory}: no {manifests.MANIFEST}{left}; expected a set of ./xsa data prepare")
    checks = [_check_split(directory, split, manifest, quick) for split in SPLITS]
    named = {row["file"] for split in SPLITS for row in manifest["splits"][split]["shards"]}
    extra = sorted(path.name for path in directory.glob("*.bin") if path.name not in named)
    checks[0].problems += [f"{directory / name}: not in the manifest; move it elsewhere" for name in extra]
    return manifest, checks


def _unfinished(directory: Path) -> bool:
    return (directory / ".work").is_dir()


def _check_split(directory: Path, split: str, manifest: dict[str, Any], quick: bool) -> Check:
    facts, tokenizer = manifest["splits"][split], manifest["tokenizer"]
    check = Check(split, len(facts["shards"]), 0, 0, [])
    for row in facts["shards"]:
        path = directory / row["file"]
        try:
            tokens = open_shard(path)
        except UserError as error:
            check.problems.append(str(error))
            continue
        check.tokens += len(tokens)
        if len(tokens) != row["tokens"]:
            check.problems.append(f"{path}: {len(tokens)} tokens, expected {row['tokens']}")
        if quick:
            continue
        if sha256_of(path) != row["sha256"]:
            check.problems.append(f"{path}: its content is not what the manifest says (sha256)")
        for start in range(0, len(tokens), CHUNK_TOKENS):
            chunk = tokens[start : start + CHUNK_TOKENS]
            check.documents += int(np.count_nonzero(chunk == tokenizer["end_of_text"]))
            if (worst := int(chunk.max())) >= tokenizer["vocab_size"]:
                check.problems.append(f"{path}: token {worst}, expected less than {tokenizer['vocab_size']}")
    if not check.problems:
        if check.tokens != facts["tokens"]:
            check.problems.append(f"{split}: {check.tokens} tokens in all, expected {facts['tokens']}")
        if not quick and check.documents != facts["documents"]:
            check.problems.append(f"{split}: {check.documents} documents, expected {facts['documents']}")
    return check
