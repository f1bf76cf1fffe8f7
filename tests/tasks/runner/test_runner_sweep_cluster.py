"""Sweeps on a cluster: the script that SLURM gets, the job that it runs, and what a preemption does."""

import os
import signal
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.errors import UserError
from tasks.runner import checkpoint, cli, sweep_cluster
from tasks.runner.sweep_cluster import CellJob, minutes, parse
from tasks.runner.sweep_jobs import LOG

submitit = pytest.importorskip("submitit", reason="the extra `cluster` is not installed")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90:30", 91), ("2:00:00", 120), ("1-0", 1440), ("2-12:30", 3630), ("1-00:00:01", 1441)],
)
def test_times_are_read_as_sbatch_reads_them(text, expected):
    assert minutes(text) == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["partitions=gpu"], "unknown key 'partitions'; did you mean 'partition'"),
        (["partition"], "expected KEY=VALUE such as partition=gpu, got 'partition'"),
        (["partition="], "expected KEY=VALUE"),
        (["gpus=two"], "gpus: expected a whole number of at least 1, got 'two'"),
        (["gpus=0"], "gpus: expected a whole number of at least 1"),
        (["time=soon"], "time: expected minutes, H:M:S or D-H:M:S, got 'soon'"),
        (["time=0"], "time: expected at least a minute"),
        (["qos=a", "qos=b"], "qos is given twice"),
        (["nodes=2"], "a cell runs on one node"),
    ],
)
def test_mistakes_in_options_are_one_line(options, said):
    with pytest.raises(UserError, match=said) as raised:
        parse(options)
    assert "\n" not in str(raised.value)


@pytest.fixture
def words(lab):
    """A sweep of three seeds of a small run."""
    return ["experiment=text/tiny", *lab.overrides(), "seed=0,1,2"]


SLURM = ["--launcher", "slurm", "--slurm", "partition=gpu", "--slurm", "time=2:00:00", "--slurm", "gpus=2"]
MORE = ["--slurm", "cpus=8", "--slurm", "sbatch.exclusive=true", "--slurm", "sbatch.reservation=night"]


def flags(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}


def test_a_dry_run_shows_the_script_and_submits_nothing(lab, words, capsys):
    assert cli.main(["sweep", *words, "--dry-run", *SLURM, *MORE]) == 0
    text = capsys.readouterr().out
    assert "the script of 3 jobs" in text
    assert flags(text) >= {
        "--array=0-2%3",
        "--partition=gpu",
        "--time=120",
        "--gpus-per-node=2",
        "--cpus-per-task=8",
        "--nodes=1",
        "--signal=USR2@120",
        "--requeue",
        "--exclusive",
        "--reservation=night",
        "--open-mode=append",
    }
    assert "wckey" not in text
    assert not (lab.root / "runs").exists()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A machine with SLURM's commands: sbatch keeps the script, squeue answers from a file."""
    tools = tmp_path / "bin"
    tools.mkdir()
    queue = tmp_path / "queue"
    programs = {
        "sbatch": f'cat "$1" > {tmp_path}/script; echo "Submitted batch job 4242"',
        "srun": "exit 1",
        "squeue": f'grep -F "$3" {queue}',
    }
    for name, text in programs.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    return SimpleNamespace(script=tmp_path / "script", queue=queue)


def test_every_waiting_cell_becomes_a_job_of_one_array_and_is_not_submitted_twice(
    lab, words, cluster, capsys
):
    assert cli.main(["sweep", *words, *SLURM]) == 0
    assert "3 cells submitted, jobs 4242_0 to 4242_2" in capsys.readouterr().out
    assert "--array=0-2%3" in flags(cluster.script.read_text())
    folder = lab.root / "runs" / "slurm"
    pickled = sorted(folder.glob("4242_*/*submitted.pkl"))
    assert len(pickled) == 3
    loaded = [submitit.core.utils.DelayedSubmission.load(path).function for path in pickled]
    assert {job.cell for job in loaded} == {
        path.name for path in (lab.root / "runs").iterdir() if path.name != "slurm"
    }
    assert {job.gpus for job in loaded} == {2}
    assert loaded[0].work().directory.name == loaded[0].cell  # the words give the cell again
    cluster.queue.write_text("4242_0 gpu xsa R\n4242_1 gpu xsa PD\n")
    assert cli.main(["sweep", *words, *SLURM]) == 0
    text = capsys.readouterr().out
    assert "2 cells are queued already" in text
    assert "job 4242" in text


