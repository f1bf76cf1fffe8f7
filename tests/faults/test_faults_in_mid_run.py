"""What may go wrong while a run trains: its data, its numbers, the clock, a second run of it."""

import datetime
import itertools
import time

import numpy as np
import pytest
import torch

import results.parts
from results.store import load_records, read_record
from tasks.errors import UserError
from tasks.runner import checkpoint, cli
from tasks.runner.loop import Trainer
from tasks.runner.progress import Plain
from tasks.text.shards import HEADER_BYTES, write_shard
from tasks.text.task import TextTask

DAMAGED_AT = 4  # the step before which something breaks; the checkpoint of step 3 is there


@pytest.fixture
def shards(tmp_path):
    """Two training shards and one for validation, of bytes."""
    folder = tmp_path / "shards"
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(97, 123, size=6000)
    for name, part in (("train_0", tokens[:2000]), ("train_1", tokens[2000:4000]), ("val_0", tokens[4000:])):
        write_shard(folder / f"{name}.bin", part)
    return folder


def truncate(path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(HEADER_BYTES + 100)


def overwrite(path) -> None:
    with path.open("r+b") as stream:
        stream.seek(HEADER_BYTES)
        stream.write(b"\xff" * 4000)


def remove(path) -> None:
    path.unlink()


def before_step(monkeypatch, step: int, act) -> None:
    """Let `act()` happen once, just before a step."""
    update, done = Trainer.update, []

    def watched(trainer: Trainer):
        if trainer.step + 1 == step and not done:
            done.append(True)
            act()
        return update(trainer)

    monkeypatch.setattr(Trainer, "update", watched)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "bytes now, 5024 when the run began"),
        (overwrite, "holds token 65535, the vocabulary ends at 256"),
        (remove, "can no longer be read"),
    ],
)
def test_a_shard_that_breaks_in_mid_run_is_named_and_the_run_goes_on_when_it_is_back(
    lab, shards, monkeypatch, capsys, damage, said
):
    words = lab.overrides(
        "data.source=shards", f"data.path={shards}", "data.tokenizer=bytes", "loop.checkpoint_every=3"
    )
    whole = {path: path.read_bytes() for path in shards.glob("*train*")}
    with monkeypatch.context() as patch:
        before_step(patch, DAMAGED_AT, lambda: [damage(path) for path in whole])
        assert cli.main(["run", "text/tiny", *words]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert "train_" in line
    assert line.count("\n") == 1
    (record,) = load_records(lab.root / "records")
    assert (record.status, said in record.reason) == ("failed", True)
    for path, content in whole.items():
        path.write_bytes(content)
    assert cli.main(["run", "text/tiny", *words]) == 0
    (record,) = load_records(lab.root / "records")
    assert record.status == "completed"
    assert record.curves["train"].step == list(range(1, 7))


def test_a_loss_that_is_not_a_number_keeps_the_checkpoint_before_it(lab, monkeypatch, capsys):
    words = lab.overrides("loop.checkpoint_every=3")
    loss, steps = TextTask.loss, itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(
            TextTask,
            "loss",
            lambda task, model, batch: (
                loss(task, model, batch) * (torch.nan if model.training and next(steps) == 5 else 1.0)
            ),
        )
        assert cli.main(["run", "text/tiny", *words]) == 1
    assert "step 5: loss nan" in capsys.readouterr().out
    (record,) = load_records(lab.root / "records")
    assert (record.status, record.curves["train"].step) == ("failed", [1, 2, 3, 4])
    (run,) = (lab.root / "runs").iterdir()
    assert [path.stem for path in checkpoint.steps(run / "checkpoints")] == ["step-00000003"]
    assert cli.main(["run", "text/tiny", *words]) == 0  # the fault was outside: the same command goes on
    (record,) = load_records(lab.root / "records")
    assert (record.status, record.curves["train"].step) == ("completed", list(range(1, 7)))


def jumping(monkeypatch, seconds: float) -> None:
    """Let the clock of the wall jump by so much at every look; the monotonic ones go on as ever."""
    looks, true_time, true_now = itertools.count(1), time.time, datetime.datetime.now

    def jump() -> float:
        return seconds * (next(looks) % 1000)  # every look another time, and all within what a date can hold

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return true_now(tz) + datetime.timedelta(seconds=jump())

    monkeypatch.setattr(time, "time", lambda: true_time() + jump())
    monkeypatch.setattr(results.parts, "datetime", Jumping)


@pytest.mark.parametrize("seconds", [-86_400.0, 86_400.0], ids=["back", "forward"])
def test_a_clock_that_jumps_a_day_moves_no_duration_rate_or_progress(lab, monkeypatch, capsys, seconds):
    monkeypatch.setattr("tasks.runner.progress.PLAIN_SECONDS", 0.0)
    began = time.monotonic()
    jumping(monkeypatch, seconds)
    outcome = lab.train("loop.max_steps=12", "output.tensorboard=true", display=Plain())
    took = time.monotonic() - began
    record = read_record(outcome.record_path)  # it can be read: it does not end before it began
    speed = record.throughput
    assert record.status == "completed"
    assert 0 < speed.seconds_training + speed.seconds_evaluation <= took
    tokens = 12 * 4 * 32
    assert speed.tokens_per_second >= tokens / took
    assert all(rate >= tokens / 12 / took for rate in record.curves["train"]["tokens_per_second"])
    lines = [line for line in capsys.readouterr().out.splitlines() if " left" in line]
    assert lines
    # Days would show as hours; what is left here is seconds or, on a busy machine, minutes.
    assert not any(" h left" in line or "-" in line.rpartition(", ")[2] for line in lines)


def run(words: list[str]) -> int:
    return cli.main(["run", "text/tiny", *words])


def test_of_two_runs_in_one_directory_one_is_refused_and_the_other_ends_whole(fork, lab):
    words = lab.overrides("loop.max_steps=60", "loop.checkpoint_every=5", "loop.eval_every=0")
    children = [fork(run, words), fork(run, words)]
    statuses = sorted(child.wait() for child in children)
    texts = [child.text() for child in children]
    assert statuses == [0, 2], texts
    (refused,) = [text for text in texts if "error: " in text]
    assert "this run is under way in another process; wait for it or stop it" in refused
    assert "Traceback" not in refused
    (record,) = load_records(lab.root / "records")
    assert (record.status, record.curves["train"].step) == ("completed", list(range(1, 61)))
    assert cli.main(["run", "text/tiny", *words]) == 0  # done: nothing is run again


def test_two_configs_may_share_a_directory_of_runs(fork, lab):
    children = [fork(run, lab.overrides(f"attention={name}")) for name in ("sa", "xsa")]
    assert [child.wait() for child in children] == [0, 0], [child.text() for child in children]
    assert {record.variant for record in load_records(lab.root / "records")} == {"sa", "xsa"}


def test_a_directory_that_cannot_be_written_is_refused_before_the_training(lab, tmp_path):
    (tmp_path / "a-file").write_text("")
    with pytest.raises(UserError, match=r"output\.records: .* cannot be written .*; give a directory"):
        lab.train(f"output.records={tmp_path / 'a-file' / 'records'}")
