"""The record of a run: what it says about machine, model, data and itself."""

import contextlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

from torch import nn

from results.record import DataFacts, Environment, ModelFacts, RunRecord, Throughput, utc_now
from results.store import read_record, write_record
from tasks.base import Task
from tasks.runner.config.schema import RunConfig
from tasks.runner.device import Device, cpu_name
from tasks.runner.paths import ROOT
from tasks.runner.trace import Trace
from xsa_core.adapters import Exclusion
from xsa_core.attention.backends import Request, check_backend, choose_backend
from xsa_core.attention.module import SelfAttention
from xsa_core.initialization import variant_parameter_names, weights_sha256
from xsa_core.roles import Role, parameter_roles

# What a result may depend on; each is recorded with its version where it is installed.
PACKAGES = (
    "torch", "torchvision", "torchaudio", "xformers", "triton", "timm", "webdataset", "muon-optimizer",
    "lm-eval", "einops", "numpy", "hydra-core", "pydantic",
)  # fmt: skip


def environment(device: Device, backend: str | None, compiled: bool | str, processes: int = 1) -> Environment:
    """Return what is known of the machine and its software."""
    commit, dirty = git_state()
    unit = "x" if device.device.type == "cuda" else "processes on"
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()}-{platform.machine()}",
        cpu=cpu_name(),
        threads=device.threads,
        versions=versions(),
        git_commit=commit,
        git_dirty=dirty,
        device=str(device.device),
        device_name=device.name if processes == 1 else f"{processes} {unit} {device.name}",
        precision=device.precision,
        precision_reason=device.precision_reason,
        attention_backend=backend,
        compile=compiled,
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages a result may depend on."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def git_state() -> tuple[str | None, bool | None]:
    """Return the commit the code is at and whether tracked files differ from it; None outside git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # Records and what is generated from them change with every run; they are not the code.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results/runs")
        return git("rev-parse", "HEAD"), bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None, None


def model_facts(model: nn.Module) -> ModelFacts:
    """Count and hash a freshly initialised model."""
    roles = parameter_roles(model)
    named = list(model.named_parameters())
    embedding = sum(tensor.numel() for name, tensor in named if roles[name].role is Role.EMBEDDING)
    count = sum(tensor.numel() for _, tensor in named)
    return ModelFacts(
        parameters=count,
        parameters_non_embedding=count - embedding,
        initial_weights_sha256=weights_sha256(model),
        variant_weights_sha256=weights_sha256(model, variant=True)
        if variant_parameter_names(model)
        else None,
    )


def attention_backend(model: nn.Module, device: Device, tokens: int) -> str | None:
    """Return the backend that the model's self attention uses on whole samples; None without one."""
    layer = next((m for m in model.modules() if isinstance(m, SelfAttention | Exclusion)), None)
    if layer is None:
        return None
    where = {"device": device.device.type, "dtype": device.precision, "T": tokens, "S": tokens}
    heads = {"heads": layer.n_heads, "key_size": layer.head_dim, "value_size": layer.head_dim}
    if isinstance(layer, Exclusion):  # a converted encoder: every token sees every other
        request = Request(**where, **heads, kv_heads=layer.n_heads, masks=frozenset())
    else:
        request = Request(
            **where,
            **heads,
            kv_heads=layer.n_kv_heads,
            masks=frozenset({"causal"} if layer.causal else ()),
            dropout=layer.dropout > 0,
            lse=layer.sink_k is not None,
        )
    return choose_backend(request) if layer.backend == "auto" else check_backend(layer.backend, request)


def new_record(config: RunConfig, environment: Environment) -> RunRecord:
    """Return the record of a run that has just begun."""
    return RunRecord(
        run_id=config.run_id(),
        experiment=config.experiment,
        task=config.task,
        # Where a run writes is not what it is, and a path of one machine tells another nothing.
        config=portable({name: part for name, part in config.resolved().items() if name != "output"}),
        config_hash=config.config_hash(),
        pair_hash=config.pair_hash(),
        cell_hash=config.cell_hash(),
        variant=config.attention.variant,
        optimizer=config.optimizer.name,
        seed=config.seed,
        status="running",
        environment=environment,
        started_at=utc_now(),
    )


def filled(record: RunRecord, trace: Trace, task: Task | None, **changes: Any) -> RunRecord:
    """Return the record with what the run has done so far, and `changes`."""
    if task is not None:
        changes["data"] = DataFacts(
            name=task.data_name,
            fingerprint=task.fingerprint,
            batches_sha256=trace.batches_sha256 or None,
            tokens_seen=trace.tokens,
            samples_seen=trace.samples,
            extra={"note": task.data_note} if task.data_note else {},
        )
    if changes.get("reason"):
        changes["reason"] = without_paths(changes["reason"])
    throughput = Throughput(
        tokens_per_second=trace.rate(),
        seconds_training=trace.training_seconds,
        seconds_evaluation=trace.evaluation_seconds,
    )
    # A clock that was set back must not make a record that cannot be written.
    finished = max(utc_now(), record.started_at)
    return record.updated(
        curves=trace.curves,
        throughput=throughput,
        peak_memory_bytes=trace.peak_memory or None,
        finished_at=finished,
        **changes,
    )


def without_paths(text: str) -> str:
    """Return a text with this machine's directories named as everywhere: records are read elsewhere."""
    for place, name in ((ROOT, "."), (Path.home(), "~")):
        text = text.replace(str(place), name)
    return text


def portable(value: Any) -> Any:
    """Return plain values with the machine's directories taken out of every text."""
    if isinstance(value, dict):
        return {name: portable(part) for name, part in value.items()}
    return without_paths(value) if isinstance(value, str) else value


def keep(record: RunRecord, run_directory: Path, records: Path) -> Path:
    """Write the record into the run's directory and among the records; return the latter's path.

    A run that failed never replaces the record of one that completed.
    """
    own = write_record(record, run_directory)
    own.replace(run_directory / "record.json")
    target = records / record.file_name
    if record.status != "completed" and target.exists():
        with contextlib.suppress(ValueError):
            if read_record(target).status == "completed":
                return run_directory / "record.json"
    return write_record(record, records)
