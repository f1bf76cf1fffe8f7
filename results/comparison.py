"""The end of a first run: one plain and one exclusive model side by side."""

from __future__ import annotations

import math

from results.figures import loss_curves
from results.metrics import metric as metric_facts
from results.metrics import primary_metric
from results.pairing import cautions, why_not
from results.record import RunRecord
from results.tables import MISSING, Column, Table, show

__all__ = ["loss_curves", "quick_comparison"]

CLOCK_NOTE = (
    "speeds are each run's own clock, for orientation only: two trainings disturb each other by more than "
    "any effect, so overhead is what the interleaved benchmark measures"
)


def _metric_row(name: str, first: RunRecord, second: RunRecord, comparable: bool) -> dict[str, str]:
    facts = metric_facts(name)
    values = [record.metrics.get(name) for record in (first, second)]
    known = [value for value in values if value is not None and math.isfinite(value)]
    difference = MISSING
    if not comparable:
        difference = "not comparable"
    elif len(known) == 2:
        difference = show(known[1] - known[0], facts.digits, signed=True)
    shown = [show(value, facts.digits) for value in values]
    return {"what": facts.title, "first": shown[0], "second": shown[1], "difference": difference}


def _parameter_row(first: RunRecord, second: RunRecord) -> dict[str, str]:
    counts = [record.model.parameters if record.model else None for record in (first, second)]
    known = [count for count in counts if count is not None]
    return {
        "what": "parameters",
        "first": show(counts[0]),
        "second": show(counts[1]),
        "difference": show(known[1] - known[0], signed=True) if len(known) == 2 else MISSING,
    }


def _speed_row(first: RunRecord, second: RunRecord) -> dict[str, str]:
    name, unit = "tokens_per_second", "tokens/s"
    if first.throughput.tokens_per_second is None and second.throughput.tokens_per_second is None:
        name, unit = "samples_per_second", "samples/s"
    speeds = [getattr(record.throughput, name) for record in (first, second)]
    return {
        "what": f"training {unit} (own clock)",
        "first": show(speeds[0], 0),
        "second": show(speeds[1], 0),
        "difference": "see note",
    }


def quick_comparison(record_sa: RunRecord, record_xsa: RunRecord) -> Table:
    """Return the closing table of a quick comparison: rows of text under both variants and their difference.

    The differences are those of :mod:`results.pairing`: where the two records are not a pair, the cells say
    so and a note gives the reason. Print ``table.columns``, ``table.text_rows()`` and ``table.notes``.
    """
    refusal = why_not(record_sa, record_xsa)
    names = [primary_metric([record_sa, record_xsa]) or "validation_loss"]
    shared = record_sa.metrics.keys() | record_xsa.metrics.keys()
    if names[0] != "validation_loss" and "validation_loss" in shared:
        names.append("validation_loss")
    rows = [_metric_row(name, record_sa, record_xsa, refusal is None) for name in names]
    rows += [_speed_row(record_sa, record_xsa), _parameter_row(record_sa, record_xsa)]
    notes: list[str] = []
    if refusal is not None:
        notes.append(f"these two runs are not a pair: {refusal}")
    else:
        notes.append(f"one pair, seed {record_sa.seed}: a single seed has no interval and proves nothing")
        notes += cautions(record_sa, record_xsa)
    notes.append(CLOCK_NOTE)
    difference = f"{record_xsa.variant} - {record_sa.variant}"
    return Table(
        name="comparison",
        title=f"{record_sa.experiment}: {record_sa.variant} and {record_xsa.variant}",
        columns=(
            Column("what", ""),
            Column("first", record_sa.variant),
            Column("second", record_xsa.variant),
            Column("difference", difference),
        ),
        rows=tuple(rows),
        notes=tuple(notes),
    )
