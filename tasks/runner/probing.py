"""The statistics of the paper's Figure 1 for a trained run, as a record."""

from dataclasses import replace
from typing import Any

from torch import nn

from results.record import BenchRecord, utc_now
from tasks.base import Batch
from tasks.errors import UserError
from tasks.runner import checkpoint, recording
from tasks.runner.averaging import trained_weights
from tasks.runner.config.compose import schema_of, validate
from tasks.runner.config.schema import LoopConfig, RunConfig
from tasks.runner.device import choose_device
from tasks.runner.paths import trained_path
from tasks.runner.progress import Display
from tasks.runner.sweep_jobs import probe_run_id
from tasks.runner.training import open_task
from xsa_core.adapters import converted_layers
from xsa_core.adapters.probing import probe_converted
from xsa_core.attention.module import SelfAttention
from xsa_core.attention.probe import LayerStatistics, probe_batches

NAME = "probe"


def probe_checkpoint(
    where: str, display: Display, *, samples: int, batch: int, device: str = "auto", threads: int = 0
) -> BenchRecord:
    """Return the record of a checkpoint's statistics over `samples` validation samples, in float32.

    Raises:
        UserError: no checkpoint there, other data than it was trained on, or a model without attention.
    """
    started = utc_now()
    loaded = checkpoint.load(checkpoint.resolve(str(trained_path(where))))
    content = loaded.content["config"]
    config = validate(schema_of(content["task"]), content)
    loop = LoopConfig(max_steps=1, global_batch=1, device=device, threads=threads, precision="float32")
    chosen = choose_device(loop)
    task = open_task(config, display)
    if task.fingerprint != loaded.content["data_fingerprint"]:
        raise UserError(f"{loaded.path}: trained on other data than those here; restore them, then probe")
    model = task.build_model()
    model.load_state_dict(trained_weights(loaded.content))
    model = model.to(chosen.device)
    # One at a time where samples have lengths of their own: padding is not to be counted.
    batches = task.validation(samples, batch if task.equal_lengths else 1)
    inputs = [tuple(part.to(chosen.device) for part in task.inputs(each)) for each in batches]
    try:
        layers = statistics(model, inputs)
    except ValueError as error:
        raise UserError(f"{loaded.path}: {error}") from error
    return BenchRecord(
        run_id=probe_run_id(config),
        name=NAME,
        config=history(config, loaded.content, samples),
        environment=recording.environment(chosen, None, False),
        rows=[row(layer) for layer in layers],
        summary=means([layer.means() for layer in layers]),
        started_at=started,
        finished_at=max(utc_now(), started),
        extra={"heads": [heads(layer) for layer in layers]},
    )


def statistics(model: nn.Module, inputs: list[Batch]) -> list[LayerStatistics]:
    """Return the statistics of all self attention of a model, our layers first, then converted ones.

    Raises:
        ValueError: a model without any.
    """
    found: list[LayerStatistics] = []
    if any(isinstance(module, SelfAttention) for module in model.modules()) or not converted_layers(model):
        found += probe_batches(model, inputs)
    if converted_layers(model):
        found += probe_converted(model, inputs)
    return [replace(layer, layer=number) for number, layer in enumerate(found)]


def history(config: RunConfig, content: dict[str, Any], samples: int) -> dict[str, Any]:
    """Return which model was probed, and on what."""
    return {
        "run_id": config.run_id(),
        "config_hash": config.config_hash(),
        "experiment": config.experiment,
        "variant": config.attention.variant,
        "optimizer": config.optimizer.name,
        "seed": config.seed,
        "step": content["step"],
        "data_fingerprint": content["data_fingerprint"],
        "samples": samples,
    }


def row(layer: LayerStatistics) -> dict[str, Any]:
    """Return a layer's means over heads."""
    return {
        "layer": layer.layer,
        "variant": layer.variant,
        **layer.means(),
        "tokens": layer.tokens,
        "pairs": layer.pairs,
    }


def heads(layer: LayerStatistics) -> dict[str, Any]:
    """Return a layer's statistics head by head."""
    return {
        "layer": layer.layer,
        **{name: list(getattr(layer, name)) for name in layer.means()},
    }


def means(layers: list[dict[str, float]]) -> dict[str, float]:
    """Return means over layers."""
    return {f"mean_{name}": sum(layer[name] for layer in layers) / len(layers) for name in layers[0]}
