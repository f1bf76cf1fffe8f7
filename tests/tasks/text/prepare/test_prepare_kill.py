"""Killed at any moment and started again, a job ends with the bytes of an uninterrupted one."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prepare_bench import Bench, make_documents, texts_of, write_json_lines

from tasks.text.prepare import job
from tasks.text.prepare.verify import verify

ROOT = Path(__file__).resolve().parents[4]
EXIT = 86  # of a child that killed itself where it was told to


def in_a_child(work: Callable[[], object], changes_before_death: int) -> int:
    """Run `work` in a forked process that dies before a change of the file system; return its exit status.

    Renaming and removing are all the changes that others can see; dying there is like SIGKILL: nothing is
    cleaned up. Status 0 means that there were fewer changes.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = changes_before_death

    def counted(change: Callable) -> Callable:
        def wrapper(*arguments, **options):
            nonlocal left
            if not left:
                os._exit(EXIT)
            left -= 1
            return change(*arguments, **options)

        return wrapper

    try:
        for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "unlink"), (os, "rmdir")):
            setattr(owner, name, counted(getattr(owner, name)))
        work()
        os._exit(0)
    except BaseException:
        os._exit(1)


def test_killed_before_any_change_and_started_again_the_shards_are_the_same(
    bench: Bench, inline: None
) -> None:
    documents = make_documents(30)
    source = write_json_lines(bench.root / "a.jsonl", documents)
    changes = {"shard_tokens": 2000, "held_out": 0.4, "reading": {"unit_bytes": 2500}}
    whole = bench.prepare("whole", source, **changes)
    assert all(len(facts["shards"]) > 1 for facts in whole["splits"].values())
    expected = bench.shards("whole")
    deaths = 0
    for moment in range(500):
        shutil.rmtree(bench.root / "out", ignore_errors=True)
        status = in_a_child(lambda: bench.prepare("out", source, **changes), moment)
        if status == 0:
            break
        assert status == EXIT
        deaths += 1
        manifest = bench.prepare("out", source, **changes)
        assert bench.shards("out") == expected, f"killed before change {moment}"
        assert manifest == whole
        assert not (bench.root / "out" / ".work").exists()
    assert status == 0
    assert deaths > 30


def test_killed_again_and_again_a_job_still_ends_and_ends_the_same(bench: Bench, inline: None) -> None:
    source = write_json_lines(bench.root / "a.jsonl", make_documents(60))
    changes = {"shard_tokens": 3000, "held_out": 0.3}
    bench.prepare("whole", source, **changes)
    for _ in range(100):
        # Ten changes at a time: enough for a unit, so that every start gets on.
        if in_a_child(lambda: bench.prepare("out", source, **changes), 10) == 0:
            break
    else:
        pytest.fail("a hundred starts did not finish the job")
    assert bench.shards("out") == bench.shards("whole")


def test_a_worker_that_is_killed_is_told_and_the_job_goes_on(bench: Bench) -> None:
    source = write_json_lines(bench.root / "a.jsonl", make_documents(200))

    class Deadly(job.Pool):
        def answers(self, requests, count):
            for number, result in enumerate(super().answers(requests, count)):
                if number == 2:
                    self._processes[0].kill()
                yield result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "Pool", Deadly)
        with pytest.raises(
            ValueError, match=r"a worker process died \(status -9\).*fewer --workers"
        ) as caught:
            bench.prepare("out", source)
    assert "\n" not in str(caught.value)
    manifest = bench.prepare("out", source)
    assert sum(facts["documents"] for facts in manifest["splits"].values()) == 200


def command(source: Path, out: Path, workers: int) -> list[str]:
    options = ["--tokenizer", "bytes", "--held-out", "0.1", "--shard-tokens", "9000000"]
    words = ["data", "prepare", str(source), "--out", str(out), "--workers", str(workers), *options]
    return [sys.executable, "-m", "tasks", *words]


def run(words: list[str], **options) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def gone(pids: set[int]) -> bool:
    """Tell whether none of these processes runs any more."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
    return True


def children_of(pid: int) -> set[int]:
    """Return the processes that `pid` started."""
    return {
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    }


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to see the worker processes")
def test_a_killed_process_leaves_no_workers_and_another_number_of_them_ends_the_same(bench: Bench) -> None:
    documents = [f"{i} " + "lorem ipsum " * 3000 for i in range(950)]  # 34 MB: three units
    source = write_json_lines(bench.root / "a.jsonl", documents)
    alone = run(command(source, bench.root / "whole", 1))
    killed = run(command(source, bench.root / "out", 2))
    work = bench.root / "out" / ".work"
    deadline = time.monotonic() + 300
    while not list(work.glob("????????.json")) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    workers = children_of(killed.pid)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert len(workers) == 2
    assert not (bench.root / "out" / "manifest.json").exists()
    output, _ = alone.communicate(timeout=300)
    assert alone.returncode == 0, output
    while not gone(workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(workers)
    again = run(command(source, bench.root / "out", 2))
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert bench.shards("out") == bench.shards("whole")
    manifest, checks = verify(bench.root / "out")
    assert not [problem for check in checks for problem in check.problems]
    assert sum(facts["documents"] for facts in manifest["splits"].values()) == len(documents)
    held = texts_of(bench.shards("out"), "val")
    assert len(held) == len(set(held))
    assert set(held) <= set(documents)
