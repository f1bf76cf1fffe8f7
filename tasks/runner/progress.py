"""Progress of a run: a live bar on a terminal, plain lines where output is redirected, or nothing."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

Report = Callable[[str, float], None]

PLAIN_SECONDS = 10.0  # between plain lines


class Display(Protocol):
    """What the loop tells a user while it works."""

    def __enter__(self) -> Self:
        """Start showing."""

    def __exit__(self, *exception: object) -> None:
        """Stop showing."""

    def begin(self, name: str, total: int, done: int, unit: str) -> None:
        """Start a counted piece of work of which `done` of `total` is done."""

    def advance(self, done: int, loss: float | None = None, rate: float | None = None) -> None:
        """Tell how far it is, the last loss and the speed in units per second."""

    def end(self) -> None:
        """The counted piece of work is over, complete or not."""

    def note(self, line: str) -> None:
        """Show a line that stays."""

    def work(self, name: str) -> AbstractContextManager[Report]:
        """Show work measured as a fraction: yields a function of what is being done and how far it is."""


class Silent:
    """Shows nothing: other ranks, tests."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def begin(self, name: str, total: int, done: int, unit: str) -> None:
        """Ignore."""

    def advance(self, done: int, loss: float | None = None, rate: float | None = None) -> None:
        """Ignore."""

    def end(self) -> None:
        """Ignore."""

    def note(self, line: str) -> None:
        """Ignore."""

    @contextmanager
    def work(self, name: str) -> Iterator[Report]:
        """Ignore."""
        yield lambda message, fraction: None


class Plain(Silent):
    """Lines on standard output, one every few seconds: logs, pipes, CI."""

    def begin(self, name: str, total: int, done: int, unit: str) -> None:
        """Remember the work; its first line comes with its first news."""
        self.name, self.total, self.unit = name, total, unit
        self.started, self.first = time.monotonic(), done
        self.last_shown, self.last_done = float("-inf"), None

    def advance(self, done: int, loss: float | None = None, rate: float | None = None) -> None:
        """Print a line if the last one is old enough, and at the end of the work."""
        now = time.monotonic()
        if (now - self.last_shown < PLAIN_SECONDS and done < self.total) or done == self.last_done:
            return
        self.last_shown, self.last_done = now, done
        progressed = done - self.first
        left = (now - self.started) / progressed * (self.total - done) if progressed else None
        parts = [f"{self.name}: {done:,}/{self.total:,}"]
        parts += [f"loss {loss:.4f}"] if loss is not None else []
        parts += [f"{rate:,.0f} {self.unit}/s"] if rate else []
        parts += [f"{duration(left)} left"] if left is not None and done < self.total else []
        print(", ".join(parts), flush=True)

    def note(self, line: str) -> None:
        """Print the line."""
        print(line, flush=True)

    @contextmanager
    def work(self, name: str) -> Iterator[Report]:
        """Print each kind of work once, when it starts."""
        shown: set[str] = set()

        def report(message: str, fraction: float) -> None:
            if message not in shown:
                shown.add(message)
                print(f"{name}: {message}", flush=True)

        yield report


class SpeedColumn(ProgressColumn):
    """Units per second, as the work itself reports it."""

    def render(self, task: Task) -> Text:
        """Return the text of one row."""
        rate = task.fields.get("rate")
        return Text(
            f"{rate:,.0f} {task.fields.get('unit', '')}/s" if rate else "", style="progress.data.speed"
        )


class LossColumn(ProgressColumn):
    """The last training loss."""

    def render(self, task: Task) -> Text:
        """Return the text of one row."""
        loss = task.fields.get("loss")
        return Text(f"loss {loss:.4f}" if loss is not None else "", style="bold")


class Rich:
    """A live bar: step, loss, speed, time left."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            LossColumn(),
            SpeedColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=self.console,
            speed_estimate_period=60,
        )
        self.current = None

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def begin(self, name: str, total: int, done: int, unit: str) -> None:
        """Add a row."""
        self.current = self.progress.add_task(name, total=total, completed=done, unit=unit)

    def advance(self, done: int, loss: float | None = None, rate: float | None = None) -> None:
        """Update the row."""
        self.progress.update(self.current, completed=done, loss=loss, rate=rate)

    def end(self) -> None:
        """Leave the row as it is."""
        self.progress.stop_task(self.current)

    @contextmanager
    def work(self, name: str) -> Iterator[Report]:
        """Add a row in hundredths; it appears with the first report."""
        row = None

        def report(message: str, fraction: float) -> None:
            nonlocal row
            if row is None:
                row = self.progress.add_task(name, total=100)
            self.progress.update(row, description=f"{name}: {message}", completed=round(100 * fraction))

        yield report
        if row is not None:
            self.progress.update(row, description=name, completed=100)

    def note(self, line: str) -> None:
        """Print the line above the bars."""
        self.progress.console.print(line, highlight=False, markup=False)


def make_display(kind: str) -> Display:
    """Return the display a config asks for; `auto` is a live bar on a terminal, else plain lines."""
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() else "plain"
    return {"rich": Rich, "plain": Plain, "none": Silent}[kind]()


def duration(seconds: float) -> str:
    """Return a duration for people: 45 s, 3:20 min or 2:05 h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60}:{seconds % 60:02d} min"
    return f"{seconds // 3600}:{seconds % 3600 // 60:02d} h"
