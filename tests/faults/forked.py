"""A function in a process of its own, forked: no second import of torch, and a kill hurts nobody else.

Forking is safe here because the tests compute with one thread.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Forked:
    """A running child. `wait()` tells how it ended: its exit status, or minus the signal that ended it."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], output: Path) -> None:
        self.output, self.status = output, None
        self.pid = os.fork()
        if self.pid == 0:
            self._child(function, arguments)

    def _child(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        status = 99
        try:
            stream = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            status = int(function(*arguments) or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        if self.status is None:
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = -os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)
        return self.status

    def wait(self, seconds: float = 100.0) -> int:
        """Return how it ended; TimeoutError after some time."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs; it wrote: {self.text()}")
            time.sleep(0.005)
        return self.status

    def kill(self) -> None:
        """End it at once, as a full memory or a power cut would."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def text(self) -> str:
        """Return what it has printed."""
        return self.output.read_text() if self.output.exists() else ""
