"""The one training loop, for every task and optimizer.

Axis legend: B samples of a micro-batch. A step is one update: `micro_batches` forward and backward
passes over this rank's share of the global batch, weighted by their number of targets, so that the
gradient is that of the mean over the whole global batch however it is cut.
"""

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from optimizers.schedule import lr_factor, set_learning_rate
from tasks.base import Batch, Stream, Task
from tasks.runner import rng
from tasks.runner.config.schema import LoopConfig
from tasks.runner.device import Device
from tasks.runner.distributed import Ranks, total
from tasks.runner.trace import Trace

SETTLING_STEPS = 5  # first steps of a process: allocations and caches make their clock worthless


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not finite. The update was not made."""

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        super().__init__(f"step {step}: loss {loss}, gradient norm {grad_norm}; stopped before the update")


class Interrupted(RuntimeError):  # noqa: N818  (an interruption is not an error)
    """A signal asked the run to stop; its checkpoint is written."""

    def __init__(self, number: int, step: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")


@dataclass(frozen=True)
class Split:
    """How the global batch is cut: samples per update on this rank, and per forward pass."""

    samples: int
    micro: int

    @property
    def pieces(self) -> list[int]:
        """Return the sizes of the micro-batches of one update."""
        full, rest = divmod(self.samples, self.micro)
        return [self.micro] * full + ([rest] if rest else [])


def split_batch(loop: LoopConfig, tokens_per_sample: int, world_size: int) -> Split:
    """Return how the global batch of `loop` is cut for `world_size` ranks.

    Raises:
        ValueError: tokens that are not whole samples, or samples that do not divide over the ranks.
    """
    samples = loop.global_batch
    if loop.batch_unit == "tokens":
        samples, rest = divmod(loop.global_batch, tokens_per_sample)
        if rest or not samples:
            raise ValueError(
                f"loop.global_batch: {loop.global_batch} tokens are not a multiple of the "
                f"{tokens_per_sample} tokens of a sample; choose one that is"
            )
    if samples % world_size:
        raise ValueError(
            f"loop.global_batch: {samples} samples do not divide over {world_size} processes; "
            "choose a multiple"
        )
    own = samples // world_size
    return Split(own, min(loop.micro_batch or own, own))


@dataclass
class Callbacks:
    """What the loop reports to. Each is called on every rank; whoever sets them minds the rank."""

    on_step: Callable[[int, float, float], None] = lambda step, loss, rate: None
    on_metrics: Callable[[int, str, dict[str, float]], None] = lambda step, kind, values: None
    on_checkpoint: Callable[[int], None] = lambda step: None


@dataclass
class Trainer:
    """Everything one run needs, and its position. `trace` is what the record will say."""

    loop: LoopConfig
    task: Task
    model: nn.Module  # maybe wrapped for data parallelism or compiled
    plain_model: nn.Module  # the module itself, for evaluation and checkpoints
    optimizer: torch.optim.Optimizer
    stream: Stream
    device: Device
    ranks: Ranks
    callbacks: Callbacks = field(default_factory=Callbacks)
    trace: Trace = field(default_factory=Trace)
    step: int = 0
    stop_signal: int | None = None

    def __post_init__(self) -> None:
        """Cut the batch and fix the validation batches."""
        self.split = split_batch(self.loop, self.task.tokens_per_sample, self.ranks.world_size)
        self.validation = [
            self._to_device(batch) for batch in self.task.validation(self.loop.eval_samples, self.split.micro)
        ]

    def run(self) -> None:
        """Train from the present step to the last, evaluating and saving on the way.

        Raises:
            NonFiniteError: a loss or gradient norm that is not finite.
            Interrupted: `stop_signal` was set; the checkpoint is written.
        """
        self.model.train()
        settled = self.step + SETTLING_STEPS
        while self.step < self.loop.max_steps:
            start = time.perf_counter()
            loss, norm, factor = self.update()
            seconds = time.perf_counter() - start
            self.step += 1
            samples = self.split.samples * self.ranks.world_size
            rate = samples * self.task.tokens_per_sample / seconds
            self.trace.count(samples, samples * self.task.tokens_per_sample, seconds)
            if self.step > settled or self.step >= self.loop.max_steps:
                self.trace.rates.append(rate)
            self.callbacks.on_step(self.step, loss, rate)
            if self._due(self.loop.log_every) or self.step == self.loop.max_steps:
                lr = self.optimizer.param_groups[0]["peak_lr"] * factor
                self._log("train", {"loss": loss, "grad_norm": norm, "lr": lr, "tokens_per_second": rate})
            if self._due(self.loop.eval_every):
                self.evaluate()
            if self.stop_signal is not None and self.step < self.loop.max_steps:
                self.callbacks.on_checkpoint(self.step)
                raise Interrupted(self.stop_signal, self.step)
            if self._due(self.loop.checkpoint_every):
                self.callbacks.on_checkpoint(self.step)

    def update(self) -> tuple[float, float, float]:
        """Make one update; return the mean loss, the gradient norm and the schedule's factor."""
        batches = [self.stream.next_batch(size) for size in self.split.pieces]
        for batch in batches:
            self.trace.hash_batch(batch)
        weights = [self.task.weight(batch) for batch in batches]
        whole = total(sum(weights), self.ranks, self.device.device)
        self.optimizer.zero_grad(set_to_none=True)
        own_loss: torch.Tensor | float = 0.0  # a tensor: the device is asked for it once per update
        for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            # Gradients are averaged over the ranks once, with the last micro-batch.
            if self.ranks.world_size > 1:
                self.model.require_backward_grad_sync = index == len(batches) - 1
            with self.device.autocast():
                loss = self.task.loss(self.model, self._to_device(batch))
            share = weight / whole
            (loss * (share * self.ranks.world_size)).backward()
            own_loss = own_loss + loss.detach() * share
        loss_value = total(float(own_loss), self.ranks, self.device.device)
        limit = self.loop.clip_norm or math.inf
        norm = nn.utils.clip_grad_norm_(self.plain_model.parameters(), limit).item()
        if not (math.isfinite(loss_value) and math.isfinite(norm)):
            raise NonFiniteError(self.step + 1, loss_value, norm)
        factor = lr_factor(
            self.step, self.loop.max_steps, self.loop.warmup_steps, self.loop.final_lr_fraction
        )
        set_learning_rate(self.optimizer, factor)
        self.optimizer.step()
        return loss_value, norm, factor

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the fixed validation batches, note the result and return it."""
        start = time.perf_counter()
        self.plain_model.eval()
        with torch.no_grad(), self.device.autocast():
            metrics = self.task.evaluate(self.plain_model, self.validation)
        self.plain_model.train()
        self.trace.evaluation_seconds += time.perf_counter() - start
        self._log("validation", metrics)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a bit-identical continuation needs."""
        return {
            "model": self.plain_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "stream": self.stream.state_dict(),
            "data_fingerprint": self.task.fingerprint,
            "rng": rng.capture(),
            "trace": self.trace.state_dict(),
            "threads": self.device.threads,
            "precision": self.device.precision,
            "world_size": self.ranks.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's content.

        Raises:
            ValueError: it was written by another number of processes, or over other data.
        """
        if state["world_size"] != self.ranks.world_size:
            raise ValueError(
                f"the checkpoint was written by {state['world_size']} processes, this run has "
                f"{self.ranks.world_size}; start as many"
            )
        if state["data_fingerprint"] != self.task.fingerprint:
            raise ValueError(
                "the data have changed since the checkpoint was written; restore them, or add --fresh"
            )
        self.plain_model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stream.load_state_dict(state["stream"])
        self.trace.load_state_dict(state["trace"])
        self.step = state["step"]
        rng.restore(state["rng"])

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0 and self.step < self.loop.max_steps

    def _log(self, kind: str, values: dict[str, float]) -> None:
        if self.trace.add(kind, self.step, values):
            self.callbacks.on_metrics(self.step, kind, values)

    def _to_device(self, batch: Batch) -> Batch:
        return tuple(part.to(self.device.device, non_blocking=True) for part in batch)
