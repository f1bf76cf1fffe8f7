"""Run the test suite with pytest; further arguments go to pytest.

./xsa test                      everything
./xsa test tests/xsa_core -x    one folder, stop at the first failure
"""

import argparse
import os
import subprocess
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take everything that follows as arguments of pytest."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of pytest")


def run(options: argparse.Namespace) -> int:
    """Run pytest from the root of the repository, one worker per core unless told otherwise."""
    from tasks.runner.paths import ROOT

    arguments = list(options.arguments)
    if not any(word.startswith(("-n", "--numprocesses", "--pdb")) for word in arguments):
        workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, 4)
        arguments = ["-n", str(workers), "--dist", "loadfile", *arguments]
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode
