"""SIGINT and SIGTERM ask a run to stop at the end of its step, with a checkpoint. A second one stops it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_on_signal(ask: Callable[[int], None]) -> Iterator[None]:
    """Call `ask(number)` on the first signal; the second does what it always does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: object) -> None:
        restore()
        ask(number)

    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()
