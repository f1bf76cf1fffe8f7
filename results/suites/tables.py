"""The tables of suites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from results.eval_record import EvalRecord
from results.evaluations import ASSUMED
from results.pairing import BASELINE
from results.record import BenchRecord
from results.suites.view import Point, SuiteView, Values
from results.tables import NOT_APPLICABLE, Column, Table, show

STATISTICS = {
    "cosine_output_value": "cosine of output and own value",
    "diagonal_weight": "attention weight on itself",
    "cosine_values": "cosine of two tokens' values",
}
DIGITS = 4


def suite_table(view: SuiteView, found: Sequence[Point], values: Values | None) -> Table:
    """Return the grid: a row per place and arm, baseline included, with what is missing and why."""
    rows = [_row(view, point) for point in found]
    title = values.facts.title if values is not None else "no completed run"
    digits = values.facts.digits if values is not None else DIGITS
    columns = [
        *(Column(axis, axis, None) for axis in view.axes),
        Column("arm", "attention"),
        Column("mean", "mean", digits),
        Column("seeds", "seeds"),
        Column("difference", f"minus {BASELINE}", digits, signed=True),
        Column("low", "95% from", digits, signed=True),
        Column("high", "to", digits, signed=True),
        Column("pairs", "pairs"),
        Column("absent", "not here"),
    ]
    return Table(
        view.stem, f"{view.title}, scale {view.scale}: {title}", tuple(columns), tuple(rows), notes(view)
    )


def notes(view: SuiteView) -> tuple[str, ...]:
    """Return what stands below every table of a suite."""
    rate = (view.rate,) if view.rate else ()
    assumed = (ASSUMED,) if view.view == "evaluation" else ()
    return (f"after {view.source}", f"scale {view.scale}: {view.note}", *rate, *assumed)


def _row(view: SuiteView, point: Point) -> dict[str, Any]:
    summary = point.summary
    reasons: dict[str, list[int]] = {}
    for seed, reason in point.absent.items():
        reasons.setdefault(reason, []).append(seed)
    absent = "; ".join(
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))} {reason}"
        for reason, seeds in reasons.items()
    )
    return {
        **{axis: _coordinate(point.place.get(axis)) for axis in view.axes},
        "arm": point.arm,
        "mean": point.mean,
        "seeds": f"{len(point.values)} of {point.wanted}",
        "difference": NOT_APPLICABLE if point.arm == BASELINE else (summary.mean if summary else None),
        "low": _bound(point, summary.low if summary else None),
        "high": _bound(point, summary.high if summary else None),
        "pairs": NOT_APPLICABLE if point.arm == BASELINE else len(point.differences),
        "absent": absent or "none",
    }


def _bound(point: Point, value: float | None) -> Any:
    """Return an end of an interval; the baseline has none, and a single seed cannot have one."""
    return NOT_APPLICABLE if point.arm == BASELINE or len(point.differences) == 1 else value


def _coordinate(value: Any) -> str:
    # As text: 512 is a length here and 0.004 a rate, neither to be grouped nor rounded.
    return f"{value:g}" if isinstance(value, float) and value < 1e5 else show(value, None)


def task_table(view: SuiteView, evaluated: Mapping[str, EvalRecord]) -> Table:
    """Return the score of every task: a row per place and arm, means over seeds, their average last.

    Args:
        evaluated: by config hash, all on the same documents.
    """
    tasks = dict.fromkeys(name for record in evaluated.values() for name in record.tasks)
    metrics = {n: r.tasks[n].primary_metric for r in evaluated.values() for n in r.tasks}
    rows: list[dict[str, Any]] = []
    for place in view.places:
        for arm in view.arms:
            cells = [cell for cell in view.cells if dict(cell.place) == place and cell.arm == arm]
            own = [evaluated[cell.config_hash] for cell in cells if cell.config_hash in evaluated]
            row = {axis: _coordinate(place.get(axis)) for axis in view.axes} | {"arm": arm}
            row["seeds"] = f"{len(own)} of {len(cells)}"
            if own:
                row |= {n: _mean([record.tasks[n].metrics[metrics[n]] for record in own]) for n in tasks}
                row["average"] = _mean([record.mean for record in own if record.mean is not None])
            rows.append(row)
    columns = [*(Column(axis, axis, None) for axis in view.axes), Column("arm", "attention")]
    columns += [Column("seeds", "seeds")]
    columns += [Column(name, f"{name} ({metrics[name]})", DIGITS) for name in tasks]
    limits = {record.limit for record in evaluated.values()}
    documents = "all documents" if limits == {None} else f"the first {max(filter(None, limits))} documents"
    return Table(
        f"{view.stem}-tasks",
        f"{view.title}, task by task",
        (*columns, Column("average", "average", DIGITS)),
        tuple(rows),
        (f"means over seeds, {documents} of each task, zero-shot", ASSUMED),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def probe_table(view: SuiteView, probes: Sequence[BenchRecord]) -> Table:
    """Return the statistics of Figure 1: a row per layer, the mean over probed models and their range."""
    rows = []
    layers = sorted({row["layer"] for record in probes for row in record.rows})
    for layer in layers:
        own = [row for record in probes for row in record.rows if row["layer"] == layer]
        cells: dict[str, Any] = {"layer": str(layer), "models": len(own)}
        for name in STATISTICS:
            values = [row[name] for row in own]
            cells[name] = sum(values) / len(values)
            cells[f"{name}_range"] = f"{min(values):.3f} to {max(values):.3f}"
        rows.append(cells)
    columns = [Column("layer", "layer"), Column("models", "models")]
    for name, title in STATISTICS.items():
        columns += [Column(name, title, DIGITS), Column(f"{name}_range", "range")]
    wanted = len(view.cells)
    missing = (f"{len(probes)} of {wanted} models are probed",)
    return Table(
        view.stem, f"{view.title}, scale {view.scale}", tuple(columns), tuple(rows), (*notes(view), *missing)
    )
