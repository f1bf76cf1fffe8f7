"""Sweeps: done cells are passed over, none runs twice, failures are told, stops lose nothing.

The jobs here are processes that behave in a chosen way and write records made from one real run.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from results.rates import RateChoice
from results.record import RunRecord
from results.store import load_records, read_record, write_record
from tasks.runner import cli
from tasks.runner.suite import FREE, expand
from tasks.runner.sweep import Sweep
from tasks.runner.sweep_cost import estimate
from tasks.runner.sweep_jobs import LOG, RUN_LOCK, position, work_of_cell, work_of_command
from tasks.runner.sweep_rate import judged
from tasks.runner.sweep_rows import Row, State, state_of
from tasks.runner.sweep_slots import Slot

# Behaviours: what a job does, given the text of its record and where to write it.
PLAY = """
import os, pathlib, signal, sys, time
behaviour, text, target = sys.argv[1:]
def write(status):
    path = pathlib.Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = text.replace('"status": "completed"', f'"status": "{status}"')
    if status != "completed":
        done = done.replace('"reason": null', f'"reason": "made to be {status}"')
    path.with_suffix(".tmp").write_text(done)
    path.with_suffix(".tmp").rename(path)
def stopped(number, frame):
    write("interrupted")
    sys.exit(128 + number)
if behaviour == "complete": time.sleep(0.05); write("completed")
elif behaviour == "fail": write("failed"); sys.exit(1)
elif behaviour == "crash": os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "mistake": print("xsa: error: data.path: no such file", file=sys.stderr); sys.exit(2)
elif behaviour == "traceback": raise RuntimeError("a fault of ours")
elif behaviour == "wait":
    signal.signal(signal.SIGINT, stopped); signal.signal(signal.SIGTERM, stopped)
    print("waiting", flush=True); time.sleep(60)
"""


class Quiet:
    """A display that remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.states: list[list[State]] = []

    def update(self, rows: Any) -> None:
        self.states.append([row.state for row in rows])

    def note(self, line: str) -> None:
        self.notes.append(line)


class Theatre:
    """Cells of a small grid whose jobs behave as told."""

    def __init__(self, lab: Any, template: RunRecord) -> None:
        words = ["experiment=text/tiny", *lab.overrides(), "attention=sa,xsa", "seed=0,1"]
        self.works = [work_of_cell(cell) for cell in expand(FREE, words)]
        self.records = lab.root / "records"
        self.template = template
        self.behaviours = dict.fromkeys((work.label for work in self.works), "complete")
        self.started: list[str] = []

    def record_of(self, work: Any) -> RunRecord:
        config = work.config
        return self.template.updated(
            run_id=config.run_id(),
            config_hash=config.config_hash(),
            pair_hash=config.pair_hash(),
            cell_hash=config.cell_hash(),
            variant=config.attention.variant,
            seed=config.seed,
        )

    def start(self, job: Any, directory: Path, slot: Slot) -> subprocess.Popen:
        (work,) = [work for work in self.works if work.directory == directory]
        self.started.append(work.label)
        text = json.dumps(self.record_of(work).model_dump())
        target = self.records / f"{work.config.run_id()}.json"
        words = [sys.executable, "-c", PLAY, self.behaviours[work.label], text, str(target)]
        with (directory / LOG).open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)

    def sweep(self, **options: Any) -> Sweep:
        return Sweep(self.works, Quiet(), start=self.start, **options)


