"""The one training loop, for every task and optimizer.

Axis legend: B samples of a micro-batch. A step is one update: `micro_batches` forward and backward
passes over this rank's share of the global batch, weighted by their number of targets, so that the
gradient is that of the mean over the whole global batch however it is cut, over passes and over ranks.
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
from tasks.runner import rng, sharding
from tasks.runner.averaging import AVERAGE, averaged
from tasks.runner.config.schema import LoopConfig
from tasks.runner.device import Device
from tasks.runner.distributed import Ranks, gather, largest, total
from tasks.runner.sharing import Split, open_stream, whole_batch
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


@dataclass
class Callbacks:
    """What the loop reports to. Each is called on every rank; whoever sets them minds the rank."""

    on_step: Callable[[int, float, float], None] = lambda step, loss, rate: None
    on_metrics: Callable[[int, str, dict[str, float]], None] = lambda step, kind, values: None
    on_checkpoint: Callable[[int], None] = lambda step: None


@dataclass
class Trainer:
    """Everything one run needs, and its position. `trace` is what the record will say.

    A signal that one rank got (`stop_signal`) stops all of them after the same step.
    """

    loop: LoopConfig
    task: Task
    model: nn.Module  # maybe wrapped for data parallelism or compiled
    plain_model: nn.Module  # the module itself, for evaluation and checkpoints
    optimizer: torch.optim.Optimizer
    split: Split
    device: Device
    ranks: Ranks
    callbacks: Callbacks = field(default_factory=Callbacks)
    trace: Trace = field(default_factory=Trace)
    step: int = 0
    stop_signal: int | None = None

    def __post_init__(self) -> None:
        """Open the training data and fix the validation batches, which every rank goes through."""
        self.stream: Stream = open_stream(self.task, self.split)
        self.average = averaged(self.plain_model, self.loop.ema)
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
            samples = self.split.total
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
            stop = largest(self.stop_signal or 0, self.ranks)
            if stop and self.step < self.loop.max_steps:
                self.callbacks.on_checkpoint(self.step)
                raise Interrupted(stop, self.step)
            if self._due(self.loop.checkpoint_every):
                self.callbacks.on_checkpoint(self.step)

    def update(self) -> tuple[float, float, float]:
        """Make one update; return the mean loss, the gradient norm and the schedule's factor."""
        batches = [self.stream.next_batch(size) for size in self.split.pieces]
        weights = [self.task.weight(batch) for batch in batches]
        whole = total(sum(weights), self.ranks, self.device.device)
        self.optimizer.zero_grad(set_to_none=True)
        own_loss = self._passes(batches, [weight / whole for weight in weights])
        self._hash(batches)  # while a GPU is still computing
        loss_value = total(float(own_loss), self.ranks, self.device.device)
        limit = self.loop.clip_norm or math.inf
        norm = sharding.clip_gradients(list(self.plain_model.parameters()), limit)
        if not (math.isfinite(loss_value) and math.isfinite(norm)):
            raise NonFiniteError(self.step + 1, loss_value, norm)
        factor = lr_factor(
            self.step, self.loop.max_steps, self.loop.warmup_steps, self.loop.final_lr_fraction
        )
        set_learning_rate(self.optimizer, factor)
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.plain_model)
        return loss_value, norm, factor

    def _passes(self, batches: list[Batch], shares: list[float]) -> torch.Tensor | float:
        """Add up the gradients of this rank's micro-batches, whose shares are of the whole global batch.

        Returns:
            This rank's part of the mean loss: a tensor, so that the device is asked for it once per update.
        """
        # A rank with fewer passes than others repeats its last one without weight: sharded ones go in step.
        spare = self.split.passes - len(batches)
        passes = [*zip(batches, shares, strict=True), *[(batches[-1], 0.0)] * spare]
        own_loss: torch.Tensor | float = 0.0
        for index, (batch, share) in enumerate(passes):
            # Copies average their gradients over the ranks once, with the last micro-batch. Shards do so
            # with every one: to hold whole gradients in between is what they are there to avoid.
            copies = getattr(self.model, "_orig_mod", self.model)  # behind torch.compile, maybe
            if isinstance(copies, nn.parallel.DistributedDataParallel):
                copies.require_backward_grad_sync = index == len(passes) - 1
            with self.device.autocast():
                loss = self.task.loss(self.model, self._to_device(batch))
            (loss * (share * self.ranks.world_size)).backward()
            own_loss = own_loss + loss.detach() * share
        return own_loss

    def _hash(self, batches: list[Batch]) -> None:
        """Extend the hash of the data by this step's batches of all ranks, as one process cuts them."""
        shares = gather(batches, self.ranks)
        if shares is None:
            return
        if self.ranks.world_size > 1:
            batches = whole_batch(shares, self.split, self.loop.micro_batch or self.split.total)
        for batch in batches:
            self.trace.hash_batch(batch)

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the fixed validation batches, note the result and return it."""
        start = time.perf_counter()
        model = self.trained_model.eval()
        with torch.no_grad(), self.device.autocast():
            metrics = self.task.evaluate(model, self.validation)
        self.plain_model.train()
        self.trace.evaluation_seconds += time.perf_counter() - start
        self._log("validation", metrics)
        return metrics

    @property
    def trained_model(self) -> nn.Module:
        """The model that is evaluated: with averaged weights where they are kept."""
        return self.plain_model if self.average is None else self.average.module

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a bit-identical continuation needs; on all ranks at once."""
        states = gather(rng.capture(), self.ranks) or [None]  # the first rank has them all, and writes
        return {
            "model": self.plain_model.state_dict(),
            **({AVERAGE: self.average.state_dict()} if self.average is not None else {}),
            "optimizer": self.optimizer.state_dict(),
            "stream": self.stream.state_dict(),
            "data_fingerprint": self.task.fingerprint,
            "rng": states[0],
            "rng_of_others": states[1:],
            "trace": self.trace.state_dict(),
            "threads": self.device.threads,
            "precision": self.device.precision,
            "world_size": self.ranks.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's content, also one of another number of processes.

        Raises:
            ValueError: it was written over other data.
        """
        if state["data_fingerprint"] != self.task.fingerprint:
            raise ValueError(
                "the data have changed since the checkpoint was written; restore them, or add --fresh"
            )
        shapes = self.plain_model.state_dict()
        self.plain_model.load_state_dict(
            {name: sharding.placed_like(value, shapes[name]) for name, value in state["model"].items()}
        )
        if self.average is not None:
            self.average.load_state_dict(state[AVERAGE])
        self.optimizer.load_state_dict(sharding.optimizer_state_placed(state["optimizer"], self.optimizer))
        self.stream.load_state_dict(state["stream"])
        self.trace.load_state_dict(state["trace"])
        self.step = state["step"]
        states = [state["rng"], *state.get("rng_of_others", [])]
        if len(states) == self.ranks.world_size:
            rng.restore(states[self.ranks.rank])

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0 and self.step < self.loop.max_steps

    def _log(self, kind: str, values: dict[str, float]) -> None:
        if self.trace.add(kind, self.step, values):
            self.callbacks.on_metrics(self.step, kind, values)

    def _to_device(self, batch: Batch) -> Batch:
        """Return the batch on the device; features in the type of the weights."""
        place, master = self.device.device, self.device.master
        return tuple(
            part.to(place, master if part.is_floating_point() else part.dtype, non_blocking=True)
            for part in batch
        )
