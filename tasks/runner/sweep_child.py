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


def end_with_parent(parent: int) -> None:
    """Ask for SIGTERM when the process `parent` ends; at once if it has ended already.

    Where SIGTERM is blocked, as in the jobs of a cluster, SIGINT does the same.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    number = signal.SIGINT if signal.SIGTERM in blocked else signal.SIGTERM
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def keep_to(cores: str) -> None:
    """Keep this process, and all that it starts, to some cores."""
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    # Before torch is imported: its thread pools count the cores then.
    keep_to(sys.argv[2])
    from tasks.runner.cli import main

    sys.exit(main(sys.argv[3:]))
