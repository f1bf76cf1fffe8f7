"""A killed or stopped run that goes on ends exactly as one that was never interrupted."""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from results.store import load_records
from tasks.errors import UserError
from tasks.runner import checkpoint, device
from tasks.runner.loop import Trainer
from tasks.runner.metrics import lines
from tasks.runner.progress import Silent

# Dropout makes the generators' state matter; the last of the two micro-batches is the smaller one.
COMMON = (
    "loop.max_steps=9",
    "loop.checkpoint_every=3",
    "loop.eval_every=2",
    "loop.global_batch=4",
    "loop.micro_batch=3",
    "model.dropout=0.2",
    "output.progress=plain",
)
KINDS = {
    "adamw": ("optimizer=adamw", "attention=xsa_learned"),
    "muon": ("optimizer=muon", "loop.precision=bfloat16"),
}
POINTS = {
    "before the first checkpoint": ("update", 2),
    "between checkpoints": ("update", 5),
    "before an optimizer step": ("gradient", 5),
    "half a checkpoint file": ("half-file", 6),
    "checkpoint without manifest": ("no-manifest", 6),
    "first checkpoint without manifest": ("no-manifest", 3),
    "before the record": ("before-record", 0),
}
CASES = [("adamw", point) for point in POINTS] + [
    ("muon", "between checkpoints"),
    ("muon", "checkpoint without manifest"),
]
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


@pytest.fixture(scope="module")
def story(
    make_lab: Callable, tmp_path_factory: pytest.TempPathFactory, in_children: Callable
) -> dict[str, dict[str, Any]]:
    """Every run of this file, made by one script: name -> place, and what each attempt came to."""
    root = tmp_path_factory.mktemp("resume")
    plan: list[tuple[str, dict[str, Any]]] = []

    def add(name: str, kind: str, **job: Any) -> None:
        overrides = make_lab(root / name).overrides(*COMMON, *KINDS[kind])
        plan.append((name, {"arguments": ["run", "text/tiny", *overrides], **job}))

    for kind in KINDS:
        add(f"{kind} whole", kind)
    for kind, point in CASES:
        where, step = POINTS[point]
        add(f"{kind} {point}", kind, kill=where, step=step)
        add(f"{kind} {point}", kind)
    for name, number in SIGNALS.items():
        add(name, "adamw", kill="update", step=4, signal=number)
        add(name, "adamw")
    result: dict[str, dict[str, Any]] = {}
    for (name, _), answer in zip(plan, in_children([job for _, job in plan]), strict=True):
        result.setdefault(name, {"root": root / name, "attempts": []})["attempts"].append(answer)
    return result


def final_checkpoint(root: Path) -> dict[str, Any]:
    """Return the content of the last checkpoint of the one run in a place."""
    (run,) = (root / "runs").iterdir()
    return checkpoint.load(checkpoint.resolve(str(run))).content


def flat(value: Any, at: str = "") -> dict[str, Any]:
    """Return nested state as one dictionary, tensors as bytes: what is equal here is equal bit for bit."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{at}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for n, item in enumerate(value) for k, v in flat(item, f"{at}/{n}").items()}
    if isinstance(value, torch.Tensor):
        return {at: (str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).tolist())}
    return {at: value}


def without_clocks(content: dict[str, Any]) -> dict[str, Any]:
    """Return all of a checkpoint but the times it took and where it wrote."""
    clocks = ("seconds", "rates", "peak_memory", "tokens_per_second", "output")
    return {key: value for key, value in flat(content).items() if not any(word in key for word in clocks)}


@pytest.mark.parametrize(("kind", "point"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_killed_and_resumed_run_ends_bit_identical(story: dict, kind: str, point: str) -> None:
    whole, broken = story[f"{kind} whole"], story[f"{kind} {point}"]
    assert [attempt["signal"] for attempt in broken["attempts"]] == [signal.SIGKILL, None]
    assert broken["attempts"][1]["status"] == 0, broken["attempts"][1]["stderr"]
    want, got = (without_clocks(final_checkpoint(place["root"])) for place in (whole, broken))
    assert len([key for key in want if key.startswith("/model/")]) > 5
    assert any(key.startswith("/optimizer/state") for key in want)
    assert any(key.startswith("/rng/torch") for key in want)
    assert want.keys() == got.keys()
    assert [key for key in want if want[key] != got[key]] == []


@pytest.mark.parametrize(("kind", "point"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_resumed_record_says_what_the_whole_one_says(story: dict, kind: str, point: str) -> None:
    (want,) = load_records(story[f"{kind} whole"]["root"] / "records")
    (got,) = load_records(story[f"{kind} {point}"]["root"] / "records")
    assert got.status == "completed"
    assert got.metrics == want.metrics
    assert got.data == want.data
    assert got.model == want.model
    for name in ("train", "validation"):
        assert got.curves[name]["step"] == want.curves[name]["step"]
        assert got.curves[name]["loss"] == want.curves[name]["loss"]


@pytest.mark.parametrize(
    ("point", "step"),
    [
        ("before the first checkpoint", None),
        ("first checkpoint without manifest", None),
        ("between checkpoints", 3),
        ("half a checkpoint file", 3),
        ("checkpoint without manifest", 3),
        ("before the record", 9),
    ],
)
def test_resume_starts_from_the_newest_whole_checkpoint(story: dict, point: str, step: int | None) -> None:
    told = [
        line for line in story[f"adamw {point}"]["attempts"][1]["stdout"].splitlines() if "resuming" in line
    ]
    assert told == ([] if step is None else [f"resuming from step-{step:08d}.pt, step {step} of 9"])


@pytest.mark.parametrize("name", ["adamw " + point for point in POINTS] + list(SIGNALS))
def test_metrics_file_has_every_step_once(story: dict, name: str) -> None:
    (run,) = (story[name]["root"] / "runs").iterdir()
    written = lines(run / "metrics.jsonl")
    steps = {
        kind: [line["step"] for line in written if line["kind"] == kind] for kind in ("train", "validation")
    }
    assert steps == {"train": list(range(1, 10)), "validation": [2, 4, 6, 8, 9]}
    (whole,) = (story["adamw whole"]["root"] / "runs").iterdir()
    want = [(line["step"], line["kind"], line["loss"]) for line in lines(whole / "metrics.jsonl")]
    assert [(line["step"], line["kind"], line["loss"]) for line in written] == want


@pytest.mark.parametrize("name", ["adamw " + point for point in POINTS])
def test_no_half_written_file_is_left(story: dict, name: str) -> None:
    (run,) = (story[name]["root"] / "runs").iterdir()
    assert [path.name for path in run.rglob("*.tmp")] == []
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == [f"step-{step:08d}.{kind}" for step in (6, 9) for kind in ("json", "pt")]


@pytest.mark.parametrize("name", list(SIGNALS))
def test_signal_writes_a_checkpoint_and_the_run_goes_on(story: dict, name: str) -> None:
    stopped, resumed = story[name]["attempts"]
    assert stopped["status"] == 128 + SIGNALS[name]
    assert f"interrupted, stopped by {name} after step 4" in stopped["stdout"]
    assert "Traceback" not in stopped["stderr"]
    assert resumed["status"] == 0
    want, got = (without_clocks(final_checkpoint(story[key]["root"])) for key in ("adamw whole", name))
    assert [key for key in want if want[key] != got[key]] == []


class Notes(Silent):
    """Keeps the lines a run shows."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def stop_after(patch: pytest.MonkeyPatch, step: int) -> None:
    """Ask every run to stop once it has made `step` steps."""
    update = Trainer.update

    def ask(trainer: Trainer) -> tuple[float, float, float]:
        if trainer.step + 1 == step:
            trainer.stop_signal = signal.SIGTERM
        return update(trainer)

    patch.setattr(Trainer, "update", ask)


