"""Very small runs on generated text, shared by the tests of the runner."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.runner.config.compose import load_config
from tasks.runner.config.schema import RunConfig
from tasks.runner.paths import ROOT
from tasks.runner.progress import Silent
from tasks.runner.training import Outcome, train

WORDS = ("the", "value", "of", "an", "attention", "head", "is", "removed", "from", "its", "own", "output")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A UTF-8 file of 600 lines of seeded words, about 35 kB."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(" ".join(draw.choices(WORDS, k=12)) for _ in range(600)))
    return path


@dataclass(frozen=True)
class Lab:
    """A place for runs of experiment text/tiny, cut down to what a test needs."""

    text: Path
    root: Path

    def overrides(self, *changes: str) -> list[str]:
        """Return the overrides of a small, quiet run in this place; `changes` win."""
        chosen = {
            "data.source": "file",
            "data.path": str(self.text),
            "data.seq_len": "32",
            "loop.max_steps": "6",
            "loop.log_every": "1",
            "loop.eval_every": "3",
            "loop.threads": "1",
            "loop.precision": "float32",
            "output.runs": str(self.root / "runs"),
            "output.records": str(self.root / "records"),
            "output.tensorboard": "false",
            "output.progress": "none",
        }
        for change in changes:
            key, _, value = change.partition("=")
            chosen[key] = value
        return [f"{key}={value}" for key, value in chosen.items()]

    def config(self, *changes: str) -> RunConfig:
        """Return the resolved config of such a run."""
        return load_config("text/tiny", self.overrides(*changes))

    def train(self, *changes: str, fresh: bool = False, display: Any = None) -> Outcome:
        """Train it in this process."""
        return train(self.config(*changes), display or Silent(), fresh=fresh)

    def at(self, name: str) -> "Lab":
        """Return a place of its own below this one."""
        return Lab(self.text, self.root / name)


@pytest.fixture(scope="session")
def make_lab(text_file: Path) -> Callable[[Path], Lab]:
    """Return a function that makes a folder a place for runs."""
    return lambda root: Lab(text_file, root)


@pytest.fixture
def lab(make_lab: Callable[[Path], Lab], tmp_path: Path) -> Lab:
    """A fresh place for runs."""
    return make_lab(tmp_path)


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    """One thread, as the runs here take, and for the next test again as many as there were."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def in_children() -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Run command lines in processes of their own, each maybe killed at a chosen point: see children.py."""

    def run(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        script = Path(__file__).with_name("children.py")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, str(script)],
            input=json.dumps(jobs),
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
