"""What the missing cells of a sweep would cost, from the records there are, else from the operations.

An estimate for planning: a run's own clock, or a rate that was measured on other runs.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from results.record import RunRecord
from tasks.errors import UserError
from tasks.runner.config.schema import RunConfig
from tasks.runner.device import available_cores
from tasks.runner.plan import GPUS, MODELS, samples_per_step
from tasks.runner.progress import duration
from tasks.runner.sweep_jobs import known_records
from tasks.runner.sweep_rows import Row, State

CORE_RATE = 5e10  # FLOP/s of a CPU core in bfloat16 on a small model, where no record tells
START_SECONDS = 8.0  # a process with torch, data and kernels
GPU, UTILISATION = "h100", 0.4
DAY = 86400.0
LONGEST_CPU = 30 * DAY


@dataclass(frozen=True)
class Cost:
    """Seconds of a cell and its operations; None where neither records nor a model tell."""

    seconds: float | None
    flops: float | None
    measured: bool  # on runs of the same cell


def operations(config: RunConfig) -> float | None:
    """Return the operations of a whole run by the task's model, None for a task without one."""
    model = MODELS.get(config.task)
    if model is None:
        return None
    sizes = model.sizes_of(config, model.vocabulary_of(config))
    try:
        tokens = config.loop.max_steps * samples_per_step(config, sizes.length) * sizes.length
    except UserError:
        return None
    return tokens * sum(model.flops_per_token(sizes))


def cost_of(config: RunConfig, records: Sequence[RunRecord], rate: float | None, cores: int) -> Cost:
    """Return the cost of one run on `cores`: the time of the same cell at another seed or attention, else by
    `rate`, FLOP/s of a core. A run that had more or fewer threads is taken to scale with them.
    """
    flops = operations(config)
    known = [
        ((record.throughput.seconds_training or 0) + (record.throughput.seconds_evaluation or 0))
        * max(1, record.environment.threads)
        / cores
        for record in records
        if record.cell_hash == config.cell_hash() and record.throughput.seconds_training
    ]
    if known:
        return Cost(median(known) + START_SECONDS, flops, True)
    return Cost(flops / (rate * cores) + START_SECONDS if flops and rate else None, flops, False)


def measured_rate(records: Sequence[RunRecord], tasks: set[str]) -> float | None:
    """Return the median FLOP/s and core of the completed runs of these tasks, by their own clocks."""
    rates = []
    for record in records:
        speed = record.throughput.tokens_per_second
        if record.task in tasks and record.task in MODELS and speed:
            rates.append(speed * per_token(record) / max(1, record.environment.threads))
    rates = [rate for rate in rates if rate]
    return median(rates) if rates else None


def per_token(record: RunRecord) -> float:
    """Return the operations of a token of a recorded run, 0 where its config is of another version."""
    from tasks.runner.config.compose import schema_of, validate

    try:
        config = validate(schema_of(record.task), dict(record.config))
    except UserError:
        return 0.0
    model = MODELS[record.task]
    return sum(model.flops_per_token(model.sizes_of(config, model.vocabulary_of(config))))


def estimate(rows: Sequence[Row], jobs: int = 1) -> list[str]:
    """Return lines on what the cells that are not done would cost on this machine, and on GPUs if long.

    With several `jobs` at once each has a part of the cores, so that the sum stays what one at a time costs;
    but the end comes no sooner than the longest cell on its part.
    """
    missing = [row.work for row in rows if row.state is not State.DONE]
    configs = [work.config for work in missing if work.config is not None]
    if not missing:
        return ["nothing is missing"]
    if not configs:
        return [f"{len(missing)} commands to run; their time is not known beforehand"]
    everything = known_records(configs[0].output.records)
    records = [r for r in everything if isinstance(r, RunRecord) and r.status == "completed"]
    here = [r for r in records if r.environment.device == "cpu"]
    found = measured_rate(here, {config.task for config in configs})
    rate, cores = found or CORE_RATE, max(1, available_cores() // jobs)
    costs = [cost_of(config, here, rate, cores) for config in configs]
    known = [cost for cost in costs if cost.seconds is not None]
    origin = f"{rate:.2g} FLOP/s and core" + (" as in earlier runs" if found else ", a premise")
    measured = sum(cost.measured for cost in known)
    lines = []
    if known:
        total, longest = makespan([c.seconds for c in known], jobs), max(c.seconds for c in known)
        flops = sum(cost.flops or 0 for cost in known)
        if total <= LONGEST_CPU:
            at_once = f", {jobs} at a time on {cores} core{'s' if cores > 1 else ''} each" if jobs > 1 else ""
            lines.append(
                f"{len(known)} cells to run, {flops:.3g} FLOPs: about {spent(total)} on this CPU{at_once}, "
                f"the longest {spent(longest)} ({measured} by the time of the same cell, "
                f"{len(known) - measured} by {origin})"
            )
        else:
            lines.append(f"{len(known)} cells to run, {flops:.3g} FLOPs: too much for a CPU")
        if total > DAY:
            gpu = GPUS[GPU]
            seconds = flops / (gpu.peak * UTILISATION)
            each = f", {spent(seconds / jobs)} of {jobs}" if jobs > 1 else ""
            lines.append(
                f"on GPUs: {spent(seconds)} of one {gpu.name} at {UTILISATION:.0%} of its peak{each}"
            )
    if len(known) < len(costs):
        lines.append(f"{len(costs) - len(known)} cells of unknown cost: no record and no model of their task")
    return lines


def makespan(seconds: Sequence[float], jobs: int) -> float:
    """Return when the last of some cells ends, where each free slot takes the next one."""
    free = [0.0] * jobs
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def spent(seconds: float) -> str:
    """Return a duration for people, in days where it lasts any."""
    return f"{seconds / DAY:,.1f} days" if seconds >= DAY else duration(seconds)
