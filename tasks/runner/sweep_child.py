"""`python -m tasks.runner.sweep_child PARENT CORES COMMAND ...`: a command of a sweep, in its slot.

It keeps to its cores (numbers with commas between, or `-` for those it has), and it stops when the sweep
above it dies. A sweep that is killed cannot ask its run to stop, and a run left behind would compete with the
next sweep. So the system is asked to do it (Linux): the run gets SIGTERM, writes its checkpoint and ends.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
BY_PARENT = "XSA_STOPPED_BY_PARENT"


def end_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Ask for a signal when the process `parent` ends; at once if it has ended already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def mind_the_parent_alone() -> None:
    """Leave all but SIGINT, which the parent sends, unheard.

    A cluster signals every process of a job. The parent passes on what it gets, and two signals would mean:
    stop at once, without a checkpoint.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


def keep_to(cores: str) -> None:
    """Keep this process, and all that it starts, to some cores."""
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


if __name__ == "__main__":
    if os.environ.get(BY_PARENT):
        mind_the_parent_alone()
        end_with_parent(int(sys.argv[1]), signal.SIGINT)
    else:
        end_with_parent(int(sys.argv[1]))
    # Before torch is imported: its thread pools count the cores then.
    keep_to(sys.argv[2])
    from tasks.runner.cli import main

    sys.exit(main(sys.argv[3:]))
