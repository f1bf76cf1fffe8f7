"""The embedded tier: words, digits and short sentences said by eSpeak NG, built once and kept in the cache.

Voices of the test side are heard in no training utterance, and sentences of the test side stand in none.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from tasks.samples.order import seeded_words
from tasks.speech.espeak import Speaker
from xsa_core.files import cache_root, whole

VERSION = 1  # of what is said and how; another one is another cache file
RATE = 8000  # Hz of what is kept
WORDS = (
    "yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go", "zero", "one", "two", "three",
    "four", "five", "six", "seven", "eight", "nine", "bed", "bird", "cat", "dog", "happy", "house", "tree",
    "wow", "bad", "bat", "pin", "bin", "ship", "sheep", "fan", "van", "light", "night",
)  # fmt: skip
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SUBJECTS = ("the cat", "a dog", "my bird", "one ship", "the old house", "a happy sheep", "the red van")
VERBS = ("sees", "finds", "wants", "likes", "follows", "turns to", "has")
OBJECTS = ("two trees", "the light", "a small fan", "nine pins", "the night", "his bed", "six bats", "a bin")
ENDS = ("", "today", "at night", "on the left", "by the house", "again")
ACCENTS = ("en-us", "en-029", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan")
# f2, f3 and f5 breathe: their noise is another one every time.
TRAINING_VARIANTS = ("m1", "m2", "m3", "m4", "m5", "m6", "f1", "belinda", "anika")
TEST_VARIANTS = ("m7", "m8", "f4", "Annie")
SPEEDS = (120, 260)  # words per minute, from and below
PITCHES = (20, 80)  # of 100
TEST_SENTENCES = 0.2  # share of the sentences that only the test side says


@dataclass(frozen=True)
class Line:
    """What is said, and how."""

    text: str
    voice: str
    words_per_minute: int
    pitch: int


@dataclass(frozen=True)
class Spoken:
    """One side of the set: samples of all utterances in a row, where each ends, and what was said."""

    audio: NDArray[np.int16]
    ends: NDArray[np.int64]
    texts: list[str]
    voices: list[str]
    fingerprint: str

    def utterance(self, index: int) -> NDArray[np.int16]:
        """Return the samples (N,) of one utterance."""
        return self.audio[(self.ends[index - 1] if index else 0) : self.ends[index]]


@dataclass(frozen=True)
class Recipe:
    """How many utterances of what."""

    kind: str  # words, digits or sentences
    train: int
    test: int


RECIPES = {
    "words": Recipe("words", 3000, 1520),
    "digits": Recipe("digits", 1500, 600),
    "sentences": Recipe("sentences", 2400, 600),
}


def sentences(*, train: bool) -> list[str]:
    """Return all sentences of one side; which side a sentence is on follows from a hash."""
    every = [
        " ".join(filter(None, parts))
        for parts in (
            (subject, verb, thing, end)
            for subject in SUBJECTS
            for verb in VERBS
            for thing in OBJECTS
            for end in ENDS
        )
    ]
    limit = int(TEST_SENTENCES * 2**32)
    return [text for text in every if (_hashed(text) >= limit) == train]


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def script(recipe: Recipe, *, train: bool) -> list[Line]:
    """Return what one side says, in order: every text as often as any other, voice and manner by chance."""
    words = {"words": WORDS, "digits": DIGITS}
    texts = list(words[recipe.kind]) if recipe.kind in words else sentences(train=train)
    count = recipe.train if train else recipe.test
    variants = TRAINING_VARIANTS if train else TEST_VARIANTS
    draws = seeded_words(5 * count, "speech", recipe.kind, train).reshape(count, 5)
    start = np.argsort(seeded_words(len(texts), "texts", recipe.kind, train), kind="stable")
    lines = []
    for number, (accent, variant, speed, pitch, _) in enumerate(draws.tolist()):
        text = texts[start[number % len(texts)]]
        voice = f"{ACCENTS[accent % len(ACCENTS)]}+{variants[variant % len(variants)]}"
        rates = SPEEDS[0] + speed % (SPEEDS[1] - SPEEDS[0]), PITCHES[0] + pitch % (PITCHES[1] - PITCHES[0])
        lines.append(Line(text, voice, *rates))
    return lines


def synthetic(kind: str, report: Callable[[str, float], None]) -> tuple[Spoken, Spoken]:
    """Return training and test side, said now or read from the cache.

    Raises:
        UserError: eSpeak NG is not installed.
        OSError: the cache cannot be written.
    """
    recipe = RECIPES[kind]
    path = cache_root() / f"speech-{kind}-{VERSION}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        found = _read(path)
        if found is None:
            _write(path, recipe, report)
            found = _read(path)
    if found is None:
        raise OSError(f"{path}: cannot be read back; remove it and try again")
    return found


def _write(path: Path, recipe: Recipe, report: Callable[[str, float], None]) -> None:
    arrays: dict[str, NDArray] = {}
    total, done = recipe.train + recipe.test, 0
    for side in ("train", "test"):
        lines = script(recipe, train=side == "train")
        pieces = []
        for samples in _said(lines):
            pieces.append(samples)
            done += 1
            if done % 50 == 0 or done == total:
                report(f"saying {recipe.kind}", done / total)
        arrays[f"{side}_audio"] = np.concatenate(pieces)
        arrays[f"{side}_ends"] = np.cumsum([len(piece) for piece in pieces])
        facts = {"texts": [line.text for line in lines], "voices": [line.voice for line in lines]}
        arrays[f"{side}_facts"] = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
        arrays[f"{side}_sha256"] = np.frombuffer(_digest(arrays, side).encode(), dtype=np.uint8)
    with whole(path) as temporary, temporary.open("xb") as stream:
        np.savez(stream, **arrays)


def _said(lines: list[Line]) -> Iterator[NDArray[np.int16]]:
    """Yield the samples of every line at RATE Hz."""
    import torch
    from torchaudio.functional import resample

    speaker = Speaker()
    for line in lines:
        samples = speaker.say(line.text, line.voice, line.words_per_minute, line.pitch)
        wave = torch.from_numpy(samples.astype(np.float32))
        lower = resample(wave, speaker.sample_rate, RATE)
        yield lower.round().clamp(-(2**15), 2**15 - 1).numpy().astype(np.int16)


def _digest(arrays, side: str) -> str:
    digest = hashlib.sha256()
    for name in ("audio", "ends", "facts"):
        digest.update(np.ascontiguousarray(arrays[f"{side}_{name}"]).tobytes())
    return digest.hexdigest()


def _read(path: Path) -> tuple[Spoken, Spoken] | None:
    """Return both sides, None where the file is absent or damaged."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        sides = []
        for side in ("train", "test"):
            digest = _digest(arrays, side)
            if bytes(arrays[f"{side}_sha256"]).decode() != digest:
                return None
            facts = json.loads(bytes(arrays[f"{side}_facts"]))
            columns = arrays[f"{side}_audio"], arrays[f"{side}_ends"], facts["texts"], facts["voices"]
            sides.append(Spoken(*columns, digest))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return sides[0], sides[1]