def test_interrupted_run_is_recorded_as_such(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after(monkeypatch, 3)
    outcome = lab.train()
    assert outcome.exit_status == 128 + signal.SIGTERM
    assert outcome.record.status == "interrupted"
    assert outcome.record.reason == "stopped by SIGTERM after step 3"
    (saved,) = checkpoint.steps(outcome.run_directory / "checkpoints")
    assert saved.name == "step-00000003.pt"
    assert json.loads(outcome.record_path.read_text())["status"] == "interrupted"


def test_a_second_ctrl_c_stops_at_once_and_is_recorded(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Trainer.update

    def impatient(trainer: Trainer) -> tuple[float, float, float]:
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGINT)  # the first asks for the end of the step
            assert trainer.stop_signal == signal.SIGINT
            os.kill(os.getpid(), signal.SIGINT)
        return update(trainer)

    monkeypatch.setattr(Trainer, "update", impatient)
    before = signal.getsignal(signal.SIGINT)
    outcome = lab.train()
    assert outcome.exit_status == 128 + signal.SIGINT
    assert (outcome.record.status, outcome.record.reason) == ("interrupted", "stopped at once")
    assert outcome.record.curves["train"].step == [1, 2]
    assert checkpoint.steps(outcome.run_directory / "checkpoints") == []
    assert signal.getsignal(signal.SIGINT) is before


def test_resume_takes_threads_and_precision_of_the_checkpoint(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = ("loop.threads=0", "loop.precision=auto", "loop.device=cpu")
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        patch.setattr(device, "available_cores", lambda: 1)
        patch.setattr(device, "cpu_bfloat16_unit", lambda: None)
        first = lab.train(*auto)
    assert (first.record.environment.threads, first.record.environment.precision) == (1, "float32")
    monkeypatch.setattr(device, "available_cores", lambda: 2)
    monkeypatch.setattr(device, "cpu_bfloat16_unit", lambda: "AMX")
    seen: set[int] = set()
    update = Trainer.update

    def watch(trainer: Trainer) -> tuple[float, float, float]:
        seen.add(torch.get_num_threads())
        return update(trainer)

    monkeypatch.setattr(Trainer, "update", watch)
    notes = Notes()
    outcome = lab.train(*auto, display=notes)
    assert outcome.record.status == "completed"
    assert (outcome.record.environment.threads, outcome.record.environment.precision) == (1, "float32")
    assert seen == {1}
    assert notes.lines == [
        "using 1 threads, as the checkpoint did (here it would be 2)",
        "computing in float32, as the checkpoint did (here it would be bfloat16)",
        "resuming from step-00000001.pt, step 1 of 6",
    ]


def test_a_checkpoint_of_more_processes_goes_on_and_says_so(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        state_dict = Trainer.state_dict
        patch.setattr(Trainer, "state_dict", lambda trainer: {**state_dict(trainer), "world_size": 2})
        lab.train()
    notes = Notes()
    outcome = lab.train(display=notes)
    assert outcome.record.status == "completed"
    assert notes.lines[0].startswith("the checkpoint is of 2 processes, this run has 1")


def test_changed_data_are_refused(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "mine.txt"
    content = lab.text.read_bytes()
    text.write_bytes(content)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        lab.train(f"data.path={text}")
    text.write_bytes(content[:100] + b"X" + content[101:])  # as long as before
    with pytest.raises(UserError, match="data have changed") as raised:
        lab.train(f"data.path={text}")
    assert "\n" not in str(raised.value)
    assert lab.train(f"data.path={text}", fresh=True).record.status == "completed"


def test_a_run_that_goes_on_from_its_last_step_does_not_touch_its_checkpoint(lab, monkeypatch):
    one = "loop.keep_checkpoints=1"
    first = lab.train(one)
    first.record_path.unlink()  # as if the disk had been full when it was to be written

    def full(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    again = lab.train(one)
    assert again.record.status == "completed"
    assert again.record.metrics == first.record.metrics
    assert checkpoint.load(checkpoint.resolve(str(again.run_directory))).content["step"] == 6
