"""A corpus from any UTF-8 text file, read in place."""

import codecs
import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.errors import UserError
from tasks.text.corpus import Corpus, fingerprint
from tasks.text.tokenizer import ByteTokenizer

MIN_SPLIT_BYTES = 2  # an input and its target; the loader asks for whole windows
CHUNK_BYTES = 1 << 20
LINE_SEARCH_BYTES = 1 << 12  # how far the cut may move to lie at a line's end


def file_corpus(path: str | Path, validation_fraction: float = 0.1) -> Corpus:
    """Return the bytes of a UTF-8 file, (N,) uint8, mapped, its last `validation_fraction` held out.

    The cut lies after the first line end past the wanted place, or else between two characters. Raises
    UserError, in one line, for a path that is no file, an empty file, one with too few bytes for two splits,
    text that is not UTF-8 (with the byte offset) and a fraction outside (0, 1).
    """
    path = Path(path).expanduser()
    if not 0.0 < validation_fraction < 1.0:
        raise UserError(f"validation_fraction is {validation_fraction}, expected more than 0 and less than 1")
    if not path.is_file():
        what = "a directory" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {what}, expected a UTF-8 text file; give the path of one")
    try:
        size = path.stat().st_size
        check_utf8(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if size == 0:
        raise UserError(f"{path}: the file is empty, expected UTF-8 text; give another file")
    tokens = np.memmap(path, dtype=np.uint8, mode="r")
    cut = _cut(tokens, size - round(size * validation_fraction))
    if min(cut, size - cut) < MIN_SPLIT_BYTES:
        raise UserError(
            f"{path}: {size} bytes are too few: {cut} for training and {size - cut} for validation, "
            f"expected at least {MIN_SPLIT_BYTES} each; give a longer file or another validation_fraction"
        )
    splits = {"train": tokens[:cut], "validation": tokens[cut:]}
    rows = {
        name: {"bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()}
        for name, part in splits.items()
    }
    identity = fingerprint("file", {name: row["sha256"] for name, row in rows.items()})
    manifest = {"fingerprint": identity, "file": path.name, "splits": rows}
    return Corpus(**splits, fingerprint=identity, manifest=manifest, vocab_size=ByteTokenizer.vocab_size)


def check_utf8(path: Path) -> None:
    """Raise UserError with the byte offset of the first place that is not UTF-8; memory is bounded."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0  # of the chunk in the file
    with path.open("rb") as stream:
        while True:
            chunk = stream.read(CHUNK_BYTES)
            pending = len(decoder.getstate()[0])  # bytes of a character that the last chunk's end cut
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                place = offset - pending + error.start
                raise UserError(
                    f"{path}: not UTF-8 at byte {place} ({error.reason}); convert it, for example with iconv"
                ) from None
            offset += len(chunk)
            if not chunk:
                return


def _cut(tokens: NDArray[np.uint8], wanted: int) -> int:
    """Return the place from `wanted` on where a line has just ended, or else a character begins."""
    line_ends = np.flatnonzero(tokens[wanted : wanted + LINE_SEARCH_BYTES] == ord("\n"))
    if len(line_ends) and wanted + int(line_ends[0]) + 1 <= len(tokens) - MIN_SPLIT_BYTES:
        return wanted + int(line_ends[0]) + 1
    while wanted < len(tokens) and tokens[wanted] & 0b1100_0000 == 0b1000_0000:  # inside a character
        wanted += 1
    return wanted