@pytest.fixture(scope="module")
def template(make_lab: Callable, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The record of one real, very small run."""
    record = make_lab(tmp_path_factory.mktemp("template")).train("loop.max_steps=2").record
    return record.updated(reason=None)


@pytest.fixture
def theatre(lab: Any, template: RunRecord) -> Theatre:
    return Theatre(lab, template)


def states(sweep: Sweep) -> list[State]:
    return [row.state for row in sweep.rows]


def test_every_cell_is_run_once_and_a_second_sweep_runs_none(theatre):
    assert theatre.sweep().run() == 0
    assert theatre.started == [work.label for work in theatre.works]
    assert len(load_records(theatre.records)) == 4
    again = theatre.sweep()
    assert again.run() == 0
    assert states(again) == [State.DONE] * 4
    assert len(theatre.started) == 4


def test_a_completed_record_of_another_config_does_not_count(theatre):
    work = theatre.works[0]
    other = theatre.record_of(work).updated(config_hash="0" * 16)
    write_record(other, theatre.records)
    assert state_of(work, False)[0] is State.WAITING


def test_a_failed_cell_is_recorded_with_its_reason_and_the_others_go_on(theatre):
    labels = [work.label for work in theatre.works]
    theatre.behaviours |= {labels[0]: "fail", labels[1]: "crash", labels[2]: "mistake"}
    sweep = theatre.sweep()
    assert sweep.run() == 1
    assert states(sweep) == [State.FAILED] * 3 + [State.DONE]
    records = {record.run_id: record for record in load_records(theatre.records)}
    reasons = [records[work.config.run_id()].reason for work in theatre.works[:3]]
    assert reasons[0] == "made to be failed"
    assert reasons[1].startswith("killed by SIGKILL")
    assert reasons[2] == "data.path: no such file"
    assert [records[work.config.run_id()].status for work in theatre.works] == ["failed"] * 3 + ["completed"]


def test_failed_cells_are_run_again_only_when_asked(theatre):
    theatre.behaviours[theatre.works[0].label] = "traceback"
    assert theatre.sweep().run() == 1
    theatre.behaviours[theatre.works[0].label] = "complete"
    assert theatre.sweep().run() == 1
    assert theatre.started.count(theatre.works[0].label) == 1
    retried = theatre.sweep(retry_failed=True)
    assert retried.run() == 0
    assert theatre.started.count(theatre.works[0].label) == 2
    assert len(theatre.started) == 5
    assert {record.status for record in load_records(theatre.records)} == {"completed"}


def test_two_sweeps_at_once_share_the_cells(theatre, monkeypatch):
    monkeypatch.setattr("tasks.runner.sweep.ELSEWHERE_SECONDS", 0.05)
    sweeps = [theatre.sweep() for _ in range(3)]
    threads = [threading.Thread(target=sweep.run) for sweep in sweeps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(theatre.started) == sorted(work.label for work in theatre.works)
    assert all(states(sweep) == [State.DONE] * 4 for sweep in sweeps)


def test_a_run_under_way_elsewhere_is_waited_for_and_not_started(theatre, monkeypatch):
    monkeypatch.setattr("tasks.runner.sweep.ELSEWHERE_SECONDS", 0.05)
    work = theatre.works[1]
    work.directory.mkdir(parents=True)
    lock = FileLock(work.directory / RUN_LOCK)
    lock.acquire()

    def finish_elsewhere() -> None:
        time.sleep(0.6)
        write_record(theatre.record_of(work), theatre.records)
        lock.release()

    other = threading.Thread(target=finish_elsewhere)
    other.start()
    sweep = theatre.sweep()
    assert sweep.run() == 0
    other.join()
    assert work.label not in theatre.started
    assert any(State.ELSEWHERE in shown for shown in sweep.display.states)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_stop_is_passed_on_once_and_finished_records_stay(theatre, number):
    second = theatre.works[1]
    theatre.behaviours[second.label] = "wait"
    sweep = theatre.sweep()
    log = second.directory / LOG

    def stop() -> None:
        while not (log.exists() and "waiting" in log.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    assert sweep.run() == 128 + number
    thread.join()
    assert states(sweep) == [State.DONE, State.STOPPED, State.WAITING, State.WAITING]
    statuses = {record.run_id: record.status for record in load_records(theatre.records)}
    assert statuses == {
        theatre.works[0].config.run_id(): "completed",
        second.config.run_id(): "interrupted",
    }
    theatre.behaviours[second.label] = "complete"
    assert theatre.sweep().run() == 0
    assert theatre.started.count(theatre.works[0].label) == 1


def test_the_cost_of_missing_cells_comes_from_the_same_cell_where_there_is_one(theatre):
    (line, *_) = estimate([Row(work, State.WAITING) for work in theatre.works])
    assert "4 cells to run" in line
    assert "0 by the time of the same cell, 4 by" in line
    write_record(theatre.record_of(theatre.works[0]), theatre.records)
    rows = [Row(work, *state_of(work, False)) for work in theatre.works]
    (line, *_) = estimate(rows)
    assert "3 cells to run" in line
    # Other seeds and the other attention take as long as the one that is known.
    assert "3 by the time of the same cell, 0 by" in line
    assert estimate([Row(theatre.works[0], State.DONE)]) == ["nothing is missing"]


def test_the_last_whole_training_point_is_shown(tmp_path):
    assert position(tmp_path) == (0, None, None)
    lines = [
        {"step": 5, "kind": "train", "loss": 2.5, "tokens_per_second": 9.5},
        {"step": 5, "kind": "validation", "loss": 2.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text("x" * 9000 + "\n" + text + '{"step": 6, "ki')
    assert position(tmp_path) == (5, 2.5, 9.5)


def test_a_command_is_done_by_its_record_on_its_kind_of_device(template, tmp_path):
    from results.record import BenchRecord

    work = work_of_command("bench attention --device cuda", str(tmp_path / "records"), str(tmp_path / "runs"))
    assert not work.is_done()
    for device, done in (("cpu", False), ("cuda:0", True)):
        record = BenchRecord(
            name="attention",
            config={},
            environment={**template.environment.model_dump(), "device": device},
            rows=[],
            started_at=template.started_at,
            finished_at=template.finished_at,
        )
        write_record(record, tmp_path / "records")
        assert work.is_done() is done


def test_a_rate_at_the_edge_comes_with_the_command_that_searches_further():
    check = judged(RateChoice({1e-3: 2.0, 2e-3: 1.5}, 3, 2e-3), "./xsa sweep fig4_lr --scale cpu")
    assert not check.good
    assert check.line.endswith("./xsa sweep fig4_lr --scale cpu optimizer.lr=0.001,0.002,0.004")
    inside = judged(RateChoice({1e-3: 2.0, 2e-3: 1.5, 4e-3: 1.6}, 3, 2e-3), "")
    assert inside.good
    assert "inside the searched range" in inside.line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected one suite or experiment=NAME"),
        (["fig4_lrr"], "did you mean 'fig4_lr'"),
        (["fig4_lr", "fig5_length"], "expected one suite"),
        (["fig4_lr", "--scale", "gpu"], "it has cpu, paper"),
        (["fig4_lr", "--jobs", "0"], "--jobs: expected a number of at least 1, got 0"),
        (["fig4_lr", "--jobs", "100000"], "--jobs: 100000 cells need a core each"),
        (["fig2_overhead", "seed=1"], "runs commands"),
        (["experiment=text/tiny", "--check"], "nothing chooses a learning rate"),
        (["experiment=text/tiny", "attention=sa", "attention=xsa"], "attention is given twice"),
        (["experiment=text/tiny", "seed=0", "seed=1"], "seed is given twice"),
        (["fig4_lr", "optimizer.lr=0.1", "optimizer.lr=0.2"], "optimizer.lr is given twice"),
        (["experiment=text/tiny", "attention="], "'attention=': no value"),
        (["experiment=text/tiny", "attention=sa,"], "an empty value between commas"),
        (["experiment=text/tiny", "=3"], "expected KEY=VALUE or KEY=A,B"),
        (["experiment=text/tiny", "data.path='a,b"], "a quote ' that does not end"),
        (["experiment=text/tiny", "attention.layers=[0,1"], "brackets that do not match"),
        (["experiment=text/tiny", "nothing.here=1,2"], "nothing"),
        (["experiment=text/tiny", "loop.max_steps=many,3"], "loop.max_steps"),
        (["experiment=text/tiny,text/tinny"], "did you mean 'text/tiny'"),
    ],
)
def test_mistakes_are_answered_in_one_line(capsys, words, said):
    assert cli.main(["sweep", *words]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_a_dry_run_shows_cells_cost_and_rate_and_runs_nothing(capsys, tmp_path):
    places = [f"output.records={tmp_path / 'records'}", f"output.runs={tmp_path / 'runs'}"]
    assert cli.main(["sweep", "fig6_sinks", "--dry-run", "seed=0", *places]) == 0
    text = capsys.readouterr().out
    assert text.count("waiting") == 7  # six cells and their summary
    assert "6 cells to run" in text
    assert "learning rate: has not been chosen yet, 0 of 15 baseline runs of fig4_lr" in text
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["sweep", "fig4_lr", "--check", *places]) == 1


def test_a_quoted_value_with_a_comma_is_one_value(lab):
    words = lab.overrides(f"data.path='{lab.root}/a,b.txt'")
    cells = expand(FREE, ["experiment=text/tiny", *words, "attention=sa,xsa"])
    assert {cell.config.data.path for cell in cells} == {f"{lab.root}/a,b.txt"}
    assert [cell.config.attention.variant for cell in cells] == ["sa", "xsa"]


def test_the_same_point_under_two_spellings_is_one_cell(lab):
    words = ["experiment=text/tiny", *lab.overrides(), "optimizer.lr=0.001,1e-3"]
    assert len(expand(FREE, words)) == 1


def test_a_dry_run_names_data_that_are_not_here(lab, capsys):
    words = ["experiment=text/tiny", *lab.overrides("data.path=nowhere.txt"), "seed=0,1", "--dry-run"]
    assert cli.main(["sweep", *words]) == 0
    assert "data: nowhere.txt is not here, 2 cells need it" in capsys.readouterr().out


def test_cells_on_a_share_of_the_cores_are_told_so_in_the_estimate(theatre, monkeypatch):
    monkeypatch.setattr("tasks.runner.sweep_cost.available_cores", lambda: 8)
    record = theatre.record_of(theatre.works[0])
    facts = {"threads": 2}
    write_record(
        record.updated(
            environment={**record.environment.model_dump(), **facts},
            throughput={"seconds_training": 100.0, "seconds_evaluation": 0.0},
        ),
        theatre.records,
    )
    rows = [Row(work, *state_of(work, False)) for work in theatre.works]  # three are missing
    costs = {jobs: estimate(rows, jobs)[0] for jobs in (1, 2, 4)}
    # 100 s with two threads: 25 s with eight and 8 s to start, 50 + 8 with four, 100 + 8 with two.
    assert "about 1:39 min on this CPU, the longest 33 s" in costs[1]
    assert "about 1:56 min on this CPU, 2 at a time on 4 cores each, the longest 58 s" in costs[2]
    assert "about 1:48 min on this CPU, 4 at a time on 2 cores each, the longest 1:48 min" in costs[4]


def test_a_probe_keeps_the_statistics_of_every_layer(lab, capsys):
    outcome = lab.train("attention=sa", "loop.max_steps=3")
    records = lab.root / "probes"
    words = ["probe", str(outcome.run_directory), "--samples", "4", "--records", str(records)]
    assert cli.main(words) == 0
    (path,) = records.iterdir()
    record = read_record(path)
    assert path.stem == f"probe-{outcome.record.run_id}"
    assert [row["layer"] for row in record.rows] == [0, 1]
    assert record.config["config_hash"] == outcome.record.config_hash
    for row, heads in zip(record.rows, record.extra["heads"], strict=True):
        assert -1 <= row["cosine_output_value"] <= 1
        assert 0 < row["diagonal_weight"] < 1
        assert row["tokens"] == 4 * 32
        assert row["diagonal_weight"] == pytest.approx(sum(heads["diagonal_weight"]) / 2)
        assert row["cosine_head_value"] == pytest.approx(row["cosine_output_value"])  # nothing is removed
    assert "cosine output value" in capsys.readouterr().out
    assert cli.main(["probe", str(lab.root / "nowhere")]) == 2
