"""Small sets of recordings in every layout."""

import io
import json

import numpy as np
import pytest
import soundfile
import webdataset

from tasks.runner.config.compose import load_config
from tasks.runner.progress import Silent
from tasks.runner.registry import load_task
from tasks.speech import synthetic

SMALL = ("model.n_layers=2", "model.d_model=16", "model.n_heads=2")


def tone(number, rate=8000, seconds=0.4):
    """Samples of a tone that depends on the number alone."""
    time = np.arange(round(rate * seconds)) / rate
    return (0.3 * np.sin(2 * np.pi * (200 + 37 * number) * time)).astype(np.float32)


def encoded(samples, rate=8000, kind="WAV"):
    """Bytes of an audio file."""
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, format=kind)
    return stream.getvalue()


@pytest.fixture(scope="session")
def few(tmp_path_factory):
    """Synthetic speech of a few utterances, in a cache of its own."""
    patch = pytest.MonkeyPatch()
    place = tmp_path_factory.mktemp("speech")
    patch.setattr(synthetic, "cache_root", lambda: place)
    patch.setitem(synthetic.RECIPES, "words", synthetic.Recipe("words", 76, 38))
    patch.setitem(synthetic.RECIPES, "sentences", synthetic.Recipe("sentences", 24, 12))
    yield
    patch.undo()


@pytest.fixture
def speech(few):
    """How to open a task: speech("words", "attention=sa", ...)."""

    def open_(experiment, *overrides):
        config = load_config(f"speech/{experiment}", (*SMALL, *overrides))
        return load_task(config.task).open(config, Silent())

    return open_


@pytest.fixture
def digits(tmp_path):
    """Free Spoken Digits' layout: three speakers, train and test shards."""
    root = tmp_path / "digits"
    root.mkdir()
    number = 0
    for name, takes in (("train-0.tar", (5, 6)), ("test-0.tar", (0,))):
        with webdataset.TarWriter(str(root / name)) as writer:
            for take in takes:
                for speaker in ("ann", "bob", "cem"):
                    for digit in range(3):
                        number += 1
                        facts = {"speaker": speaker, "digit": digit}
                        sound = encoded(tone(number, seconds=0.2 + 0.01 * number))
                        key = f"{digit}_{speaker}_{take}"
                        writer.write(
                            {"__key__": key, "wav": sound, "cls": digit, "json": json.dumps(facts).encode()}
                        )
    return root


@pytest.fixture
def librispeech(tmp_path):
    """LibriSpeech's layout: two splits of two utterances each, 16 kHz FLAC."""
    root = tmp_path / "LibriSpeech"
    for split in ("train-clean-100", "dev-clean"):
        place = root / split / "1" / "2"
        place.mkdir(parents=True)
        lines = []
        for number in range(2):
            name = f"1-2-{number:04d}"
            (place / f"{name}.flac").write_bytes(encoded(tone(number, 16000, 1.0), 16000, "FLAC"))
            lines.append(f"{name} SO IT'S {'ONE' if number else 'TWO'}")
        (place / "1-2.trans.txt").write_text("".join(f"{line}\n" for line in lines))
    return root
