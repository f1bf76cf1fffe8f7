"""A run from the command line to its files: record, curves, checkpoint, metrics, sample; and mistakes."""

import importlib.metadata
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from results.record import RunRecord
from results.store import read_record
from tasks.runner import checkpoint, cli, device
from tasks.runner.metrics import lines

CHANGES = ("output.tensorboard=true", "output.sample_bytes=40", "loop.checkpoint_every=2", "loop.max_steps=7")


@pytest.fixture(scope="module")
def finished(make_lab: Callable, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run from the command line with everything on: its place, its run directory and its record."""
    lab = make_lab(tmp_path_factory.mktemp("run"))
    assert cli.main(["run", "text/tiny", *lab.overrides(*CHANGES)]) == 0
    (run,), (record,) = (lab.root / "runs").iterdir(), (lab.root / "records").iterdir()
    return lab, run, record


def test_record_on_disk_says_what_was_done(finished: Any) -> None:
    lab, run, path = finished
    record = read_record(path)
    assert isinstance(record, RunRecord)
    assert record.status == "completed"
    assert path.name == f"{run.name}.json"
    config = lab.config(*CHANGES)
    assert record.config_hash == config.config_hash()
    assert record.run_id == config.run_id()
    assert (record.pair_hash, record.cell_hash) == (config.pair_hash(), config.cell_hash())
    assert record.environment.threads == 1
    assert record.environment.precision == "float32"
    assert record.environment.versions["torch"] == importlib.metadata.version("torch")
    assert record.environment.attention_backend
    assert record.data.samples_seen == 7 * 4
    assert record.data.tokens_seen == 7 * 4 * 32
    assert len(record.data.batches_sha256) == 64
    assert record.peak_memory_bytes > 10 * 2**20
    assert record.throughput.tokens_per_second > 0
    assert str(lab.root) not in path.read_text()
    assert read_record(run / "record.json") == record


def test_record_counts_the_parameters_of_the_model(finished: Any) -> None:
    _, run, path = finished
    weights = checkpoint.load(checkpoint.resolve(str(run))).content["model"]
    distinct = {tensor.data_ptr(): tensor.numel() for tensor in weights.values()}
    model = read_record(path).model
    assert model.parameters == sum(distinct.values())
    assert model.parameters_non_embedding == model.parameters - 256 * 32  # bytes, width


def test_curves_and_metrics_agree_with_the_lines_written_meanwhile(finished: Any) -> None:
    _, run, path = finished
    record = read_record(path)
    written = lines(run / "metrics.jsonl")
    for kind, steps in (("train", list(range(1, 8))), ("validation", [3, 6, 7])):
        curve = record.curves[kind]
        assert curve.step == steps
        mine = [line for line in written if line["kind"] == kind]
        assert [line["step"] for line in mine] == steps
        assert [line["loss"] for line in mine] == curve["loss"]
    assert record.metrics["validation_loss"] == record.curves["validation"]["loss"][-1]
    bits = record.metrics["validation_loss"] / math.log(2)
    assert record.metrics["validation_bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    assert record.primary_metric == "validation_bits_per_byte"
    # An untrained byte model is at ln 256 = 5.545 nats; seven steps only make it better.
    losses = record.curves["train"]["loss"]
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < losses[0]
    assert record.curves["train"]["lr"] == pytest.approx([0.0005, 0.001, *record.curves["train"]["lr"][2:]])


def test_tensorboard_has_the_same_points(finished: Any) -> None:
    """Event files are length-prefixed protobufs; the tags stand in them as plain bytes."""
    _, run, _ = finished
    (events,) = (run / "tensorboard").glob("events.out.tfevents.*")
    data, count, at = events.read_bytes(), 0, 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        count += b"train/loss" in data[at + 12 : at + 12 + length]
        at += 12 + length + 4
    assert at == len(data)
    assert count == 7
    assert b"validation/bits_per_byte" in data


def test_sample_continues_a_prompt_from_a_run_directory(finished: Any, capsys: Any) -> None:
    _, run, path = finished
    sample = read_record(path).sample
    assert sample.startswith("Return the ")
    assert cli.main(["sample", str(run), "--tokens", "40"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == sample.rstrip("\n")  # same prompt, draw and weights
    newest = checkpoint.resolve(str(run))
    assert cli.main(["sample", str(newest), "--prompt", "é", "--tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("é")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--tokens", "0"], "--tokens and --top-k must be at least 1"),
        (["--temperature", "-1"], "--temperature at least 0"),
        (["--top-k", "0"], "--top-k must be at least 1"),
        (["--prompt", ""], "--prompt: empty"),
        (["--tokens", "many"], "argument --tokens: invalid int value: 'many'"),
        (["--tokns", "3"], "unrecognized arguments: --tokns 3"),
    ],
)
def test_sample_refuses_nonsense_in_one_line(
    finished: Any, capsys: Any, arguments: list[str], part: str
) -> None:
    _, run, _ = finished
    assert cli.main(["sample", str(run), *arguments]) == 2
    assert part in one_line(capsys)


def test_a_completed_run_is_not_repeated_unless_fresh(finished: Any, capsys: Any) -> None:
    lab, run, path = finished
    before, written = path.read_bytes(), (run / "metrics.jsonl").stat().st_mtime_ns
    assert cli.main(["run", "text/tiny", *lab.overrides(*CHANGES)]) == 0
    assert capsys.readouterr().out.startswith("already done: ")
    assert path.read_bytes() == before
    assert (run / "metrics.jsonl").stat().st_mtime_ns == written


def test_fresh_starts_over_and_may_stand_anywhere(lab: Any, capsys: Any) -> None:
    first = lab.train()
    words = lab.overrides()
    assert cli.main(["run", "text/tiny", *words[:3], "--fresh", *words[3:]]) == 0
    assert "completed" in capsys.readouterr().out
    again = read_record(first.record_path)
    assert again.started_at > first.record.started_at
    assert again.metrics == first.record.metrics
    assert [line["step"] for line in lines(first.run_directory / "metrics.jsonl")] == [1, 2, 3, 3, 4, 5, 6, 6]


def one_line(capsys: Any) -> str:
    """Return what stands on standard error: one line that names the program, and no traceback anywhere."""
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    (line,) = printed.err.splitlines()
    assert line.startswith("xsa: error: ")
    return line


BAD = {
    "no such file": (["data.path=/no/such.txt"], "/no/such.txt: no such file"),
    "directory": (["data.path=/"], "/: a directory, expected a UTF-8 text file"),
    "too short": (["data.seq_len=30000"], "tokens are too few for one window"),
    "validation": (["data.validation_fraction=1"], "validation_fraction is 1.0"),
    "no cuda": (["loop.device=cuda"], "loop.device: 'cuda' asked for"),
    "no device": (["loop.device=tpu"], "loop.device: expected auto, cpu, cuda or cuda:N, got 'tpu'"),
    "no batch": (["loop.global_batch=0"], "loop.global_batch: expected greater than or equal to 1, got 0"),
    "heads": (["model.n_heads=3"], "d_model 32 is not a multiple of n_heads 3"),
    "groups": (["model.n_kv_heads=3"], "n_heads 2 is not a multiple of n_kv_heads 3"),
    "dropout": (["model.dropout=1"], "dropout must be in [0, 1)"),
    "variant": (["attention.variant=xas"], "attention.variant: expected 'sa', 'xsa'"),
    "backend": (["attention.backend=xas"], "attention.backend: expected 'auto', 'reference'"),
    "layers": (["attention.layers=[0,9]"], "layers [9] are not there"),
    "runs": (["output.runs=/proc/none"], "output.runs: /proc/none"),
    "records": (["output.records=/proc/none"], "output.records: /proc/none cannot be written"),
    "huge": (["loop.global_batch=2000000000"], "out of memory; take a smaller loop.micro_batch"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_users_mistake_is_one_line_and_leaves_no_record(
    lab: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    overrides, part = BAD[name]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if name == "huge":
        from tasks.text.loader import TokenWindows

        def refuse(stream: TokenWindows, size: int) -> None:  # what numpy does when the system has no more
            raise MemoryError(f"Unable to allocate {size} windows")

        monkeypatch.setattr(TokenWindows, "next_batch", refuse)
    assert cli.main(["run", "text/tiny", *lab.overrides(*overrides)]) == 2
    assert part in one_line(capsys)
    assert not list(lab.root.glob("records/*"))


def test_a_file_that_is_not_utf8_is_refused_with_the_place(lab: Any, tmp_path: Path, capsys: Any) -> None:
    bad = tmp_path / "latin1.txt"
    bad.write_bytes(b"plain text " * 20 + b"\xe9t\xe9 " * 20)
    assert cli.main(["run", "text/tiny", *lab.overrides(f"data.path={bad}")]) == 2
    assert "not UTF-8 at byte 220" in one_line(capsys)


def test_the_same_run_twice_at_once_is_refused(lab: Any, capsys: Any) -> None:
    directory = lab.root / "runs" / lab.config().run_id()
    directory.mkdir(parents=True)
    with FileLock(directory / ".lock"):
        assert cli.main(["run", "text/tiny", *lab.overrides()]) == 2
    assert "this run is under way in another process" in one_line(capsys)
    assert cli.main(["run", "text/tiny", *lab.overrides()]) == 0


def test_sample_of_something_else_is_refused(lab: Any, tmp_path: Path, capsys: Any) -> None:
    for where, part in (
        (tmp_path / "nothing", "no such checkpoint"),
        (tmp_path, "no checkpoint there"),
        (lab.text, "not readable as a checkpoint"),
    ):
        assert cli.main(["sample", str(where)]) == 2
        assert part in one_line(capsys)


def test_record_says_which_precision_auto_chose_and_why(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for unit, want in ((None, "float32"), ("AMX", "bfloat16")):
        monkeypatch.setattr(device, "cpu_bfloat16_unit", lambda unit=unit: unit)
        record = lab.at(want).train("loop.precision=auto", "loop.device=cpu").record
        assert record.environment.precision == want
        assert record.environment.precision_reason == (
            "CPU with AMX" if unit else "CPU without fast bfloat16"
        )
        assert record.status == "completed"


def test_evaluation_does_not_disturb_the_training(lab: Any) -> None:
    """With dropout, one stray random number would change every later loss."""
    often = lab.at("often").train("loop.eval_every=1", "model.dropout=0.3", "loop.checkpoint_every=1")
    never = lab.at("never").train("loop.eval_every=0", "model.dropout=0.3")
    assert often.record.curves["train"]["loss"] == never.record.curves["train"]["loss"]
    assert often.record.metrics == never.record.metrics


def test_a_run_repeated_gives_the_same_numbers(lab: Any) -> None:
    first, second = (lab.at(name).train("model.dropout=0.3").record for name in ("a", "b"))
    assert first.metrics == second.metrics
    assert first.curves["train"]["loss"] == second.curves["train"]["loss"]
    assert first.model == second.model
    assert first.data == second.data


def test_a_cut_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "kind": "train", "loss": 2.0}) + '\n{"step": 2, "ki')
    assert lines(path) == [{"step": 1, "kind": "train", "loss": 2.0}]
    assert lines(tmp_path / "none.jsonl") == []


def test_a_completed_run_on_a_file_that_has_changed_since_is_not_called_done(lab: Any, capsys: Any) -> None:
    command = ["run", "text/tiny", *lab.overrides()]
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main(command) == 0
    assert "already done" in capsys.readouterr().out
    path = Path(lab.config().data.path)
    text = path.read_text()
    path.write_text(text.swapcase())
    try:
        assert cli.main(command) == 2
        assert "is of the same config on other data" in one_line(capsys)
    finally:
        path.write_text(text)


def test_a_run_begun_anew_and_stopped_is_not_called_done_by_its_older_record(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.runner import training
    from tasks.runner.loop import Trainer
    from tasks.runner.progress import Silent
    from tasks.runner.training import finished_record

    lab.train()
    assert finished_record(lab.config()) is not None
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        outcome = training.train(lab.config(), Silent(), fresh=True)
    assert outcome.record.status == "interrupted"
    assert finished_record(lab.config()) is None, "the older record is not of what lies in the run directory"
    assert lab.train().record.status == "completed"
    assert finished_record(lab.config()) is not None


def test_a_disk_that_is_full_when_the_record_is_written_is_one_line(
    lab: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    from tasks.runner import recording

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(recording, "write_record", full)
        assert cli.main(["run", "text/tiny", *lab.overrides()]) == 2
    assert "the record cannot be written (No space left on device)" in one_line(capsys)
    assert lab.train().record.status == "completed"
