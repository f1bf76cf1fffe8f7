"""What a sweep shows, and the jobs that follow a run."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tasks.runner.sweep import Sweep
from tasks.runner.sweep_display import LiveTable, PlainTable, chosen, progress, summary
from tasks.runner.sweep_jobs import LOG, Job, Work, why
from tasks.runner.sweep_rows import Row, State
from tasks.runner.sweep_slots import Slot


def row(label: str, state: State, detail: str = "", **fields) -> Row:
    config = SimpleNamespace(loop=SimpleNamespace(max_steps=1200))
    return Row(Work(label, (), Path("nowhere"), config), state, detail, **fields)


def rows() -> list[Row]:
    return [
        row("first", State.DONE, seconds=61.0),
        row("second", State.RUNNING, step=300, loss=1.23456, rate=9876.5, seconds=125.0, left=375.0),
        row("third", State.FAILED, "step 7: loss nan"),
        *(row(f"cell {number}", State.WAITING) for number in range(40)),
    ]


def test_progress_names_step_loss_time_and_reason():
    running = "step 300/1,200, loss 1.2346, 9,876/s, 2:05 min, 6:15 min left"
    shown = [progress(each) for each in rows()[:3]]
    assert shown == ["1:01 min", running, "step 7: loss nan"]


def test_the_summary_counts_every_state():
    assert summary(rows()) == "43 cells: 40 waiting, 1 running, 1 done, 1 failed"


def test_running_and_failed_cells_are_shown_however_little_room_there_is():
    everything = [row(str(n), State.WAITING) for n in range(50)]
    everything[40] = row("at it", State.RUNNING)
    everything[3] = row("broken", State.FAILED)
    assert set(chosen(everything, 4)) >= {40, 3}
    assert sorted(chosen(everything, 50)) == list(range(50))


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_table_fits_its_terminal_and_shows_what_matters(width):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=20, color_system=None)
    with LiveTable(console) as table:
        table.update(rows())
        table.note("a [bracketed] note")
    text = stream.getvalue()
    for part in (
        "second",
        "300/1,200",
        "1.2346",
        "9,876/s",
        "6:15 min",
        "third",
        "loss nan",
        "not shown",
        "a [bracketed] note",
    ):
        assert part in text
    assert "cell 39" not in text


def test_plain_lines_come_when_a_state_changes_and_not_otherwise(capsys):
    shown = rows()[:2]
    with PlainTable() as table:
        table.update(shown)
        table.update(shown)
        shown[1].state, shown[1].left = State.DONE, None
        table.update(shown)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["2 cells: 1 running, 1 done", "[2/2] second: done, 2:05 min"]


def followed(tmp_path: Path, second: str) -> Work:
    """Work of two jobs, each done when its file is there; the second is the given program."""

    def job(name: str, program: str) -> Job:
        return Job(name, (program, str(tmp_path / name)), (tmp_path / name).exists)

    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).touch()"
    return Work("a cell", (job("run", write), job("probe", second)), tmp_path / "runs")


def launched(names: list[str]):
    def start(job: Job, directory: Path, slot: Slot) -> subprocess.Popen:
        names.append(job.name)
        with (directory / LOG).open("ab") as log:
            return subprocess.Popen([sys.executable, "-c", *job.words], stdout=log, stderr=log)

    return start


def test_a_follow_up_that_fails_is_told_and_alone_run_again(tmp_path):
    names: list[str] = []
    quiet = SimpleNamespace(update=lambda rows: None, note=lambda line: None)
    failing = Sweep([followed(tmp_path, "raise SystemExit('no data')")], quiet, start=launched(names))
    assert failing.run() == 1
    assert (failing.rows[0].state, failing.rows[0].detail) == (State.FAILED, "probe: no data")
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).touch()"
    mended = Sweep([followed(tmp_path, write)], quiet, start=launched(names))
    assert mended.run() == 0
    assert names == ["run", "probe", "probe"]


def test_why_reads_only_what_this_attempt_wrote(tmp_path):
    log = tmp_path / LOG
    log.write_text("xsa: error: an earlier one\n")
    start = log.stat().st_size
    assert why(tmp_path, start, 3) == "ended with status 3 and no message"
    assert why(tmp_path, start, -9).startswith("killed by SIGKILL")
    with log.open("a") as stream:
        stream.write("Traceback (most recent call last):\n  File x\nValueError: the last line\n")
    assert why(tmp_path, start, 1) == "ValueError: the last line"
    with log.open("a") as stream:
        stream.write("xsa: error: told plainly\nmore\n")
    assert why(tmp_path, start, 2) == "told plainly"
