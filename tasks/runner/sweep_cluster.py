"""The cells of a sweep as a SLURM job array, one job each, through submitit.

A job does what a local sweep does about its one cell: it takes the cell's lock, passes over what is done, and
goes on from the checkpoint. When SLURM announces the end of its time, or that it is preempted (SIGUSR2, see
sbatch --signal), the run writes its checkpoint and the job is queued again. On SIGTERM alone the checkpoint
is written too, but the job waits to be ended: SLURM itself requeues what it preempts, and a job that a person
cancelled must stay cancelled.
"""

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.runner import sweep_jobs
from tasks.runner.config.compose import nearest
from tasks.runner.paths import ROOT
from tasks.runner.sweep import Sweep
from tasks.runner.sweep_display import PlainTable
from tasks.runner.sweep_jobs import Job, Work
from tasks.runner.sweep_rows import State
from tasks.runner.sweep_slots import Slot

MARK = ".slurm-job"  # in a cell's directory: the job that was last submitted for it
UNTIL_KILLED = 600.0  # seconds a job waits after SIGTERM; SLURM's KillWait is 30 by default
UNHEARD = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}  # by what runs in a job
SBATCH = "sbatch."  # prefix of options that go to sbatch as they are

# Our name -> submitit's, and how its text is read.
OPTIONS: dict[str, str] = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "exclude": "exclude",
    "nodelist": "nodelist",
    "time": "time",
    "gpus": "gpus_per_node",
    "cpus": "cpus_per_task",
    "mem": "mem",
    "nodes": "nodes",
    "parallel": "array_parallelism",
    "signal": "signal_delay_s",
    "setup": "setup",
}
NUMBERS = {"gpus", "cpus", "nodes", "parallel", "signal"}
DEFAULTS: dict[str, Any] = {"time": 24 * 60, "nodes": 1, "signal_delay_s": 120, "array_parallelism": 64}
REQUEUES = 100  # after the time ran out


@dataclass
class CellJob:
    """One cell, as submitit pickles it: the words of the sweep, and which of its cells this is.

    `gpus` above one trains on as many processes.
    """

    words: tuple[str, ...]
    cell: str
    gpus: int = 0
    sweep: Sweep | None = field(default=None, repr=False)

    def __call__(self) -> int:
        """Bring the cell to its end; RuntimeError where it failed, so that the job's state says so too."""
        work = self.work()
        retry = "--retry-failed" in self.words
        self.sweep = Sweep(
            [work],
            PlainTable(),
            retry_failed=retry,
            start=self.start,
            patient=False,
            told=signal.SIGINT,
        )
        status = self.sweep.run()
        (row,) = self.sweep.rows
        if status > 128:
            time.sleep(UNTIL_KILLED)
        if row.state is State.FAILED:
            raise RuntimeError(f"{work.label}: {row.detail}")
        return status

    def checkpoint(self) -> Any:
        """Let the run write its checkpoint; return the same job for submitit to queue again."""
        from submitit.helpers import DelayedSubmission

        if self.sweep is not None:
            self.sweep.halt()
        return DelayedSubmission(CellJob(self.words, self.cell, self.gpus))

    def work(self) -> Work:
        """Return the cell's work: the sweep's words expanded again, here.

        Raises:
            UserError: they no longer give this cell, because the suite or the code has changed since.
        """
        import argparse

        from tasks.runner.commands import sweep as command

        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        works, _ = command.gather(parser.parse_args(list(self.words)))
        for work in works:
            if work.directory.name == self.cell:
                return work
        raise UserError(f"{self.cell}: no longer a cell of {shlex.join(self.words)}; submit the sweep again")

    def start(self, job: Job, directory: Path, slot: Slot) -> subprocess.Popen:
        """Start a job of the cell that hears SIGINT alone, which this process sends.

        SLURM signals every process of a job, and two signals would mean: stop at once, without a checkpoint.
        The others are blocked from before the job begins.
        """
        if self.gpus > 1 and job.name == "run":
            command, experiment, *rest = job.words
            job = Job(job.name, (command, experiment, "--nproc", str(self.gpus), *rest), job.done)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
        try:
            return sweep_jobs.start(job, directory, slot)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def parse(options: Sequence[str]) -> dict[str, Any]:
    """Return submitit's parameters for options `KEY=VALUE`.

    Raises:
        UserError: an unknown key, a value that does not fit, or one given twice.
    """
    found: dict[str, Any] = dict(DEFAULTS)
    more: dict[str, Any] = {"requeue": True}
    seen = set()
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not value:
            raise UserError(f"--slurm: expected KEY=VALUE such as partition=gpu, got '{option}'")
        if key in seen and key != "setup":
            raise UserError(f"--slurm: {key} is given twice; give it once")
        seen.add(key)
        if key.startswith(SBATCH):
            more[key.removeprefix(SBATCH)] = True if value == "true" else value
        elif key not in OPTIONS:
            near = nearest(key, list(OPTIONS))
            raise UserError(
                f"--slurm: unknown key '{key}'; {near}the keys are {', '.join(OPTIONS)}, and any other "
                f"option of sbatch as {SBATCH}NAME=VALUE"
            )
        elif key == "setup":
            found["setup"] = [*found.get("setup", []), value]
        elif key == "time":
            found["time"] = minutes(value)
        elif key in NUMBERS:
            found[OPTIONS[key]] = whole_number(key, value)
        else:
            found[OPTIONS[key]] = value
    if found["nodes"] != 1:
        raise UserError("--slurm: nodes=1, a cell runs on one node; give it more gpus, or use ./xsa run")
    found["setup"] = [f"export PYTHONPATH={shlex.quote(str(ROOT))}:$PYTHONPATH", *found.get("setup", [])]
    # submitit would set a workload key of its own name, which a cluster may not know.
    fixed = {"job_name": "xsa", "ntasks_per_node": 1, "wckey": None}
    return {**fixed, "additional_parameters": more, **found}


