"""A sweep over cells whose runs are played: `python sweep_stage.py DIRECTORY CELLS JOBS`.

A played run does what a real one does about locks, checkpoints, signals and records, in milliseconds: it
holds the run's lock, makes steps and keeps each as its checkpoint, writes an `interrupted` record when it is
told to stop and a `completed` one at the end. Whatever it does stands in its journal, a line each.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tasks.runner.paths import ROOT
from tasks.runner.sweep import Sweep
from tasks.runner.sweep_display import PlainTable
from tasks.runner.sweep_jobs import Job
from tasks.runner.sweep_slots import Slot

STEPS = 12
PLAY = """
import os, signal, sys, time
from pathlib import Path
from filelock import FileLock, Timeout
from tasks.runner.sweep_child import end_with_parent
end_with_parent(int(sys.argv[1]))
place, steps = Path(sys.argv[2]), int(sys.argv[3])
def say(word):
    with (place / "journal").open("a") as stream: stream.write(f"{word}\\n")
def keep(name, text):
    (place / f".{name}").write_text(text); (place / f".{name}").rename(place / name)
stop = []
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, lambda *_: stop.append(1))
try: FileLock(place / ".lock", timeout=0).acquire()
except Timeout: print("xsa: error: this run is under way"); sys.exit(2)
checkpoint = place / "checkpoint"
done = int(checkpoint.read_text()) if checkpoint.exists() else 0
say(f"begin {done}")
for step in range(done + 1, steps + 1):
    time.sleep(0.04)
    say(f"step {step}"); keep("checkpoint", str(step))
    if stop: keep("record", "interrupted"); say("stopped"); sys.exit(143)
say("end"); keep("record", "completed")
"""


class Played:
    """What a sweep asks of a cell's work; the record is a word in a file."""

    config = None

    def __init__(self, directory: Path) -> None:
        self.directory, self.label = directory, directory.name
        self.jobs = (Job("run", (str(directory),), lambda: self.status() == "completed"),)

    def status(self) -> str:
        path = self.directory / "record"
        return path.read_text() if path.exists() else ""

    def record(self) -> Any:
        return None

    def is_done(self) -> bool:
        return self.jobs[0].done()


def start(job: Job, directory: Path, slot: Slot) -> subprocess.Popen:
    """Start a played run."""
    words = [sys.executable, "-c", PLAY, str(os.getpid()), str(directory), str(STEPS)]
    with (directory / "sweep.log").open("ab") as log:
        return subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


if __name__ == "__main__":
    place, cells, jobs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    works = [Played(place / f"cell-{number}") for number in range(cells)]
    sys.exit(Sweep(works, PlainTable(), slots=[Slot()] * jobs, start=start).run())
