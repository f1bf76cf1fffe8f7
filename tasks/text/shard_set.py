"""A directory of token shards as a corpus: a set of `./xsa data prepare`, or shards that people already have.

A prepared set states its tokenizer in its manifest. Other directories, of llm.c, modded-nanogpt or (asked for
as headerless) nanoGPT, need the tokenizer named; their files are told apart by `train` and `val` in the name.
Nothing is read beyond headers and, without a manifest, the ends of every shard.
"""

import hashlib
from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.text.corpus import Corpus, fingerprint
from tasks.text.prepare import manifest as manifests
from tasks.text.prepare.tokenizers import TOKENIZERS, Tokenizer, make_tokenizer
from tasks.text.shards import TokenShards

END_BYTES = 1 << 16  # of either end of a shard without manifest: what its identity rests on, beside its size
PATTERNS = {"train": "*train*.bin", "validation": "*val*.bin"}


def open_shard_set(
    path: str | Path, tokenizer: str | None = None, *, headerless: bool = False
) -> tuple[Corpus, Tokenizer]:
    """Return the corpus of a directory of shards, memory-mapped, and its tokenizer.

    Raises UserError for a directory without shards of both splits, a damaged shard, a tokenizer that is not
    the manifest's, or none where there is no manifest.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        what = "a file" if directory.exists() else "no such directory"
        raise UserError(f"{directory}: {what}, expected a directory of .bin shards; give the path of one")
    manifest = manifests.read(directory)
    if manifest is not None:
        return _prepared(directory, manifest, tokenizer, headerless)
    if (directory / ".work").is_dir():
        raise UserError(
            f"{directory}: its preparation did not finish; give the same ./xsa data prepare again"
        )
    if tokenizer is None:
        raise UserError(
            f"{directory}: no manifest says how its text was tokenized; "
            f"name it, data.tokenizer={' or '.join(TOKENIZERS)}"
        )
    found = {split: sorted(directory.glob(pattern)) for split, pattern in PATTERNS.items()}
    for split, paths in found.items():
        if not paths:
            raise UserError(
                f"{directory}: no {split} shards, expected files {PATTERNS[split]}; check data.path"
            )
    content = {split: [_ends(path) for path in paths] for split, paths in found.items()}
    identity = fingerprint("shards", tokenizer, headerless, content)
    notes = ["shards without a manifest: identified by their sizes and ends"]
    return _corpus(found, make_tokenizer(tokenizer), headerless, identity, {"notes": notes})


def _prepared(
    directory: Path, manifest: dict[str, Any], tokenizer: str | None, headerless: bool
) -> tuple[Corpus, Tokenizer]:
    stated = manifest["tokenizer"]
    if headerless:
        raise UserError(f"{directory}: its shards have headers, its manifest says; leave out data.headerless")
    if tokenizer not in (None, stated["name"]):
        raise UserError(
            f"{directory}: was tokenized with {stated['name']}, not {tokenizer}; leave out data.tokenizer"
        )
    known = make_tokenizer(stated["name"])
    if known.identity != stated["sha256"]:
        raise UserError(
            f"{directory}: made with another version of {known.name}; prepare it again with --fresh"
        )
    found = {}
    for split, facts in manifest["splits"].items():
        if not facts["shards"]:
            raise UserError(
                f"{directory}: no {split} documents; prepare it again with --fresh and a larger --held-out"
            )
        found[split] = [directory / row["file"] for row in facts["shards"]]
    corpus, _ = _corpus(found, known, False, manifest["fingerprint"], manifest)
    for split, tokens in (("train", corpus.train), ("validation", corpus.validation)):
        if len(tokens) != manifest["splits"][split]["tokens"]:
            raise UserError(
                f"{directory}: {len(tokens)} {split} tokens, its manifest says "
                f"{manifest['splits'][split]['tokens']}; see ./xsa data verify {directory}"
            )
    return corpus, known


def _corpus(
    found: dict[str, list[Path]],
    tokenizer: Tokenizer,
    headerless: bool,
    identity: str,
    manifest: dict[str, Any],
) -> tuple[Corpus, Tokenizer]:
    opened = {
        split: TokenShards(paths, headerless=headerless, vocab_size=tokenizer.vocab_size)
        for split, paths in found.items()
    }
    corpus = Corpus(opened["train"], opened["validation"], identity, manifest, tokenizer.vocab_size)
    return corpus, tokenizer


def _ends(path: Path) -> list[Any]:
    """Return the size of a file and the sha256 of its first and last bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            digest = hashlib.sha256(stream.read(END_BYTES))
            stream.seek(max(0, size - END_BYTES))
            digest.update(stream.read(END_BYTES))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    return [size, digest.hexdigest()]
