"""Several cells at once: cores of their own, none lost, none doubled, whatever is killed."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from tasks.errors import UserError
from tasks.runner import sweep_slots
from tasks.runner.paths import ROOT
from tasks.runner.suite import FREE, expand
from tasks.runner.sweep_cost import makespan
from tasks.runner.sweep_display import PlainTable, remaining
from tasks.runner.sweep_jobs import LOG, RUN_LOCK, work_of_cell
from tasks.runner.sweep_rows import Row, State
from tasks.runner.sweep_slots import Slot, divide

STAGE = Path(__file__).with_name("sweep_stage.py")
CELLS, STEPS = 5, 12


def stage(place: Path, jobs: int) -> subprocess.Popen:
    """Start a sweep over played runs."""
    return subprocess.Popen(
        [sys.executable, str(STAGE), str(place), str(CELLS), str(jobs)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def journals(place: Path) -> list[list[str]]:
    """Return what each cell's runs wrote, in order."""
    return [(place / f"cell-{number}" / "journal").read_text().splitlines() for number in range(CELLS)]


def check_journal(lines: list[str]) -> None:
    """Hold that a cell's runs made every step, at most the last of a killed one twice, and ended once."""
    assert lines.count("end") == 1
    assert lines[-1] == "end"
    made = [int(line.split()[1]) for line in lines if line.startswith("step")]
    assert sorted(set(made)) == list(range(1, STEPS + 1))
    # A run begins where its checkpoint is, so that steps only ever repeat by the one not yet kept.
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(made))
    assert len(made) - STEPS <= sum(line.startswith("begin") for line in lines) - 1


def started(place: Path) -> bool:
    return any(path.stat().st_size for path in place.glob("cell-*/journal"))


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_killed_sweeps_that_share_cells_lose_and_double_nothing(tmp_path):
    draw = random.Random(7)
    for _ in range(2):
        sweeps = [stage(tmp_path, 2), stage(tmp_path, 1)]
        wait_for(lambda: started(tmp_path))
        time.sleep(draw.uniform(0.0, 0.4))
        for sweep in sweeps:
            sweep.kill()
            sweep.communicate()
    sweeps = [stage(tmp_path, 2), stage(tmp_path, 2)]
    texts = [sweep.communicate(timeout=100)[0] for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0], texts
    for lines in journals(tmp_path):
        check_journal(lines)


def test_a_stop_reaches_every_running_cell_and_each_keeps_its_checkpoint(tmp_path):
    sweep = stage(tmp_path, 3)
    running = [tmp_path / f"cell-{number}" for number in range(3)]
    wait_for(lambda: all((cell / "checkpoint").exists() for cell in running))
    sweep.send_signal(signal.SIGINT)
    text, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 128 + signal.SIGINT
    assert "SIGINT: what runs writes its checkpoint" in text
    for cell in running:
        assert (cell / "record").read_text() == "interrupted"
        assert (cell / "journal").read_text().splitlines()[-1] == "stopped"
    assert not (tmp_path / "cell-3" / "journal").exists()
    assert stage(tmp_path, 3).wait(60) == 0
    for lines in journals(tmp_path):
        check_journal(lines)


def test_a_cell_whose_holder_dies_is_taken_over_before_the_sweep_says_it_is_done(tmp_path):
    first, second = stage(tmp_path, CELLS), stage(tmp_path, 2)
    wait_for(lambda: sum((tmp_path / f"cell-{n}" / "checkpoint").exists() for n in range(CELLS)) >= 2)
    first.kill()
    first.communicate()
    text, _ = second.communicate(timeout=60)
    assert second.returncode == 0, text
    for lines in journals(tmp_path):
        check_journal(lines)


