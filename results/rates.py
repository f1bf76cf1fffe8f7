"""The choice of a learning rate: on the plain baseline alone, and only inside the range that was searched.

A variant tuned where its baseline is not wins by the tuning. And a best rate at the edge of the range says
that better ones lie beyond it, for either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from results.metrics import metric, primary_metric
from results.record import RunRecord


@dataclass(frozen=True)
class RateChoice:
    """The best of the rates that were tried; ``losses`` maps a rate to its mean, inf where it diverged."""

    losses: Mapping[float, float]
    seeds: int
    best: float

    @property
    def inside(self) -> bool:
        """Whether a worse rate was tried on either side."""
        return min(self.losses) < self.best < max(self.losses)


def choose_rate(runs: Mapping[float, Sequence[RunRecord | None]]) -> RateChoice | None:
    """Return the best rate by the primary metric of ``runs``, the baseline's records by rate and seed.

    A run that failed (diverged) counts as infinitely bad. ``None`` while any run has no such record yet:
    a choice among rates with different seeds would compare seeds. Raises ``ValueError`` when there are no
    rates, or the metric is one that is not known to be better when lower or higher.
    """
    if not runs:
        raise ValueError("no learning rates; give the runs of at least one")
    records = [record for row in runs.values() for record in row]
    if any(record is None or record.status not in ("completed", "failed") for record in records):
        return None
    name = primary_metric(record for record in records if record is not None and record.status == "completed")
    if name is None:
        return None
    better = metric(name).better
    if better is None:
        raise ValueError(f"{name}: not known whether lower or higher is better; add it to results.metrics")
    sign = 1.0 if better == "lower" else -1.0
    losses = {rate: _mean([_loss(record, name, sign) for record in row]) for rate, row in runs.items()}
    best = min(losses, key=lambda rate: (losses[rate], rate))
    if not math.isfinite(losses[best]):
        return None
    return RateChoice(losses, min(map(len, runs.values())), best)


def _loss(record: RunRecord | None, name: str, sign: float) -> float:
    value = record.metrics.get(name, math.nan) if record is not None else math.nan
    return sign * value if math.isfinite(value) else math.inf


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf
