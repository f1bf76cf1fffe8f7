"""How a sweep shows its cells: a live table on a terminal, plain lines where output is redirected."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tasks.runner.progress import duration
from tasks.runner.sweep_rows import Row, State

PLAIN_SECONDS = 30.0  # between plain lines about the running cell
LEAST_ROWS = 6
WIDE = 116  # columns of a terminal that has room for one a number
STYLES = {
    State.WAITING: "dim",
    State.RUNNING: "bold cyan",
    State.ELSEWHERE: "yellow",
    State.DONE: "green",
    State.FAILED: "bold red",
    State.STOPPED: "yellow",
}


def summary(rows: Sequence[Row]) -> str:
    """Return how many cells stand where."""
    counts = Counter(row.state for row in rows)
    parts = [f"{counts[state]} {state}" for state in State if counts[state]]
    cells = "1 cell" if len(rows) == 1 else f"{len(rows)} cells"
    return f"{cells}: {', '.join(parts)}"


def steps(row: Row) -> str:
    """Return how many steps of how many a cell has made, nothing where none are known."""
    at_it = row.state in {State.RUNNING, State.STOPPED} and row.total
    return f"{row.step:,}/{row.total:,}" if at_it else ""


def progress(row: Row) -> str:
    """Return how far a cell is, in words."""
    parts = [row.detail] if row.detail else []
    parts += [f"step {steps(row)}"] if steps(row) else []
    if row.state is State.RUNNING:
        parts += [f"loss {row.loss:.4f}"] if row.loss is not None else []
        parts += [f"{row.rate:,.0f}/s"] if row.rate is not None else []
    parts += [duration(row.seconds)] if row.seconds else []
    parts += [f"{duration(row.left)} left"] if row.left is not None else []
    return ", ".join(parts)


def remaining(rows: Sequence[Row]) -> float | None:
    """Return the seconds until all is done: by the running cells, and by what cells took in this sweep.

    None while neither tells.
    """
    running = [row for row in rows if row.state is State.RUNNING]
    waiting = sum(row.state is State.WAITING for row in rows)
    if not running or any(row.left is None for row in running):
        return None
    took = [row.seconds for row in rows if row.state is State.DONE and row.seconds]
    each = median(took or [row.seconds + row.left for row in running])
    return (sum(row.left for row in running) + waiting * each) / len(running)


class PlainTable:
    """A line when a cell changes its state, and now and then one about each running cell."""

    def __init__(self) -> None:
        self.shown: dict[int, State] = {}
        self.last: dict[int, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def update(self, rows: Sequence[Row]) -> None:
        """Print what is new."""
        now = time.monotonic()
        if not self.shown:
            self.note(summary(rows))
            self.shown = {number: row.state for number, row in enumerate(rows)}
            self.last = dict.fromkeys(self.shown, now)
        for number, row in enumerate(rows):
            due = row.state is State.RUNNING and now - self.last[number] >= PLAIN_SECONDS
            if row.state is self.shown[number] and not due:
                continue
            self.shown[number], self.last[number] = row.state, now
            said = progress(row)
            self.note(
                f"[{number + 1}/{len(rows)}] {row.work.label}: {row.state}" + (f", {said}" if said else "")
            )

    def note(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)


class LiveTable:
    """A table that stays in place: the running cell, what failed, and as many others as there is room for."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.live = Live(console=self.console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)

    def update(self, rows: Sequence[Row]) -> None:
        """Draw the rows that matter now."""
        room = self.console.height - 8
        if self.console.width < WIDE:
            room //= 2  # rows of two lines
        room = max(LEAST_ROWS, room)
        shown = [rows[number] for number in sorted(chosen(rows, room))]
        table = wide(shown) if self.console.width >= WIDE else narrow(shown)
        hidden = len(rows) - len(chosen(rows, room))
        left = remaining(rows)
        foot = summary(rows) + (f" ({hidden} not shown)" if hidden else "")
        foot += f", about {duration(left)} left" if left is not None else ""
        self.live.update(Group(table, Text(foot, "bold")))

    def note(self, line: str) -> None:
        """Print a line above the table."""
        self.live.console.print(Text(line))


def narrow(rows: Sequence[Row]) -> Table:
    """Return the rows with what there is to say in one column, which may take several lines."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("cell", overflow="ellipsis", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=len(State.ELSEWHERE))
    table.add_column("progress", overflow="fold")
    for row in rows:
        table.add_row(Text(row.work.label), Text(row.state, STYLES[row.state]), Text(progress(row)))
    return table


def wide(rows: Sequence[Row]) -> Table:
    """Return the rows with a column for each number."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("cell", overflow="ellipsis", no_wrap=True)
    for title in ("state", "step", "loss", "rate", "time", "left"):
        table.add_column(title, no_wrap=True, justify="left" if title == "state" else "right")
    table.add_column("note", overflow="fold", min_width=24)
    for row in rows:
        running = row.state is State.RUNNING
        table.add_row(
            Text(row.work.label),
            Text(row.state, STYLES[row.state]),
            steps(row),
            f"{row.loss:.4f}" if row.loss is not None else "",
            f"{row.rate:,.0f}/s" if row.rate is not None and running else "",
            duration(row.seconds) if row.seconds else "",
            duration(row.left) if row.left is not None else "",
            Text(row.detail),
        )
    return table


def chosen(rows: Sequence[Row], room: int) -> list[int]:
    """Return the numbers of the rows to show: running first, then failed, then the nearest to the work."""
    here = next((number for number, row in enumerate(rows) if row.state is State.RUNNING), None)
    if here is None:
        here = next((number for number, row in enumerate(rows) if row.state is State.WAITING), len(rows))
    first = {State.RUNNING: 0, State.FAILED: 1, State.ELSEWHERE: 1}
    order = sorted(range(len(rows)), key=lambda n: (first.get(rows[n].state, 2), abs(n - here), n))
    return order[:room]


def make_table() -> PlainTable | LiveTable:
    """Return a live table on a terminal, else plain lines."""
    return LiveTable() if sys.stdout.isatty() else PlainTable()
