"""Runs over one, two and four processes, made once for all tests of this folder."""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from results.store import read_record
from tasks.runner import checkpoint
from tasks.runner.metrics import lines
from tasks.runner.paths import ROOT

WORDS = ("the", "value", "of", "an", "attention", "head", "is", "removed", "from", "its", "own", "output")
STEPS = 4
# float64: sums in another order then differ by far less than a bfloat16 step of Newton-Schulz, so that Muon's
# curves can be compared as closely as AdamW's.
SETTINGS = {
    "data.source": "file",
    "data.seq_len": "16",
    "loop.max_steps": str(STEPS),
    "loop.global_batch": "7",  # divides neither over 2 nor over 4
    "loop.micro_batch": "2",
    "loop.eval_every": "2",
    "loop.eval_samples": "5",
    "loop.log_every": "1",
    "loop.clip_norm": "0.5",  # below the norms that occur
    "loop.warmup_steps": "0",
    "loop.precision": "float64",
    "loop.device": "cpu",
    "loop.threads": "1",
    "loop.keep_checkpoints": "9",
    "attention": "xsa_learned",
    "attention.backend": "reference",
    "model.bias": "true",
    "output.tensorboard": "false",
    "output.progress": "none",
    "output.sample_bytes": "8",
}
# What is trained: every kind of parameter is in one of them.
MODELS = {
    "adamw": ("optimizer=adamw", "model.n_sinks=2"),
    "muon": ("optimizer=muon", "model.tie_embeddings=false", "attention=head_norm"),
    "muon_torch": ("optimizer=muon_torch", "model.qk_norm=true", "loop.global_batch=8"),
    "half": ("optimizer=adamw", "loop.precision=bfloat16"),
}
SPREADS = [
    ("adamw", "ddp", 2), ("adamw", "fsdp", 4), ("muon", "ddp", 4), ("muon", "fsdp", 2),
    ("muon_torch", "ddp", 2), ("muon_torch", "fsdp", 4), ("half", "fsdp", 2),
]  # fmt: skip
# Another model, another kind of data: a Vision Transformer of another library, with our attention.
IMAGES = ("experiment=vision/digits", "optimizer=muon", "loop.eval_samples=6")
# A run that is stopped after each step, by a signal to one rank, and goes on in another number of processes.
CHAINS = {
    "4 shards to 2 shards to 1 to 2 copies": [("fsdp", 4), ("fsdp", 2), ("auto", 1), ("ddp", 2)],
    "1 to 2 shards to 4 copies to 1": [("auto", 1), ("fsdp", 2), ("ddp", 4), ("auto", 1)],
}


@dataclass(frozen=True)
class Story:
    """All runs, by name."""

    root: Path
    results: dict[str, list[dict[str, Any]]]

    def run(self, name: str) -> Path:
        """Return the run directory."""
        (directory,) = (self.root / name / "runs").iterdir()
        return directory

    def record(self, name: str) -> Any:
        """Return the record."""
        (path,) = (self.root / name / "records").iterdir()
        return read_record(path)

    def curve(self, name: str, kind: str, value: str) -> list[float]:
        """Return one value of every step."""
        return [line[value] for line in lines(self.run(name) / "metrics.jsonl") if line["kind"] == kind]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Return the weights of the last checkpoint, read by one process."""
        return checkpoint.load(checkpoint.resolve(str(self.run(name)))).content["model"]

    def of_each_rank(self, name: str) -> list[Any]:
        """Return what every rank kept at the end."""
        files = sorted((self.root / name / "ranks").glob("*.pt"))
        return [torch.load(file, weights_only=True) for file in files]


@pytest.fixture(params=[" ".join(map(str, each)) for each in SPREADS if each[0] != "half"])
def spread(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A run over several processes and the same run in one: their names."""
    return request.param, f"{request.param.split()[0]} alone 1"


@pytest.fixture(params=CHAINS)
def chain(request: pytest.FixtureRequest) -> str:
    """The name of a run that changed its number of processes."""
    return request.param


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of seeded words."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("distributed") / "words.txt"
    path.write_text("\n".join(" ".join(draw.choices(WORDS, k=12)) for _ in range(60)))
    return path


def command(root: Path, name: str, words: Path, *changes: str) -> list[str]:
    """Return the command line of a run in a place of its own."""
    chosen = {**SETTINGS, "data.path": str(words)}
    chosen |= {"output.runs": str(root / name / "runs"), "output.records": str(root / name / "records")}
    chosen |= dict(change.split("=", 1) for change in changes)
    experiment = chosen.pop("experiment", "text/tiny")
    if not experiment.startswith("text"):
        chosen = {key: value for key, value in chosen.items() if not key.startswith(("data.", "model."))}
    return ["run", experiment, *(f"{key}={value}" for key, value in chosen.items())]


@pytest.fixture(scope="session")
def story(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Do everything in one go: the forks share an import of torch."""
    root = tmp_path_factory.mktemp("story")
    names, jobs = [], []

    def add(name: str, processes: int, *changes: str, **more: Any) -> None:
        names.append(name)
        out = str(root / name / "ranks")
        jobs.append({"processes": processes, "out": out, "arguments": command(root, name, words, *changes)})
        jobs[-1].update(more)

    for model, changes in MODELS.items():
        add(f"{model} alone 1", 1, *changes)
    for model, strategy, processes in SPREADS:
        name = f"{model} {strategy} {processes}"
        add(name, processes, *MODELS[model], f"loop.strategy={strategy}")
    for strategy, processes in (("auto", 1), ("fsdp", 2)):
        add(f"images {strategy} {processes}", processes, *IMAGES, f"loop.strategy={strategy}")
    for name, chain in CHAINS.items():
        for step, (strategy, processes) in enumerate(chain, start=1):
            stop = {} if step == len(chain) else {"signal": [processes - 1, step]}
            add(name, processes, *MODELS["muon"], f"loop.strategy={strategy}", **stop)
    for processes in (1, 3):
        names.append(f"updates {processes}")
        out = str(root / names[-1] / "ranks")
        jobs.append({"processes": processes, "call": "muon_updates", "out": out})
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("ranks.py"))],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, list[dict[str, Any]]] = {}
    for name, ranks in zip(names, json.loads(done.stdout), strict=True):
        results.setdefault(name, []).append(ranks)
    return Story(root, results)
