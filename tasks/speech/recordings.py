"""Recordings with what is said in them: one class per layout, samples decoded by soundfile."""

import hashlib
import io
import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tasks.errors import UserError
from tasks.samples.order import seeded_words
from tasks.samples.shards import Shards, find_shards
from tasks.speech.config import SpeechDataConfig
from tasks.speech.synthetic import RATE, Spoken

AUDIO = ("wav", "flac", "ogg", "mp3")
ALPHABET = " '" + "".join(map(chr, range(ord("a"), ord("z") + 1)))


class Recordings(Protocol):
    """Undecoded recordings."""

    fingerprint: str

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return what a message calls the recording."""

    def audio(self, index: int) -> tuple[NDArray[np.float32], int]:
        """Return samples (N,) in -1..1 and their rate in Hz. Raises OSError, ValueError, RuntimeError."""

    def said(self, index: int) -> str:
        """Return the word, or the sentence."""

    def seconds(self, index: int) -> float:
        """Return the length, without decoding."""


class SpokenRecordings:
    """Utterances in memory."""

    def __init__(self, spoken: Spoken) -> None:
        self.spoken, self.fingerprint = spoken, spoken.fingerprint

    def __len__(self) -> int:
        return len(self.spoken.texts)

    def name(self, index: int) -> str:
        """Return number and voice."""
        return f"utterance {index} ({self.spoken.voices[index]})"

    def audio(self, index: int) -> tuple[NDArray[np.float32], int]:
        """Return samples and rate."""
        return self.spoken.utterance(index).astype(np.float32) / 2**15, RATE

    def said(self, index: int) -> str:
        """Return the text."""
        return self.spoken.texts[index]

    def seconds(self, index: int) -> float:
        """Return the length."""
        return len(self.spoken.utterance(index)) / RATE


class FileRecordings:
    """Audio files below a folder, each with what is said in it."""

    def __init__(self, root: Path, said: Sequence[tuple[str, str]]) -> None:
        if not said:
            raise UserError(f"{root}: no recordings; see the layout that data.source names")
        self.root, self.files = root, list(said)
        missing = next((path for path, _ in self.files if not (root / path).is_file()), None)
        if missing is not None:
            raise UserError(f"{root / missing}: named in the list of recordings, but not there; fetch it")
        sizes = [(root / path).stat().st_size for path, _ in self.files]
        self.fingerprint = hashlib.sha256(repr((self.files, sizes)).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        """Return the path below the folder."""
        return self.files[index][0]

    def audio(self, index: int) -> tuple[NDArray[np.float32], int]:
        """Return samples and rate."""
        return decode(self.root / self.files[index][0])

    def said(self, index: int) -> str:
        """Return the text."""
        return self.files[index][1]

    def seconds(self, index: int) -> float:
        """Return the length by the file's header, 0 where it cannot be read."""
        return length_of(self.root / self.files[index][0])


class ShardRecordings:
    """Webdataset samples with audio, `cls` (the class's number) and, for speakers, `json`."""

    def __init__(self, shards: Shards, chosen: Sequence[int] | None = None) -> None:
        self.shards = shards
        self.chosen = list(range(len(shards))) if chosen is None else list(chosen)
        if not self.chosen:
            raise UserError(f"{shards.paths[0].parent}: no recordings on one side of the split")
        key = f"{shards.fingerprint} {self.chosen if chosen is not None else 'all'}"
        self.fingerprint = hashlib.sha256(key.encode()).hexdigest()
        first = set(shards.members[0])
        if not first & set(AUDIO) or "cls" not in first:
            raise UserError(
                f"{shards.names[0]}: has {', '.join(sorted(first))}; expected cls and {' or '.join(AUDIO)}"
            )

    def __len__(self) -> int:
        return len(self.chosen)

    def name(self, index: int) -> str:
        """Return shard and key."""
        return self.shards.names[self.chosen[index]]

    def audio(self, index: int) -> tuple[NDArray[np.float32], int]:
        """Return samples and rate."""
        return decode(io.BytesIO(self._sound(index)))

    def said(self, index: int) -> str:
        """Return the class's number as text."""
        files = self.shards.read(self.chosen[index])
        if "cls" not in files:
            raise ValueError("has no cls")
        return files["cls"].decode("ascii").strip()

    def seconds(self, index: int) -> float:
        """Return the length by the header, 0 where it cannot be read."""
        try:
            return length_of(io.BytesIO(self._sound(index)))
        except (OSError, ValueError):
            return 0.0

    def _sound(self, index: int) -> bytes:
        files = self.shards.read(self.chosen[index])
        name = next((name for name in AUDIO if name in files), None)
        if name is None:
            raise ValueError(f"has {', '.join(sorted(files))}; expected audio")
        return files[name]


def decode(file: Any) -> tuple[NDArray[np.float32], int]:
    """Return the first channel's samples and the rate. Raises soundfile's RuntimeError."""
    import soundfile

    samples, rate = soundfile.read(file, dtype="float32", always_2d=True)
    return samples.mean(axis=1), rate


