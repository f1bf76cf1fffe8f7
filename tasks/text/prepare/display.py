"""Where a job tells how far it is."""

from typing import Protocol


class Display(Protocol):
    """Where a job tells how far it is: the runner's displays."""

    def begin(self, name: str, total: int, done: int, unit: str) -> None:
        """Start a counted piece of work."""

    def advance(self, done: int, loss: float | None = None, rate: float | None = None) -> None:
        """Tell how far it is, and the speed in units per second."""

    def end(self) -> None:
        """The piece of work is over."""

    def note(self, line: str) -> None:
        """Show a line that stays."""


class Quiet:
    """Shows nothing."""

    def begin(self, name: str, total: int, done: int, unit: str) -> None:
        """Ignore."""

    def advance(self, done: int, loss: float | None = None, rate: float | None = None) -> None:
        """Ignore."""

    def end(self) -> None:
        """Ignore."""

    def note(self, line: str) -> None:
        """Ignore."""
