"""The schema of a run: what can be set, with types, bounds and defaults.

A default never changes its meaning: the hash of a run leaves out values that equal their default, so
that a new key does not give every old run a new identity. What should change, changes in YAML.
"""

import hashlib
import json
import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from optimizers.config import OptimizerConfig
from tasks.config import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section

HASH_LENGTH = 16  # hex digits: 64 bits


# The names of xsa_core's VARIANTS and BACKENDS, which cannot be read without importing torch; a test
# holds them equal.
Variant = Literal[
    "sa", "xsa", "xsa_learned", "random_direction", "mean_direction", "head_norm", "diag_masked"
]
Backend = Literal["auto", "reference", "sdpa", "xformers", "flex"]


class AttentionConfig(Section):
    """Which attention, and what it removes from each output along the token's own value."""

    variant: Variant = Field("xsa", description="the method, plain attention, or a control")
    strength: NonNegativeFloat = Field(1.0, description="fraction removed, where the variant has a fixed one")
    layers: str | list[NonNegativeInt] = Field("all", description="all, first:k, last:k or a list of indices")
    backend: Backend = Field("auto", description="the kernel; see ./xsa info")

    @field_validator("layers")
    @classmethod
    def _layers_known(cls, value: str | list[int]) -> str | list[int]:
        if isinstance(value, str) and not re.fullmatch(r"all|(first|last):[0-9]+", value):
            raise ValueError(
                f"attention.layers: expected all, first:k, last:k or a list such as [0,1], got '{value}'"
            )
        return value


class LoopConfig(Section):
    """The training loop: lengths in steps, a step being one update of the weights."""

    max_steps: PositiveInt
    batch_unit: Literal["samples", "tokens"] = Field("samples", description="unit of global_batch")
    global_batch: PositiveInt = Field(
        le=2**31 - 1, description="samples or tokens of one update, over all devices"
    )
    micro_batch: NonNegativeInt = Field(
        0, description="samples of one forward pass; 0 takes the whole batch at once"
    )
    warmup_steps: NonNegativeInt = 0
    final_lr_fraction: Fraction = Field(0.1, description="learning rate at the end over its peak")
    clip_norm: NonNegativeFloat = Field(1.0, description="gradient norm above which it is scaled; 0: off")
    ema: float = Field(
        0.0, ge=0, lt=1, description="decay of averaged weights, which are evaluated instead; 0: off"
    )
    eval_every: NonNegativeInt = Field(0, description="steps between evaluations; 0: only at the end")
    eval_samples: PositiveInt = Field(256, description="fixed validation samples of every evaluation")
    checkpoint_every: NonNegativeInt = Field(0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: PositiveInt = 2
    log_every: PositiveInt = Field(10, description="steps between points of the training curve")
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    threads: NonNegativeInt = Field(
        0, le=1024, description="CPU threads; 0: one per core this process may use"
    )
    compile: bool = Field(False, description="torch.compile the model: tens of seconds of start-up")
    strategy: Literal["auto", "ddp", "fsdp"] = Field(
        "auto",
        description="over several processes: a copy of the model in each (ddp, auto) or its shards (fsdp)",
    )

    @model_validator(mode="after")
    def _warmup_fits(self) -> "LoopConfig":
        if self.warmup_steps > self.max_steps:
            raise ValueError(
                f"loop.warmup_steps: {self.warmup_steps} is more than loop.max_steps {self.max_steps}"
            )
        return self


class OutputConfig(Section):
    """Where a run writes and what it shows. Not part of a run's identity."""

    runs: str = Field("runs", min_length=1, description="directory of run directories (checkpoints, metrics)")
    records: str = Field("results/runs", min_length=1, description="directory of records")
    tensorboard: bool = True
    wandb: str | None = Field(None, description="W&B project; needs the package wandb")
    sample_bytes: NonNegativeInt = Field(0, description="text written by the model at the end, if it can")
    progress: Literal["auto", "rich", "plain", "none"] = "auto"


class RunConfig(Section):
    """One run. `model` and `data` are replaced by the task's own sections."""

    experiment: str
    task: str
    seed: NonNegativeInt = Field(0, le=2**63 - 1)
    attention: AttentionConfig
    optimizer: OptimizerConfig
    model: Any
    data: Any
    loop: LoopConfig
    output: OutputConfig = OutputConfig()

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value, as plain JSON types."""
        return self.model_dump(mode="json")

    def config_hash(self) -> str:
        """Return the identity of the run: the hash of what it computes, not of where it writes."""
        return self._hash({"output"})

    def pair_hash(self) -> str:
        """Return the hash of all but the attention section: runs that share it differ only there."""
        return self._hash({"output", "attention"})

    def cell_hash(self) -> str:
        """Return the hash of what stays when a run is repeated over seeds, with any attention."""
        return self._hash({"output", "attention", "seed"})

    def run_id(self) -> str:
        """Return a name for people and files: experiment, variant, optimizer, seed and hash."""
        name = self.experiment.replace("/", "-")
        parts = [name, self.attention.variant, self.optimizer.name, f"s{self.seed}", self.config_hash()[:8]]
        return "_".join(parts)

    def _hash(self, without: set[str]) -> str:
        # How a run is spread over processes is no part of what it computes: it may change on resuming.
        exclude = {**dict.fromkeys(without, True), "loop": {"strategy"}}
        content = self.model_dump(mode="json", exclude=exclude, exclude_defaults=True)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
