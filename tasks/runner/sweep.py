"""Run the cells of a suite, some at a time, so that whatever happens no finished work is lost.

The records are the state: a cell is done when its record says so. Nothing else is kept, so a sweep may be
killed, started again, or started twice at once: each cell is taken under a lock, and a run that was stopped
goes on from its checkpoint.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from tasks.runner import sweep_jobs
from tasks.runner.signals import stop_on_signal
from tasks.runner.sweep_attempt import Attempt, Start, take
from tasks.runner.sweep_jobs import Work
from tasks.runner.sweep_rows import Display, Row, State, row_of
from tasks.runner.sweep_slots import Slot

POLL_SECONDS = 0.1  # between looks at the running jobs
SHOW_SECONDS = 0.5  # between updates of the table where no cell changed its state
ELSEWHERE_SECONDS = 3.0  # between looks at cells that other processes hold
GRACE_SECONDS = 20.0  # for jobs that were told to end at once


class Sweep:
    """One pass over the cells until each is done, failed, or the sweep is told to stop.

    Args:
        slots: room for the cells that run at once, one each.
        retry_failed: run cells again whose record says that they failed.
        start: how a job is started, `start(job, directory, slot)`.
        patient: wait for cells that other processes hold, and take them over where those die.
        told: the signal that jobs are told to stop by; without it, the one that came.
    """

    def __init__(
        self,
        works: Sequence[Work],
        display: Display,
        *,
        slots: Sequence[Slot] = (Slot(),),
        retry_failed: bool = False,
        start: Start = sweep_jobs.start,
        patient: bool = True,
        told: int | None = None,
    ) -> None:
        self.rows = [row_of(work, retry_failed) for work in works]
        self.display, self.retry_failed, self.start = display, retry_failed, start
        self.patient, self.told = patient, told
        self.free = list(slots)
        self.active: list[Attempt] = []
        self.stop: int | None = None
        self.looked = float("-inf")  # when cells of other processes were last looked at

    def run(self) -> int:
        """Run what is to be run; return 0 when all is done, 1 where something failed, 128+n when stopped."""
        self.display.update(self.rows)
        with stop_on_signal(self._ask):
            try:
                self._until_settled()
            finally:
                self._end()
        self.display.update(self.rows)
        if self.stop is not None:
            return 128 + self.stop
        return int(any(row.state is not State.DONE for row in self.rows))

    def _until_settled(self) -> None:
        shown, when = [row.state for row in self.rows], time.monotonic()
        while True:
            self._fill()
            self.active = [attempt for attempt in self.active if not self._advance(attempt)]
            states, now = [row.state for row in self.rows], time.monotonic()
            if states != shown or now - when >= SHOW_SECONDS:
                self.display.update(self.rows)
                shown, when = states, now
            open_states = {State.RUNNING} if self.stop is not None else {State.RUNNING, State.WAITING}
            # Cells that others hold are waited for: they may die, and then the cell is ours.
            if self.stop is None and self.patient:
                open_states.add(State.ELSEWHERE)
            if not open_states & set(states):
                return
            # A free slot and a free cell: no reason to wait.
            if not (self.free and State.WAITING in states and self.stop is None):
                time.sleep(POLL_SECONDS)

    def _advance(self, attempt: Attempt) -> bool:
        """Tell whether a cell is settled; its slot is free then."""
        settled = attempt.advance(self.stop is not None)
        if settled:
            self.free.append(attempt.slot)
        return settled

    def _fill(self) -> None:
        """Give free slots to waiting cells, then to those of others that have become free."""
        self._take([row for row in self.rows if row.state is State.WAITING])
        if self.free and time.monotonic() - self.looked >= ELSEWHERE_SECONDS:
            self._take([row for row in self.rows if row.state is State.ELSEWHERE])
            self.looked = time.monotonic()

    def _take(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if not self.free or self.stop is not None:
                return
            attempt = take(row, self.free[0], self.start, self.retry_failed)
            if attempt is None:
                continue
            self.free.pop(0)
            self.active.append(attempt)
            if self._advance(attempt):
                self.active.remove(attempt)
            if self.stop is not None:  # the signal came while the job was being started
                attempt.tell(self.told or self.stop)

    def _ask(self, number: int) -> None:
        """Pass a first signal on to the running jobs: they write their checkpoints and end."""
        self.stop = number
        self.display.note(f"{signal.Signals(number).name}: what runs writes its checkpoint")
        for attempt in self.active:
            attempt.tell(self.told or number)

    def halt(self) -> None:
        """Stop what runs and return when it has ended; for signal handlers, which may interrupt anything."""
        if self.stop is None:
            self._ask(signal.SIGINT)
        for attempt in self.active:
            if attempt.process is not None:
                # Without reaping it: the interrupted code may be about to.
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PID, attempt.process.pid, os.WEXITED | os.WNOWAIT)

    def _end(self) -> None:
        """End what still runs because an exception is on its way."""
        for attempt in self.active:
            attempt.tell(signal.SIGINT)
        deadline = time.monotonic() + GRACE_SECONDS
        for attempt in self.active:
            if attempt.process is not None:
                try:
                    attempt.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    attempt.process.kill()
                    attempt.process.wait()
            attempt.lock.release()
