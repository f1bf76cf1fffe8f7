"""Names, units, digits and direction of the metrics that tables and figures show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from results.record import RunRecord

PREFIX = "validation_"


@dataclass(frozen=True)
class Metric:
    """How one metric is shown. ``better`` is ``"lower"``, ``"higher"`` or ``None`` where neither is known."""

    title: str
    digits: int = 4
    better: str | None = None


METRICS: dict[str, Metric] = {
    "validation_loss": Metric("validation loss (nats per target)", better="lower"),
    "validation_bits_per_byte": Metric("validation bits per byte", better="lower"),
    "validation_perplexity": Metric("validation perplexity", 3, "lower"),
    "validation_accuracy": Metric("validation accuracy", better="higher"),
    "validation_top5": Metric("validation top-5 accuracy", better="higher"),
    "validation_character_error_rate": Metric("validation character error rate", better="lower"),
    "validation_word_error_rate": Metric("validation word error rate", better="lower"),
    "validation_exact_match": Metric("validation exact match", better="higher"),
    "validation_answers": Metric("validation answers right", better="higher"),
    "validation_recall_at_1": Metric("validation recall at 1", better="higher"),
    "validation_recall_at_5": Metric("validation recall at 5", better="higher"),
    "validation_zero_shot": Metric("validation zero-shot accuracy", better="higher"),
}
# Where a record does not say which metric it is about: the first of these that it has.
FALLBACK = ("validation_bits_per_byte", "validation_loss")


def metric(name: str) -> Metric:
    """Return how to show a metric; an unknown one is shown under its own name, without a direction."""
    return METRICS.get(name) or Metric(name.replace("_", " "))


def primary_metric(records: Iterable[RunRecord]) -> str | None:
    """Return the metric that most of these records are about, ``None`` when they have none."""
    votes: dict[str, int] = {}
    for record in records:
        name = record.primary_metric or next((name for name in FALLBACK if name in record.metrics), None)
        if name is not None:
            votes[name] = votes.get(name, 0) + 1
    return min(votes, key=lambda name: (-votes[name], name)) if votes else None