@pytest.fixture
def eight_cores(monkeypatch, tmp_path):
    """A machine of four physical cores with two threads each: n and n + 4 are one core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(sweep_slots, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(sweep_slots, "NVIDIA", tmp_path / "none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "core_id").write_text(f"{core % 4}\n")
        (folder / "physical_package_id").write_text("0\n")


def config(device: str = "auto", threads: int = 0):
    return SimpleNamespace(loop=SimpleNamespace(device=device, threads=threads))


@pytest.mark.parametrize("jobs", [2, 3, 4, 8])
def test_slots_are_disjoint_and_equal(eight_cores, jobs):
    slots = divide(jobs, [config()])
    cores = [core for slot in slots for core in slot.cores]
    assert len(cores) == len(set(cores))
    assert {len(slot.cores) for slot in slots} == {8 // jobs}


def test_two_threads_of_a_physical_core_stay_together(eight_cores):
    for slot in divide(4, [config()]):
        one, other = slot.cores
        assert abs(one - other) == 4


def test_only_the_cores_that_the_sweep_has_are_divided(eight_cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 6})
    assert {core for slot in divide(3, [config()]) for core in slot.cores} == {1, 2, 6}
    with pytest.raises(UserError, match="4 cells need a core each, this process may use 3"):
        divide(4, [config()])


def test_one_job_has_the_whole_machine(eight_cores):
    assert divide(1, [config()]) == [Slot()]


def test_threads_of_a_run_must_fit_its_cores(eight_cores):
    assert len(divide(4, [config(threads=2)])) == 4
    with pytest.raises(UserError, match=r"loop\.threads=3 is more than the 2 of 8 cores"):
        divide(4, [config(threads=3), config()])


def test_every_cell_has_a_gpu_of_its_own_where_runs_use_them(eight_cores, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [slot.environment for slot in divide(2, [config()])] == [
        {"CUDA_VISIBLE_DEVICES": "3"},
        {"CUDA_VISIBLE_DEVICES": "5"},
    ]
    assert len(divide(4, [config(device="cpu")])) == 4
    with pytest.raises(UserError, match="4 cells need a GPU each, there are 2"):
        divide(4, [config()])


def test_a_child_keeps_to_its_cores():
    core = max(os.sched_getaffinity(0))
    code = (
        "import os; from tasks.runner.sweep_child import keep_to; "
        f"keep_to('{core}'); print(os.sched_getaffinity(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str({core})


def test_real_runs_at_once_have_a_share_of_the_cores_and_go_on_after_a_kill(lab):
    jobs = min(2, len(os.sched_getaffinity(0)))
    words = [
        "experiment=text/tiny",
        *lab.overrides(
            "loop.max_steps=300", "loop.checkpoint_every=20", "loop.eval_every=0", "loop.threads=0"
        ),
        "seed=0,1",
    ]
    works = [work_of_cell(cell) for cell in expand(FREE, words)]
    command = [sys.executable, "-m", "tasks", "sweep", *words, "--jobs", str(jobs)]
    quiet = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    quiet["env"] = {**os.environ, "XSA_CPU_KERNEL": "0"}  # compiling it may take longer than all the rest
    sweep = subprocess.Popen(command, start_new_session=True, **quiet)
    try:
        # Killed as soon as either has a checkpoint: the other may be anywhere.
        wait_for(lambda: any(list(work.directory.glob("checkpoints/*.json")) for work in works), 100)
    finally:
        sweep.kill()
        sweep.communicate()
    (begun, *_) = [work for work in works if list(work.directory.glob("checkpoints/*.json"))]
    with FileLock(begun.directory / RUN_LOCK, timeout=60):  # its run ends soon after the sweep
        record = begun.record()
    assert (record.status, record.reason.split(" after")[0]) == ("interrupted", "stopped by SIGTERM")
    done = subprocess.run(command, check=False, timeout=100, **quiet)
    assert done.returncode == 0, done.stdout
    assert "resuming from step-" in (begun.directory / LOG).read_text()
    for work in works:
        record = work.record()
        assert record.status == "completed"
        assert record.environment.threads == len(os.sched_getaffinity(0)) // jobs
        assert record.curves["train"].step == list(range(1, 301))


def test_the_last_of_several_slots_decides_when_all_is_done():
    assert makespan([4.0, 3.0, 2.0, 1.0], 1) == 10.0
    assert makespan([4.0, 3.0, 2.0, 1.0], 2) == 5.0  # 4 + 1 and 3 + 2
    assert makespan([10.0, 1.0, 1.0], 3) == 10.0


def test_what_is_left_counts_the_waiting_cells_over_the_slots():
    def row(state: State, **fields) -> Row:
        return Row(SimpleNamespace(config=None), state, **fields)

    rows = [
        row(State.DONE, seconds=100.0),
        row(State.RUNNING, left=40.0),
        row(State.RUNNING, left=60.0),
        row(State.WAITING),
        row(State.WAITING),
    ]
    assert remaining(rows) == pytest.approx((40 + 60 + 2 * 100) / 2)
    assert remaining([row(State.RUNNING)]) is None


def test_every_running_cell_gets_its_plain_line(monkeypatch, capsys):
    monkeypatch.setattr("tasks.runner.sweep_display.PLAIN_SECONDS", 0.0)
    rows = [
        Row(SimpleNamespace(label=name, config=None), State.RUNNING, seconds=5.0) for name in ("one", "two")
    ]
    table = PlainTable()
    table.update(rows)
    table.update(rows)
    text = capsys.readouterr().out
    assert "[1/2] one: running, 5 s" in text
    assert "[2/2] two: running, 5 s" in text
