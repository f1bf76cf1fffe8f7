"""One run from its config to its record: open, resume, train, evaluate, save, record."""

import contextlib
import errno
import signal
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from optimizers.build import build_optimizer
from results.record import RunRecord
from results.store import read_record
from tasks.base import Task
from tasks.errors import UserError
from tasks.runner import checkpoint, distributed, memory, metrics, recording, rng, sharding
from tasks.runner.config.schema import RunConfig
from tasks.runner.device import Device, choose_device
from tasks.runner.distributed import LostContact, Ranks
from tasks.runner.kernels import KernelBuild
from tasks.runner.loop import Callbacks, Interrupted, NonFiniteError, Trainer
from tasks.runner.paths import under_root
from tasks.runner.progress import Display, Silent
from tasks.runner.registry import load_task
from tasks.runner.sharing import split_batch
from tasks.runner.signals import stop_on_signal
from tasks.runner.trace import Trace

# In a run's directory while a run begun with --fresh is not complete: an older record does not count then.
BEGUN_ANEW = ".begun-anew"
AT_ONCE = "stopped at once"  # by a second signal, not in step with other processes


@dataclass(frozen=True)
class Outcome:
    """A finished run: its record, where that lies, and the exit status it means."""

    record: RunRecord
    record_path: Path
    run_directory: Path
    exit_status: int


def finished_record(config: RunConfig) -> Path | None:
    """Return the record of this very run if it has completed, else None."""
    path = under_root(config.output.records) / f"{config.run_id()}.json"
    begun_anew = under_root(config.output.runs) / config.run_id() / BEGUN_ANEW
    if not path.exists() or begun_anew.exists():
        return None
    try:
        record = read_record(path)
    except ValueError as error:
        raise UserError(f"{error}, or add --fresh to run it again") from None
    same = isinstance(record, RunRecord) and record.config_hash == config.config_hash()
    return path if same and record.status == "completed" else None


def finished_run(config: RunConfig, display: Display) -> Path | None:
    """Return the record of this very run on this very data if it has completed, else None.

    Raises:
        UserError: it has completed on other data: a file that has changed since, or another of that name.
    """
    path = finished_record(config)
    if path is None:
        return None
    found, now = read_record(path).data.fingerprint, open_task(config, display).fingerprint
    if found != now:
        raise UserError(
            f"{path} is of the same config on other data ({found[:12]}, now {now[:12]}); "
            "--fresh replaces it, another seed or output.records keeps both"
        )
    return path


def train(config: RunConfig, display: Display, *, fresh: bool = False) -> Outcome:
    """Run a config to its end, resuming from its last checkpoint unless `fresh`.

    Raises:
        UserError: data, model, checkpoint or a directory cannot be used, memory does not suffice, or the run
            is under way elsewhere.
    """
    ranks = distributed.join()
    directory = under_root(config.output.runs) / config.run_id()
    with contextlib.ExitStack() as held:

        def take_directory() -> None:
            make_writable(under_root(config.output.records), "output.records")
            make_writable(directory, "output.runs")
            try:
                held.enter_context(FileLock(directory / ".lock", timeout=0))
            except Timeout:
                raise UserError(
                    f"{directory}: this run is under way in another process; wait for it or stop it"
                ) from None

        distributed.first_decides(take_directory, ranks)
        outcome = run_locked(config, display if ranks.is_first else Silent(), ranks, directory, fresh)
        if outcome.record.reason != AT_ONCE:
            distributed.leave()
    return outcome