def minutes(text: str) -> int:
    """Return the minutes of a time as sbatch takes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise UserError(f"--slurm: time: expected minutes, H:M:S or D-H:M:S, got '{text}'")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        hours, minute, second = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minute, second = numbers
    else:
        hours, minute, second = 0, *(*numbers, 0)[:2]
    total = int(days or 0) * 24 * 60 + hours * 60 + minute + (second > 0)
    if total < 1:
        raise UserError(f"--slurm: time: expected at least a minute, got '{text}'")
    return total


def whole_number(key: str, text: str) -> int:
    """Return a number of at least 1; UserError for anything else."""
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"--slurm: {key}: expected a whole number of at least 1, got '{text}'")
    return int(text)


def library() -> Any:
    """Return submitit; UserError where it is not installed."""
    try:
        import submitit
    except ImportError as error:
        raise UserError(
            "--launcher slurm: the package submitit is not installed; pip install submitit"
        ) from error
    return submitit


def folder_of(works: Sequence[Work]) -> Path:
    """Return where the jobs of a sweep keep their scripts and logs: beside the runs, on the shared disk."""
    return works[0].directory.parent / "slurm" / "%j"


def script(works: Sequence[Work], parameters: dict[str, Any]) -> str:
    """Return the sbatch script that would be submitted for these cells."""
    library()
    from submitit.slurm.slurm import _make_sbatch_string

    folder = folder_of(works)
    command = f"{shlex.quote(sys.executable)} -u -m submitit.core._submit {shlex.quote(str(folder))}"
    count = {"map_count": len(works)} if len(works) > 1 else {}
    return _make_sbatch_string(command=command, folder=folder, **count, **parameters)


def submit(works: Sequence[Work], words: Sequence[str], parameters: dict[str, Any]) -> list[str]:
    """Submit one job per cell as an array; return their ids, and leave each in its cell's directory.

    Raises:
        UserError: no SLURM here, or sbatch refused.
    """
    submitit = library()
    try:
        executor = submitit.SlurmExecutor(folder_of(works), max_num_timeout=REQUEUES)
        executor.update_parameters(**parameters)
        gpus = parameters.get("gpus_per_node", 0)
        cells = [CellJob(tuple(words), work.directory.name, gpus) for work in works]
        jobs = executor.submit_array(cells)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"--launcher slurm: {text}; see --dry-run for the script") from error
    for work, job in zip(works, jobs, strict=True):
        work.directory.mkdir(parents=True, exist_ok=True)
        (work.directory / MARK).write_text(job.job_id)
    return [job.job_id for job in jobs]


def queued(work: Work) -> str | None:
    """Return the job that was submitted for a cell and that SLURM still has, None where there is none."""
    try:
        job = (work.directory / MARK).read_text().strip()
        command = ["squeue", "--noheader", "--jobs", job]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return job if done.returncode == 0 and done.stdout.strip() else None
