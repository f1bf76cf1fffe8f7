"""`./xsa run --nproc`: a rank that is killed ends the run with one line, and the run goes on afterwards."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from results.store import read_record
from tasks.errors import UserError
from tasks.runner import checkpoint, distributed, processes
from tasks.runner.config.compose import load_config
from tasks.runner.config.schema import RunConfig
from tasks.runner.paths import ROOT

LIMIT = 200  # seconds; far above what it takes, so that a run that hangs is not waited for


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """A run long enough to be killed in."""
    text = tmp_path / "words.txt"
    text.write_text("the output of an attention head and its own value\n" * 200)
    return [
        "data.source=file", f"data.path={text}", "data.seq_len=16", "loop.max_steps=1000000",
        "loop.checkpoint_every=5", "loop.device=cpu", "loop.precision=float32", "loop.log_every=1000",
        "attention.backend=reference", f"output.runs={tmp_path / 'runs'}",
        f"output.records={tmp_path / 'records'}", "output.tensorboard=false", "output.progress=plain",
    ]  # fmt: skip


@dataclass(frozen=True)
class Lab:
    """A config of a run in a place of its own."""

    root: Path
    overrides: list[str]

    def config(self, *changes: str) -> RunConfig:
        """Return the resolved config."""
        return load_config("text/tiny", [*self.overrides, *changes])


@pytest.fixture
def lab(overrides: list[str], tmp_path: Path) -> Lab:
    """A place for records of runs that are never made."""
    return Lab(tmp_path, overrides)


def start(overrides: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tasks", "run", "text/tiny", *overrides, "--nproc", "2"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pid_of(rank: int, parent: int) -> int:
    """Return the process of a rank below a launcher (Linux)."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            stat, environment = (place / "stat").read_text(), (place / "environ").read_bytes()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == parent and f"RANK={rank}".encode() in environment.split(
            b"\0"
        ):
            return int(place.name)
    raise AssertionError(f"no process of rank {rank}")


def wait_for_checkpoint(tmp_path: Path, launcher: subprocess.Popen, after: int = 0) -> None:
    """Return when there is a checkpoint of a step after `after`."""
    end = time.monotonic() + LIMIT
    while not [
        path for path in tmp_path.glob("runs/*/checkpoints/step-*.json") if int(path.stem[5:]) > after
    ]:
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_a_killed_rank_ends_the_run_with_one_line_and_the_run_goes_on(
    overrides: list[str], tmp_path: Path
) -> None:
    launcher = start(overrides)
    wait_for_checkpoint(tmp_path, launcher)
    os.kill(pid_of(1, launcher.pid), signal.SIGKILL)
    output, errors = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 2, errors
    (line,) = errors.splitlines()
    assert "process of rank 1 was killed by SIGKILL; the others were stopped" in line
    (run,) = (tmp_path / "runs").iterdir()
    saved = checkpoint.steps(run / "checkpoints")[-1]
    assert f"The same command goes on from {saved.name}" in line
    (path,) = (tmp_path / "records").iterdir()
    record = read_record(path)
    assert (record.status, record.reason) == ("failed", "process of rank 1 was killed by SIGKILL")
    step = checkpoint.load(saved).content["step"]

    launcher = start(overrides)
    wait_for_checkpoint(tmp_path, launcher, after=step)
    launcher.send_signal(signal.SIGTERM)
    output, errors = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 128 + signal.SIGTERM, errors
    assert errors == ""
    shown = output.splitlines()
    assert f"resuming from {saved.name}, step {step} of 1000000" in shown
    assert shown.count("SIGTERM: finishing the step and writing a checkpoint") == 1  # one rank speaks
    last = checkpoint.load(checkpoint.steps(run / "checkpoints")[-1]).content["step"]
    record = read_record(path)
    assert (record.status, record.reason) == ("interrupted", f"stopped by SIGTERM after step {last}")
    assert record.data.samples_seen == 4 * last


@pytest.mark.parametrize(
    ("failures", "first", "text"),
    [
        ({0: -9}, {0}, "process of rank 0 was killed by SIGKILL"),
        ({0: distributed.LOST, 1: -9}, {1}, "process of rank 1 was killed by SIGKILL"),
        ({0: -6, 1: distributed.LOST, 2: -11}, {0, 1, 2}, "process of rank 2 was killed by SIGSEGV"),
        ({0: distributed.LOST, 3: 2}, {3}, "process of rank 3 failed: rank 3: no such file"),
    ],
)
def test_the_process_that_fell_first_is_named(
    lab: Lab, failures: dict[int, int], first: set[int], text: str
) -> None:
    codes = {rank: SimpleNamespace(exitcode=code) for rank, code in failures.items()}
    texts = {rank: [f"xsa: error: rank {rank}: no such file"] for rank in failures}
    config = lab.config()
    with pytest.raises(UserError, match=text) as raised:
        processes.verdict(config, codes, {rank: codes[rank] for rank in first}, texts, "2000-01-01T00:00:00Z")
    assert "starts over (there is no checkpoint yet)" in str(raised.value)
    (path,) = (lab.root / "records").iterdir()
    record = read_record(path)
    assert record.status == "failed"
    assert text in record.reason


@pytest.mark.parametrize("code", [1, 2, 130, 143])
def test_what_the_first_process_has_said_is_not_said_again(lab: Lab, code: int) -> None:
    codes = {rank: SimpleNamespace(exitcode=code) for rank in (0, 1)}
    assert processes.verdict(lab.config(), codes, codes, {}, "2000-01-01T00:00:00Z") == code
    assert not (lab.root / "records").exists()
    assert processes.verdict(lab.config(), {}, {}, {}, "2000-01-01T00:00:00Z") == 0


def test_impossible_numbers_of_processes_are_refused(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = lab.config("loop.device=cpu")
    with pytest.raises(UserError, match="--nproc: expected at least 1, got 0"):
        processes.check(config, 0)
    monkeypatch.setattr(processes, "available_cores", lambda: 2)
    processes.check(config, 2)
    assert capsys.readouterr().err == ""
    processes.check(config, 3)
    assert "3 processes on 2 cores" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun already"):
        processes.check(config, 2)


def test_an_environment_without_a_launcher_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in distributed.NEEDED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="WORLD_SIZE is 4, but RANK is not set; start with"):
        distributed.join()


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank opens the port of the meeting; here another socket has it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = {"WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: the port is in use; give another") as raised:
            distributed.join()
    assert "\n" not in str(raised.value)