def length_of(file: Any) -> float:
    """Return seconds by the header, 0 where it cannot be read."""
    import soundfile

    try:
        return soundfile.info(file).duration
    except (RuntimeError, OSError):
        return 0.0


def spelled(text: str) -> str:
    """Return a transcript in the letters that are predicted: a to z, apostrophe and single spaces.

    >>> spelled("Café — DON'T  stop!")
    "cafe don't stop"
    """
    plain = unicodedata.normalize("NFKD", text).lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    kept = "".join(c if c in ALPHABET else "" if unicodedata.combining(c) else " " for c in plain)
    return " ".join(kept.split())


def open_digits(data: SpeechDataConfig, root: Path) -> list[ShardRecordings]:
    """Open Free Spoken Digits: by its own split, or with the test speakers heard in the test alone."""
    paths = [
        find_shards(root, data.train or "train-*.tar"),
        find_shards(root, data.validation or "test-*.tar"),
    ]
    if data.split == "official":
        return [ShardRecordings(Shards(own)) for own in paths]
    shards = Shards(paths[0] + paths[1])
    speakers = []
    for index in range(len(shards)):
        try:
            speakers.append(json.loads(shards.read(index)["json"])["speaker"])
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(f"{shards.names[index]}: no speaker in its json; leave out data.split") from error
    absent = set(data.test_speakers) - set(speakers)
    if absent:
        known = ", ".join(sorted(set(speakers)))
        raise UserError(f"data.test_speakers: nobody called {min(absent)}; expected some of {known}")
    held = [index for index, speaker in enumerate(speakers) if speaker in data.test_speakers]
    rest = [index for index, speaker in enumerate(speakers) if speaker not in data.test_speakers]
    return [ShardRecordings(shards, rest), ShardRecordings(shards, held)]


def open_speech_commands(data: SpeechDataConfig, root: Path) -> list[FileRecordings]:
    """Open WORD/*.wav; validation_list.txt names the files that are held out, testing_list.txt others."""
    lists = {}
    for name in ("validation_list.txt", "testing_list.txt"):
        if not (root / name).is_file():
            raise UserError(f"{root / name}: not there; expected the Speech Commands data set, unpacked")
        lists[name] = set((root / name).read_text(encoding="utf-8").split())
    words = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] not in "._")
    every = [(f"{word}/{path.name}", word) for word in words for path in sorted((root / word).glob("*.wav"))]
    held = set().union(*lists.values())
    train = [row for row in every if row[0] not in held]
    return [
        FileRecordings(root, train),
        FileRecordings(root, [row for row in every if row[0] in lists["validation_list.txt"]]),
    ]


def open_ljspeech(data: SpeechDataConfig, root: Path) -> list[FileRecordings]:
    """Open LJSpeech's metadata.csv; which clips are held out follows from a hash of their names."""
    root = root / "LJSpeech-1.1" if (root / "LJSpeech-1.1").is_dir() else root
    table = root / "metadata.csv"
    if not table.is_file():
        raise UserError(f"{table}: not there; expected the LJ Speech data set, unpacked")
    rows = [line.split("|") for line in table.read_text(encoding="utf-8").splitlines() if line.strip()]
    odd = next((number for number, row in enumerate(rows, 1) if len(row) != 3), None)
    if odd is not None:
        raise UserError(f"{table}:{odd}: expected ID|TRANSCRIPT|NORMALIZED TRANSCRIPT")
    limit = int(data.validation_fraction * 2**64)
    sides: list[list[tuple[str, str]]] = [[], []]
    for name, _, text in rows:
        held = int(seeded_words(1, "ljspeech", name)[0]) < limit
        sides[held].append((f"wavs/{name}.wav", text))
    return [FileRecordings(root, side) for side in sides]


def open_librispeech(data: SpeechDataConfig, root: Path) -> list[FileRecordings]:
    """Open LibriSpeech's SPLIT/SPEAKER/CHAPTER/*.flac with their *.trans.txt."""
    root = root / "LibriSpeech" if (root / "LibriSpeech").is_dir() else root
    return [
        FileRecordings(root, transcripts(root, data.train or "train-clean-100")),
        FileRecordings(root, transcripts(root, data.validation or "dev-clean")),
    ]


def transcripts(root: Path, split: str) -> list[tuple[str, str]]:
    """Return (file below root, transcript) of one split."""
    if not (root / split).is_dir():
        raise UserError(f"{root / split}: no such folder; expected a split of LibriSpeech, unpacked")
    rows = []
    for table in sorted((root / split).glob("*/*/*.trans.txt")):
        for line in table.read_text(encoding="utf-8").splitlines():
            name, _, text = line.partition(" ")
            rows.append((str((table.parent / f"{name}.flac").relative_to(root)), text))
    return rows


OPENERS = {
    "digits": open_digits,
    "speech_commands": open_speech_commands,
    "ljspeech": open_ljspeech,
    "librispeech": open_librispeech,
}