def test_a_machine_without_slurm_is_one_line(words, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["sweep", *words, *SLURM]) == 2
    line = capsys.readouterr().err
    assert "srun" in line
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--slurm", "partition=gpu"], "--slurm: for --launcher slurm"),
        (["--launcher", "slurm", "--jobs", "2"], "for SLURM give --slurm parallel=N"),
    ],
)
def test_options_of_the_other_launcher_are_refused(words, capsys, more, said):
    assert cli.main(["sweep", *words, *more]) == 2
    assert said in capsys.readouterr().err


def test_several_gpus_of_a_cell_are_as_many_processes(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        sweep_cluster.sweep_jobs, "start", lambda job, directory, slot: seen.append(job.words)
    )
    job = SimpleNamespace(name="run", words=("run", "text/tiny", "seed=0"), done=lambda: False)
    CellJob((), "cell", gpus=4).start(job, tmp_path, None)
    CellJob((), "cell", gpus=1).start(job, tmp_path, None)
    assert seen == [("run", "text/tiny", "--nproc", "4", "seed=0"), ("run", "text/tiny", "seed=0")]


def test_a_cell_that_the_words_no_longer_give_is_told(words):
    with pytest.raises(UserError, match="nothing: no longer a cell of"):
        CellJob(tuple(words), "nothing").work()


def test_a_preempted_job_writes_its_checkpoint_and_goes_on_when_it_is_queued_again(
    lab, tmp_path, monkeypatch
):
    monkeypatch.setenv("XSA_CPU_KERNEL", "0")
    long = lab.overrides("loop.max_steps=300", "loop.checkpoint_every=20", "loop.eval_every=0")
    words = ("experiment=text/tiny", *long, "seed=0")
    command = CellJob(words, "").words
    (cell,) = [work.directory for work in works_of(command)]
    executor = submitit.LocalExecutor(tmp_path / "jobs" / "%j", python=sys.executable)
    executor.update_parameters(timeout_min=10)
    job = executor.submit(CellJob(words, cell.name))
    try:
        deadline = time.monotonic() + 120
        while not checkpoint.steps(cell / "checkpoints"):
            assert time.monotonic() < deadline, job.stderr()
            time.sleep(0.02)
        # What SLURM does before it takes the node away; the local executor's own process has no say in it.
        controller = f"/proc/{job.job_id}/task/{job.job_id}/children"
        (task,) = map(int, Path(controller).read_text().split())
        (run,) = map(int, Path(f"/proc/{task}/task/{task}/children").read_text().split())
        for number in (signal.SIGTERM, signal.SIGUSR2):
            os.kill(run, number)  # SLURM signals every process of a job; the run minds its parent alone
        os.kill(task, signal.SIGUSR2)
        assert job.result() == 0
    finally:
        job.cancel(check=False)
    assert "Requeued job" in job.stderr() + job.stdout()
    log = (cell / LOG).read_text()
    assert "SIGINT: finishing the step and writing a checkpoint" in log
    assert "resuming from step-" in log
    (work,) = works_of(command)
    assert work.record().status == "completed"
    assert work.record().curves["train"].step == list(range(1, 301))


def works_of(words):
    from tasks.runner.suite import FREE, expand
    from tasks.runner.sweep_jobs import work_of_cell

    return [work_of_cell(cell) for cell in expand(FREE, list(words))]
