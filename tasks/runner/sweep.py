"""Run the cells of a suite one after another, so that whatever happens no finished work is lost.

The records are the state: a cell is done when its record says so. Nothing else is kept, so a sweep may be
killed, started again, or started twice at once: each cell is taken under a lock, and a run that was stopped
goes on from its checkpoint.
"""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from filelock import FileLock, Timeout

from tasks.errors import UserError
from tasks.runner import sweep_jobs
from tasks.runner.signals import stop_on_signal
from tasks.runner.sweep_jobs import RUN_LOCK, SWEEP_LOCK, Job, Work

POLL_SECONDS = 0.5  # between looks at the running job
ELSEWHERE_SECONDS = 3.0  # between looks at cells that other processes hold
GRACE_SECONDS = 20.0  # for a job that was told to end at once


class State(StrEnum):
    """Where a cell stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ELSEWHERE = "elsewhere"  # another process is at it
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class Row:
    """A cell in the live table."""

    work: Work
    state: State
    detail: str = ""
    step: int = 0
    loss: float | None = None
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Return the steps of the cell's run, 0 for a command."""
        return self.work.config.loop.max_steps if self.work.config is not None else 0


class Display(Protocol):
    """What shows the rows."""

    def update(self, rows: Sequence[Row]) -> None:
        """Show the rows as they are now."""

    def note(self, line: str) -> None:
        """Show a line that stays."""


def state_of(work: Work, retry_failed: bool) -> tuple[State, str]:
    """Return where a cell stands by its records alone, and why it failed if it did."""
    if work.is_done():
        return State.DONE, ""
    record = work.record()
    if record is not None and record.status == "failed" and not retry_failed:
        return State.FAILED, record.reason or ""
    if record is not None and record.status == "interrupted":
        return State.WAITING, "goes on from its checkpoint"
    return State.WAITING, ""


class Sweep:
    """One pass over the cells until each is done, failed, or the sweep is told to stop."""

    def __init__(
        self,
        works: Sequence[Work],
        display: Display,
        *,
        retry_failed: bool = False,
        start: Callable[..., subprocess.Popen] = sweep_jobs.start,
    ) -> None:
        self.rows = [Row(work, *state_of(work, retry_failed)) for work in works]
        self.display, self.retry_failed, self.start = display, retry_failed, start
        self.stop: int | None = None
        self.process: subprocess.Popen | None = None

    def run(self) -> int:
        """Run what is to be run; return 0 when all is done, 1 where something failed, 128+n when stopped."""
        self.display.update(self.rows)
        with stop_on_signal(self._ask):
            waiting = [row for row in self.rows if row.state is State.WAITING]
            while waiting and self.stop is None:
                waiting = self._round(waiting)
        self.display.update(self.rows)
        if self.stop is not None:
            return 128 + self.stop
        return int(any(row.state is not State.DONE for row in self.rows))

    def _round(self, waiting: list[Row]) -> list[Row]:
        """Try every waiting cell once; return those that other processes hold, after a pause for them."""
        held = []
        for row in waiting:
            if self.stop is not None:
                break
            if not self._attempt(row):
                held.append(row)
            self.display.update(self.rows)
        if held and len(held) == len(waiting) and self.stop is None:
            time.sleep(ELSEWHERE_SECONDS)
        return held

    def _attempt(self, row: Row) -> bool:
        """Bring a cell to its end if no other process is at it; tell whether it is settled."""
        work = row.work
        try:
            work.directory.mkdir(parents=True, exist_ok=True)
            lock = FileLock(work.directory / SWEEP_LOCK)
            lock.acquire(timeout=0)
        except Timeout:
            row.state = State.ELSEWHERE
            return False
        except OSError as error:
            raise UserError(f"{work.directory}: cannot be written ({error.strerror})") from error
        try:
            row.state, row.detail = state_of(work, self.retry_failed)  # another sweep may have been here
            if row.state is not State.WAITING:
                return True
            if sweep_jobs.is_held(work.directory / RUN_LOCK):
                row.state = State.ELSEWHERE
                return False
            return self._run_jobs(row)
        finally:
            lock.release()

    def _run_jobs(self, row: Row) -> bool:
        row.state, began = State.RUNNING, time.monotonic()
        for job in row.work.jobs:
            if job.done():
                continue
            self._run_job(row, job, began)
            if row.state is not State.RUNNING:
                return row.state is not State.ELSEWHERE
        row.state, row.detail = State.DONE, ""
        return True

    def _run_job(self, row: Row, job: Job, began: float) -> None:
        """Run one job to its end and let the row say how it ended; RUNNING means: go on."""
        work = row.work
        before = work.record()
        log = work.directory / sweep_jobs.LOG
        position = log.stat().st_size if log.exists() else 0
        row.detail = "" if job.name == "run" else job.name
        self.process = self.start(job, work.directory)
        status = self._wait(row, began)
        if job.done():
            return
        after = work.record()
        fresh = after is not None and after != before
        if self.stop is not None or (fresh and after.status == "interrupted"):
            row.state = State.STOPPED
            row.detail = "its checkpoint is written" if fresh else "stopped"
        elif fresh and after.status == "failed":
            row.state, row.detail = State.FAILED, after.reason or ""
        elif status == 2 and sweep_jobs.is_held(work.directory / RUN_LOCK):
            row.state = State.ELSEWHERE
        else:
            row.state, row.detail = State.FAILED, sweep_jobs.why(work.directory, position, status)
            if job.name == "run" and work.config is not None:
                sweep_jobs.record_failure(work.config, work.directory, row.detail)
            else:
                row.detail = f"{job.name}: {row.detail}"

    def _wait(self, row: Row, began: float) -> int:
        """Wait for the running job and keep the table alive; a second signal ends it at once."""
        try:
            while True:
                try:
                    return self.process.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    row.step, row.loss = sweep_jobs.position(row.work.directory)
                    row.seconds = time.monotonic() - began
                    self.display.update(self.rows)
        finally:
            if self.process.poll() is None:  # an exception is on its way
                self.process.send_signal(signal.SIGINT)
                try:
                    self.process.wait(GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()
            row.seconds = time.monotonic() - began
            self.process = None

    def _ask(self, number: int) -> None:
        """Pass a first signal on to the running job: it writes its checkpoint and ends."""
        self.stop = number
        self.display.note(f"{signal.Signals(number).name}: the running cell writes its checkpoint")
        if self.process is not None:
            self.process.send_signal(number)
