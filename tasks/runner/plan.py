"""What a run takes on several GPUs: memory of each, speed and days, for DDP and FSDP.

Memory is the task's model of it; speed is arithmetic at a stated utilisation (model FLOPs over peak FLOPs), a
premise and not a prediction.
"""

from dataclasses import dataclass
from typing import Any

from results.tables import Column, Table
from tasks.errors import UserError
from tasks.runner.config.schema import RunConfig
from tasks.runner.progress import duration
from tasks.text import plan as text_plan
from tasks.text.plan import Memory, Sizes

GIB = 2**30
RESERVED = 0.08  # of a GPU's memory: CUDA's context, NCCL, fragments
MODELS = {"text": text_plan}  # task -> module with its model of sizes, FLOPs and memory
PRODUCT_BYTES = {"bfloat16": 2, "auto": 2, "float32": 4}
LARGEST_MICRO_BATCH = 512


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory in bytes and dense bfloat16 peak in FLOP/s, as its vendor states them."""

    name: str
    memory: float
    peak: float

    @property
    def usable(self) -> float:
        """Return the memory a run may fill."""
        return self.memory * (1 - RESERVED)


GPUS = {
    "a100": Gpu("A100 80 GB", 80 * GIB, 312e12),
    "a100-40": Gpu("A100 40 GB", 40 * GIB, 312e12),
    "h100": Gpu("H100 SXM 80 GB", 80 * GIB, 989e12),
    "h200": Gpu("H200 SXM 141 GB", 141e9, 989e12),
    "b200": Gpu("B200 180 GB", 180e9, 2250e12),
    "l40s": Gpu("L40S 48 GB", 48 * GIB, 362e12),
    "rtx4090": Gpu("RTX 4090 24 GB", 24 * GIB, 165e12),
}


@dataclass(frozen=True)
class Layout:
    """One way to spread a run: the memory at its peak and how the batch is cut."""

    strategy: str
    micro_batch: int
    accumulation: int
    memory: Memory
    fits: bool
    largest: int  # micro-batch, a power of two, that still fits; 0: none


@dataclass(frozen=True)
class Plan:
    """Everything `./xsa plan` prints."""

    config: RunConfig
    gpu: Gpu
    gpus: int
    utilisation: float
    sizes: Sizes
    flops: tuple[float, float]  # of a token: matrices, attention
    tokens_per_step: int
    layouts: tuple[Layout, ...]

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of all GPUs together."""
        return self.gpus * self.gpu.peak * self.utilisation / sum(self.flops)

    @property
    def is_even(self) -> bool:
        """Whether every GPU has as many samples of a step as any other."""
        return self.tokens_per_step // self.sizes.length % self.gpus == 0

    @property
    def days(self) -> float:
        """Return the days of the whole run."""
        return self.config.loop.max_steps * self.tokens_per_step / self.tokens_per_second / 86400


