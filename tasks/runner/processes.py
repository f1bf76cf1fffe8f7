"""Several processes of one run on this machine: `./xsa run X --nproc N`.

The processes are torch elastic's, in the environment that torchrun gives them; so `torchrun
--nproc_per_node=N -m tasks run X` is the same run. What is added: a signal reaches each process once and is
left time to write the checkpoint, only the first process speaks, and when one dies the rest ends within
seconds, with one line that says which and what to do.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import ProcessFailure, SubprocessContext

from results.record import RunRecord, utc_now
from results.store import read_record
from tasks.errors import UserError
from tasks.runner import checkpoint, recording
from tasks.runner.config.schema import RunConfig
from tasks.runner.device import available_cores, choose_device, resolve_device
from tasks.runner.distributed import LAUNCHED, LOST
from tasks.runner.paths import ROOT, under_root

PATIENCE = 5  # seconds that the others have to end after one has died
POLL = 0.1  # seconds between looks at the processes
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
TAIL = 20  # lines shown of a process that fell with a traceback


class Processes(SubprocessContext):
    """torch elastic's processes, with less patience; `first_failures` are those before any was stopped."""

    first_failures: dict[int, ProcessFailure] | None = None

    def close(self, death_sig: signal.Signals | None = None, timeout: int = PATIENCE) -> None:
        """Stop what still runs: first by SIGTERM, after `PATIENCE` seconds by SIGKILL."""
        if self.first_failures is None:
            self.first_failures = dict(self._failures)
        super().close(death_sig, timeout=min(timeout, PATIENCE))


def launch(arguments: list[str], config: RunConfig, count: int) -> int:
    """Run `xsa ARGUMENTS` in `count` processes; return the exit status of the run.

    Raises:
        UserError: a count that is impossible here, or a process that died, named with what to do.
    """
    check(config, count)
    logging.disable(logging.CRITICAL)  # torch elastic's own lines; ours says it
    started = utc_now()
    # The processes meet at a store of this one: no port to choose, none that could be taken in the meantime.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="xsa-processes-") as folder:
        logs = DefaultLogsSpecs(folder, redirects=dict.fromkeys(range(1, count), Std.ALL))
        context = Processes(
            "run",
            sys.executable,
            # The child ends, with a checkpoint, should this process be killed.
            {rank: child(arguments) for rank in range(count)},
            {rank: environment(rank, count, store.port) for rank in range(count)},
            logs,
        )
        context.start()
        forwarded = forward_signals(context)
        result = context.wait(period=POLL)
        failures = result.failures if result else {}
        texts = {rank: read_tail(result.stderrs.get(rank)) for rank in failures} if result else {}
    if (
        forwarded
        and failures
        and all(ended_by(failure.exitcode, forwarded[0]) for failure in failures.values())
    ):
        return 128 + forwarded[0]  # asked for; where there was something to tell, the first process did
    return verdict(config, failures, context.first_failures or {}, texts, started)


def ended_by(code: int, number: int) -> bool:
    """Tell whether a process that ended with `code` was stopped by a signal that all of them got."""
    return code in {-number, 128 + number, LOST}


def check(config: RunConfig, count: int) -> None:
    """Refuse a number of processes that cannot be; say so where it is unwise."""
    if count < 1:
        raise UserError(f"--nproc: expected at least 1, got {count}")
    if "WORLD_SIZE" in os.environ:
        raise UserError("--nproc: this is a process of torchrun already; give one of both")
    device, cores = resolve_device(config.loop.device, 0), available_cores()
    if device.type == "cuda" and count > torch.cuda.device_count():
        raise UserError(
            f"--nproc: {count} processes need as many GPUs, this machine has {torch.cuda.device_count()}; "
            "take fewer, or loop.device=cpu"
        )
    if device.type == "cpu" and count > cores:
        print(
            f"xsa: {count} processes on {cores} cores take turns; --nproc {cores} is faster",
            file=sys.stderr,
            flush=True,
        )


def child(arguments: list[str]) -> tuple[str, ...]:
    """Return what the interpreter of a process is given."""
    return ("-P", "-m", "tasks.runner.sweep_child", str(os.getpid()), "-", *arguments)


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for a process, and an even share of the cores."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // count))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": threads,
        LAUNCHED: "1",
        # Torch warns that no parameter was unused, which is what one hopes for.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }


def forward_signals(context: Processes) -> list[int]:
    """Pass SIGINT and SIGTERM on: the first stops every process after the same step, the second at once.

    Returns:
        The list to which the signals that came are added.
    """
    forwarded: list[int] = []

    def forward(number: int, frame: object) -> None:
        forwarded.append(number)
        for pid in context.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    return forwarded


def read_tail(path: str | None) -> list[str]:
    """Return the last lines that a process wrote."""
    with contextlib.suppress(OSError, TypeError):
        return Path(path).read_text(errors="replace").splitlines()[-TAIL:]
    return []


def verdict(
    config: RunConfig,
    failures: dict[int, ProcessFailure],
    first: dict[int, ProcessFailure],
    texts: dict[int, list[str]],
    started: str,
) -> int:
    """Return the exit status where the first process has told why, else raise the line that does."""
    if not failures:
        return 0
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    guilty = {
        rank: code for rank, code in codes.items() if rank in first and code not in {LOST, -signal.SIGABRT}
    }
    if codes.get(0) in {1, 2, *STOPPED} and not any(code < 0 for code in guilty.values()):
        return codes[0]  # all agreed, and the first has said it
    rank, code = min(guilty.items() or codes.items(), key=lambda item: (item[1] >= 0, item[0]))
    if code < 0:
        reason = f"process of rank {rank} was killed by {signal.Signals(-code).name}"
    else:
        lines = texts.get(rank) or [f"exit status {code}"]
        print(*lines[:-1], sep="\n", file=sys.stderr)
        reason = f"process of rank {rank} failed: {lines[-1].removeprefix('xsa: error: ')}"
    record_failure(config, reason, started)
    saved = checkpoint.steps(under_root(config.output.runs) / config.run_id() / "checkpoints")
    where = f"goes on from {saved[-1].name}" if saved else "starts over (there is no checkpoint yet)"
    raise UserError(f"{reason}; the others were stopped. The same command {where}")


def record_failure(config: RunConfig, reason: str, started: str) -> None:
    """Name the cause in the run's record; begin one where the first process left none."""
    directory = under_root(config.output.runs) / config.run_id()
    record = None
    with contextlib.suppress(ValueError, OSError):
        record = read_record(directory / "record.json")
    if not isinstance(record, RunRecord) or record.finished_at is None or record.finished_at < started:
        device = choose_device(config.loop)
        record = recording.new_record(config, recording.environment(device, None, config.loop.compile))
        record = record.updated(started_at=started)
    elif record.status == "completed":
        return
    record = record.updated(status="failed", reason=reason, finished_at=max(utc_now(), record.started_at))
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        recording.keep(record, directory, under_root(config.output.records))
