"""A disk that is full: one line, nothing half written, and the same command goes on when there is room."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from results.store import load_records, read_record, write_record
from tasks.runner import cli
from tasks.runner.paths import ROOT


@pytest.fixture(scope="module")
def record(make_lab, tmp_path_factory):
    """The record of a real, very small run."""
    return make_lab(tmp_path_factory.mktemp("template")).train("loop.max_steps=2").record


def write_limited(record, folder: Path, size: int) -> int:
    """Write a record where files may grow to `size` bytes; return 7 where the system refused."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        write_record(record, folder)
    except OSError:
        return 7
    return 0


def test_a_record_that_does_not_fit_leaves_the_old_one_and_no_other_file(fork, tmp_path, record):
    path = write_record(record, tmp_path / "records")
    before = path.read_bytes()
    larger = record.updated(sample="x" * 10_000)
    for size in (0, 1, 1000, len(before), len(before) + 1000):
        child = fork(write_limited, larger, path.parent, size)
        assert child.wait() == 7, child.text()
        assert path.read_bytes() == before
        assert [each.name for each in path.parent.iterdir()] == [path.name]


SCRIPT = """
mount -t tmpfs -o size="$SIZE" tmpfs "$RUNS" && mount -t tmpfs -o size=4k tmpfs "$RECORDS" || exit 77
echo mounted
"$@"; echo "=== checkpoint: $?"
ls "$RUNS"/*/checkpoints
mount -o remount,size=64m "$RUNS"
"$@"; echo "=== record: $?"
ls -A "$RECORDS"
mount -o remount,size=64m "$RECORDS"
"$@"; echo "=== room: $?"
cp "$RECORDS"/*.json "$OUT"
"""


def may_mount() -> bool:
    """Tell whether this process may mount a file system in a name space of its own."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="this system lets no user mount a small file system")
def test_a_run_on_full_disks_says_so_each_time_and_ends_complete_when_there_is_room(lab, tmp_path):
    for name in ("runs", "records", "out"):
        (tmp_path / name).mkdir()
    places = {name.upper(): str(tmp_path / name) for name in ("runs", "records", "out")}
    (file,) = lab.at("measure").train("loop.max_steps=2").run_directory.glob("checkpoints/*.pt")
    # Room for two checkpoints and half of the one that is being written.
    places["SIZE"] = str(file.stat().st_size * 5 // 2)
    words = lab.overrides(
        "loop.max_steps=8",
        "loop.checkpoint_every=2",
        f"output.runs={tmp_path / 'runs'}",
        f"output.records={tmp_path / 'records'}",
        "output.progress=plain",
    )
    command = [sys.executable, "-m", "tasks", "run", "text/tiny", *words]
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SCRIPT, "sh", *command],
        env={**os.environ, **places, "XSA_CPU_KERNEL": "0"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    first, rest = done.stdout.split("=== checkpoint: ")
    second, third = rest.split("=== record: ")
    assert "Traceback" not in done.stdout
    (line,) = [line for line in first.splitlines() if "error: " in line]
    assert "make room, then run the same command" in line
    assert "step-00000002.pt" in second  # what was whole before the disk was full
    assert "resuming from step-" in second
    assert "the record cannot be written" in second
    assert "resuming from step-00000008.pt" in third
    assert third.splitlines()[-1] == "=== room: 0"
    (path,) = (tmp_path / "out").iterdir()
    record = read_record(path)
    assert record.status == "completed"
    assert record.curves["train"].step == list(range(1, 9))


def test_a_sweep_whose_records_do_not_fit_goes_on_to_its_end(fork, lab):
    """The cell is told as failed with the reason; the finished record is not touched."""
    words = ["experiment=text/tiny", *lab.overrides("loop.max_steps=3"), "seed=0,1"]
    lab.train("loop.max_steps=3")
    before = load_records(lab.root / "records")
    child = fork(sweep_limited, words)
    assert child.wait() == 1, child.text()
    assert "1 done, 1 failed" in child.text()
    assert "Traceback" not in child.text()
    assert load_records(lab.root / "records") == before


def sweep_limited(words: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # less than a record
    return cli.main(["sweep", *words])
