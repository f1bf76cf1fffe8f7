"""The rows of a sweep: where each cell stands, by its records and by the job that runs now."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from results.record import RunRecord
from tasks.runner.sweep_jobs import Work


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
    """A cell in the live table. `rate` is in units of its task (tokens) a second, times are in seconds."""

    work: Work
    state: State
    detail: str = ""
    step: int = 0
    loss: float | None = None
    rate: float | None = None
    seconds: float = 0.0
    left: float | None = None
    before: RunRecord | None = None  # its record when the sweep began

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


def row_of(work: Work, retry_failed: bool) -> Row:
    """Return the row of a cell as a sweep begins."""
    return Row(work, *state_of(work, retry_failed), before=work.record())