def make_plan(
    config: RunConfig,
    gpu: str,
    gpus: int,
    utilisation: float,
    *,
    micro_batch: int = 0,
    vocabulary: int = 0,
) -> Plan:
    """Return the plan of a run.

    Args:
        config: resolved config. gpu: a key of GPUS. gpus: how many, over all hosts.
        utilisation: model FLOPs over peak FLOPs that is assumed, above 0 and at most 1.
        micro_batch: samples of a forward pass; 0 takes the config's, or else the largest that fits.
        vocabulary: size; 0 takes that of the config's data.

    Raises:
        UserError: a value out of range, a task without a model, fewer samples than GPUs.
    """
    if config.task not in MODELS:
        raise UserError(f"plan: no model of task {config.task}; there is one of {', '.join(MODELS)}")
    if gpu not in GPUS:
        raise UserError(f"--gpu: unknown GPU '{gpu}'; expected one of {', '.join(GPUS)}")
    if gpus < 1:
        raise UserError(f"--gpus: expected at least 1, got {gpus}")
    if not 0 < utilisation <= 1:
        raise UserError(f"--utilisation: expected a fraction above 0 and at most 1, got {utilisation:g}")
    if micro_batch < 0 or vocabulary < 0:
        raise UserError("--micro-batch and --vocabulary: expected at least 1")
    model: Any = MODELS[config.task]
    sizes = model.sizes_of(config, vocabulary or model.vocabulary_of(config))
    samples = samples_per_step(config, sizes.length)
    if samples < gpus:
        raise UserError(
            f"--gpus: the {samples} samples of a step leave some of {gpus} without any; "
            f"take at most {samples}, or a larger loop.global_batch"
        )
    precision = PRODUCT_BYTES.get(config.loop.precision)
    if precision is None:
        raise UserError(f"plan: no memory model of loop.precision={config.loop.precision}")
    wanted = micro_batch or config.loop.micro_batch
    muon = config.optimizer.name.startswith("muon")
    strategies = ("ddp", "fsdp") if gpus > 1 else ("single",)
    layouts = [
        make_layout(name, sizes, GPUS[gpu], gpus, -(-samples // gpus), wanted, precision, muon)
        for name in strategies
    ]
    return Plan(
        config=config,
        gpu=GPUS[gpu],
        gpus=gpus,
        utilisation=utilisation,
        sizes=sizes,
        flops=model.flops_per_token(sizes),
        tokens_per_step=samples * sizes.length,
        layouts=tuple(layouts),
    )


def samples_per_step(config: RunConfig, length: int) -> int:
    """Return the samples of one update; UserError where its tokens are not whole samples."""
    if config.loop.batch_unit == "samples":
        return config.loop.global_batch
    samples, rest = divmod(config.loop.global_batch, length)
    if rest or not samples:
        raise UserError(
            f"loop.global_batch: {config.loop.global_batch} tokens are not a multiple of the {length} "
            "of a sample; choose one that is"
        )
    return samples


def make_layout(
    strategy: str, sizes: Sizes, gpu: Gpu, gpus: int, samples: int, wanted: int, product: int, muon: bool
) -> Layout:
    """Return one strategy's layout for `samples` of a step on each GPU."""

    def memory(batch: int) -> Memory:
        return text_plan.peak_memory(
            sizes,
            batch,
            product=product,
            accumulates=batch < samples,
            shards=gpus if strategy == "fsdp" else 1,
            buckets=strategy == "ddp",
            muon=muon,
        )

    sizes_tried = [2**power for power in range(LARGEST_MICRO_BATCH.bit_length()) if 2**power <= samples]
    largest = max((batch for batch in sizes_tried if memory(batch).total <= gpu.usable), default=0)
    batch = min(wanted or largest or 1, samples)
    found = memory(batch)
    return Layout(strategy, batch, -(-samples // batch), found, found.total <= gpu.usable, largest)


def memory_table(plan: Plan) -> Table:
    """Return the memory of one GPU by part, a column for each strategy."""
    parts = [
        ("weights, float32", "weights"),
        ("weights, bfloat16", "casts"),
        ("optimizer", "optimizer"),
        ("gradients", "gradients"),
        ("activations", "activations"),
        ("logits and loss", "logits"),
        ("gradients on their way", "working"),
        ("all", "total"),
    ]
    small = max(layout.memory.total for layout in plan.layouts) < GIB
    unit, size = ("MiB", 2**20) if small else ("GiB", GIB)
    rows = [
        {
            "part": title,
            **{layout.strategy: getattr(layout.memory, name) / size for layout in plan.layouts},
        }
        for title, name in parts
    ]
    columns = [Column("part", f"{unit} on each GPU")]
    columns += [
        Column(layout.strategy, f"{layout.strategy}, micro-batch {layout.micro_batch}", 2)
        for layout in plan.layouts
    ]
    notes = [
        f"{layout.strategy}: peak at {layout.memory.moment}; {layout.micro_batch} x {layout.accumulation} x "
        f"{plan.gpus} samples a step{'' if plan.is_even else ' at most'}"
        + (f"; up to {layout.largest} fit" if layout.largest else "")
        for layout in plan.layouts
    ]
    return Table("memory", f"Memory on {plan.gpu.name}", tuple(columns), tuple(rows), tuple(notes))


def counted(count: int) -> str:
    """Return a large count for people: 1.51 B or 0.81 M."""
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"


def lasting(days: float) -> str:
    """Return a duration for people, in days where it lasts any."""
    return f"{days:.1f} days" if days >= 1 else duration(86400 * days)


def facts(plan: Plan) -> list[str]:
    """Return what stands above the table, line by line."""
    sizes, loop = plan.sizes, plan.config.loop
    matrices, attention = plan.flops
    return [
        f"{plan.config.experiment}: {counted(sizes.parameters)} parameters, {counted(sizes.non_embedding)} "
        f"outside the embedding (vocabulary {sizes.vocabulary:,})",
        f"FLOPs per token, forward and backward: {matrices + attention:.4g} "
        f"(matrices {matrices:.4g}, causal attention over {sizes.length:,} tokens {attention:.4g})",
        f"a step: {plan.tokens_per_step:,} tokens; the run: {loop.max_steps:,} steps, "
        f"{counted(loop.max_steps * plan.tokens_per_step)} tokens, "
        f"{loop.max_steps * plan.tokens_per_step * (matrices + attention):.3g} FLOPs",
        f"{plan.gpus} x {plan.gpu.name} at {plan.utilisation:.0%} of {plan.gpu.peak / 1e12:.0f} TFLOP/s: "
        f"{plan.tokens_per_second:,.0f} tokens/s, {lasting(plan.days)}",
    ]


def warnings(plan: Plan) -> list[str]:
    """Return a line for every layout that will not fit, with what to do."""
    lines = []
    for layout in plan.layouts:
        if layout.fits:
            continue
        need, have = layout.memory.total / GIB, plan.gpu.usable / GIB
        cure = f"take loop.micro_batch={layout.largest}" if layout.largest else "no micro-batch does"
        if not layout.largest:
            cure += "; take fsdp, more GPUs or larger ones"
        lines.append(
            f"warning: {layout.strategy} will not fit: {need:.1f} GiB needed, {have:.1f} of "
            f"{plan.gpu.memory / GIB:.1f} GiB usable; {cure}"
        )
    return lines