def make_writable(directory: Path, key: str) -> None:
    """Make a directory and write to it once: better refused now than after the training."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"{key}: {directory} cannot be written ({error.strerror}); give a directory that can"
        ) from None


def run_locked(config: RunConfig, display: Display, ranks: Ranks, directory: Path, fresh: bool) -> Outcome:
    """Run with the run directory to ourselves; whatever happens is recorded."""
    device = choose_device(config.loop, ranks.local_rank, ranks.local_world_size)
    rng.seed_all(config.seed, ranks.rank)
    memory.reset_peak(device.device)
    record = recording.new_record(
        config, recording.environment(device, None, config.loop.compile, ranks.world_size)
    )
    trace, task = Trace(), None
    try:
        kernels = KernelBuild(device.device)
        task = open_task(config, display)
        kernels.wait(display)
        trainer, record = prepare(config, task, device, ranks, directory, fresh, display, record)
        trace = trainer.trace
        metrics_found, sample = work(config, trainer, directory, display)
        done = {"status": "completed", "metrics": metrics_found, "sample": sample}
        done["primary_metric"] = load_task(config.task).metric
        status = 0
    except Interrupted as stop:
        done, status = {"status": "interrupted", "reason": str(stop)}, 128 + stop.number
    except KeyboardInterrupt:
        done, status = {"status": "interrupted", "reason": AT_ONCE}, 128 + signal.SIGINT
    except NonFiniteError as error:
        done, status = {"status": "failed", "reason": str(error)}, 1
    except Exception as error:
        failure = told(error, ranks)
        if isinstance(failure, UserError | LostContact) and not trace.samples:
            raise failure from error  # nothing was trained: a mistake in the command is not a run
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
        finish(
            recording.filled(record, trace, task, status="failed", reason=reason), directory, config, ranks
        )
        if failure is error:
            raise
        raise failure from error
    record = recording.filled(record, trace, task, **done)
    return Outcome(record, finish(record, directory, config, ranks), directory, status)


def told(error: Exception, ranks: Ranks) -> Exception:
    """Return what a user should read: one line where memory, disk or a process failed, else the error."""
    if ranks.world_size > 1 and distributed.is_lost_contact(error):
        return LostContact()
    memory_words = ("DefaultCPUAllocator", "out of memory")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(w in str(error) for w in memory_words):
        return UserError(
            "out of memory; take a smaller loop.micro_batch (the result stays the same) or model"
        )
    if isinstance(error, OSError) and (error.filename or error.errno == errno.ENOSPC):
        place = f"{error.filename}: " if error.filename else ""
        return UserError(f"{place}{error.strerror}; free the disk or the path, then run the same command")
    return error


def finish(record: RunRecord, directory: Path, config: RunConfig, ranks: Ranks) -> Path:
    """Keep the record, on the first rank only; return where it lies."""
    records = under_root(config.output.records)
    if not ranks.is_first:
        return records / record.file_name
    try:
        path = recording.keep(record, directory, records)
    except OSError as error:
        raise UserError(
            f"{error.filename or records}: the record cannot be written ({error.strerror}); make room, then "
            "run the same command: it goes on from the last checkpoint"
        ) from error
    if record.status == "completed":
        (directory / BEGUN_ANEW).unlink(missing_ok=True)
    return path


def open_task(config: RunConfig, display: Display) -> Task:
    """Open the task's data; a ValueError of its validation becomes the user's line."""
    try:
        return load_task(config.task).open(config, display)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error


def prepare(
    config: RunConfig,
    task: Task,
    device: Device,
    ranks: Ranks,
    directory: Path,
    fresh: bool,
    display: Display,
    record: RunRecord,
) -> tuple[Trainer, RunRecord]:
    """Build model, optimizer and trainer, and go back to the last checkpoint where there is one."""
    found = None
    if not fresh:
        found = checkpoint.load_latest(directory / "checkpoints", config.config_hash(), display.note, ranks)
    elif ranks.is_first:
        (directory / BEGUN_ANEW).touch()
        for path in checkpoint.steps(directory / "checkpoints"):
            checkpoint.drop(path)
    if found is not None:
        device = as_before(device, found.content, display, ranks)
    try:
        model = task.build_model()
        record = record.updated(model=recording.model_facts(model))
        model = model.to(device.device, device.master)
        wrapped = distributed.parallel(model, ranks, device.device, config.loop.strategy, device.precision)
        if config.loop.compile:
            wrapped = torch.compile(wrapped)
        optimizer = build_optimizer(model, config.optimizer)
        split = split_batch(config.loop, task.tokens_per_sample, ranks.world_size, ranks.rank)
        trainer = Trainer(config.loop, task, wrapped, model, optimizer, split, device, ranks)
        backend = recording.attention_backend(model, device, task.tokens_per_sample)
        if found is not None:
            found = checkpoint.with_shards(found, sharding.places(model, optimizer))
            trainer.load_state_dict(found.content)
            display.note(f"resuming from {found.path.name}, step {trainer.step} of {config.loop.max_steps}")
    except UserError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
    machine = recording.environment(device, backend, config.loop.compile, ranks.world_size)
    return trainer, record.updated(environment=machine)


def as_before(device: Device, state: dict[str, Any], display: Display, ranks: Ranks) -> Device:
    """Return the device with a checkpoint's precision and threads: sums depend on how they are split."""
    precision, threads, processes = state["precision"], state["threads"], state["world_size"]
    if processes != ranks.world_size:
        display.note(
            f"the checkpoint is of {processes} processes, this run has {ranks.world_size}: "
            "the same training, sums in another order"
        )
    elif threads != device.threads:
        display.note(f"using {threads} threads, as the checkpoint did (here it would be {device.threads})")
        torch.set_num_threads(threads)
        device = replace(device, threads=threads)
    if precision != device.precision:
        display.note(f"computing in {precision}, as the checkpoint did (here it would be {device.precision})")
        device = replace(device, precision=precision, precision_reason="that of the checkpoint")
    return device


def work(config: RunConfig, trainer: Trainer, directory: Path, display: Display) -> tuple[dict, str | None]:
    """Train, evaluate, save; return the final metrics and a sample of what the model makes."""
    first, device = trainer.ranks.is_first, trainer.device.device
    begun_at = trainer.step
    earlier_peak = trainer.trace.peak_memory
    sinks = metrics.open_sinks(config, directory, trainer.step) if first else []

    def save(step: int) -> None:
        trainer.trace.peak_memory = max(earlier_peak, memory.peak_bytes(device))
        state = {**trainer.state_dict(), "config": config.resolved(), "config_hash": config.config_hash()}
        checkpoint.save(directory / "checkpoints", step, state, config.loop.keep_checkpoints, trainer.ranks)

    def on_metrics(step: int, kind: str, values: dict[str, float]) -> None:
        for sink in sinks:
            sink.write(step, kind, values)

    trainer.callbacks = Callbacks(display.advance, on_metrics, save)
    display.begin(
        f"{config.experiment} {config.attention.variant}", config.loop.max_steps, trainer.step, "tokens"
    )

    def ask(number: int) -> None:
        trainer.stop_signal = number
        display.note(f"{signal.Signals(number).name}: finishing the step and writing a checkpoint")

    try:
        with stop_on_signal(ask):
            trainer.run()
            found = trainer.evaluate()
            if trainer.step > begun_at:  # else it is there, and writing it anew could only lose it
                save(trainer.step)
        # On every rank: of a sharded model none can compute alone, nor in another type than it gathers in.
        with trainer.device.autocast() if sharding.is_sharded(trainer.plain_model) else nullcontext():
            sample = trainer.task.sample(trainer.trained_model, config.output.sample_bytes)
        return {f"validation_{name}": value for name, value in found.items()}, sample
    finally:
        display.end()
        for sink in sinks:
            sink.close()
        sys.stdout.flush()
