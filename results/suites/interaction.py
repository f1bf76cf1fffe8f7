"""Does the gain of a variant depend on a third thing, such as the optimizer? A difference of differences.

Seeds are the units: with the same seed, all four runs of a comparison saw the same data in the same order and
began from the same weights, so that the difference of their differences is one number a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from results.pairing import BASELINE, why_not
from results.record import RunRecord
from results.stats import PairedSummary, summarize
from results.suites.view import CellView, Coordinate, SuiteView, Values
from results.tables import Column, Table

# A run with its sign in a sum: the value of a comparison is the sum over its runs.
Term = tuple[int, CellView | None]


def interaction_table(view: SuiteView, runs: Mapping[str, RunRecord], values: Values | None) -> Table:
    """Return what the axis ``view.interaction`` does to every arm, and to its gain over the baseline.

    The axis' first value is what the others are compared with. A row is the mean over seeds of one comparison
    with its 95% t interval; a seed without it is named with its reason.

    Raises:
        ValueError: the suite has no such axis, or one with a single value.
    """
    axis = view.interaction
    if axis is None or axis not in view.axes:
        raise ValueError(f"{view.name}: no axis {axis} to compare along; it has {', '.join(view.axes)}")
    others = [name for name in view.axes if name != axis]
    rows: list[dict[str, Any]] = []
    for rest in _unique({name: cell.place.get(name) for name in others} for cell in view.cells):
        cells = {
            (cell.place[axis], cell.arm, cell.seed): cell
            for cell in view.cells
            if axis in cell.place and all(cell.place.get(name) == value for name, value in rest.items())
        }
        first, *compared = dict.fromkeys(coordinate for coordinate, _, _ in cells)
        for coordinate in compared:
            for arm in view.arms:
                rows += [
                    {**rest, **row} for row in _rows(cells, first, coordinate, arm, view.arms, runs, values)
                ]
    digits = values.facts.digits if values is not None else 4
    columns = (
        *(Column(name, name, None) for name in others),
        Column("what", "of"),
        Column("compared", f"{axis} compared"),
        Column("mean", "mean", digits, signed=True),
        Column("low", "95% from", digits, signed=True),
        Column("high", "to", digits, signed=True),
        Column("seeds", "seeds"),
        Column("signs", "below zero, above"),
        Column("p", "p", probability=True),
        Column("says", "says"),
        Column("absent", "not here"),
    )
    title = f"Along {axis}: how {values.facts.title if values else 'no completed run'} differs, seed by seed"
    note = f"the gain of an arm is its value minus that of {BASELINE}; where zero lies inside the interval,"
    return Table(
        f"{view.stem}-interaction",
        title,
        columns,
        tuple(rows),
        (f"{note} the runs do not show that the {axis} changes it",),
    )


def _unique(places: Any) -> list[dict[str, Coordinate]]:
    return [dict(key) for key in dict.fromkeys(tuple(place.items()) for place in places)]


def _rows(
    cells: Mapping[tuple[Coordinate, str, int], CellView],
    first: Coordinate,
    coordinate: Coordinate,
    arm: str,
    arms: Sequence[str],
    runs: Mapping[str, RunRecord],
    values: Values | None,
) -> list[dict[str, Any]]:
    """Return the rows of one arm: its own comparison, and that of its gain where it has one."""
    seeds = sorted({seed for place, _, seed in cells if place in (first, coordinate)})
    name = f"{_text(coordinate)} minus {_text(first)}"

    def terms(which: str, sign: int, seed: int) -> list[Term]:
        pair = ((1, coordinate), (-1, first))
        return [(sign * own, cells.get((place, which, seed))) for own, place in pair]

    found = [_row(arm, name, {seed: terms(arm, 1, seed) for seed in seeds}, runs, values)]
    if arm != BASELINE and BASELINE in arms:
        gains = {seed: [*terms(arm, 1, seed), *terms(BASELINE, -1, seed)] for seed in seeds}
        found.append(_row(f"gain of {arm}", name, gains, runs, values))
    return found


def _row(
    what: str,
    compared: str,
    sums: Mapping[int, Sequence[Term]],
    runs: Mapping[str, RunRecord],
    values: Values | None,
) -> dict[str, Any]:
    differences: dict[int, float] = {}
    absent: dict[int, str] = {}
    for seed, terms in sums.items():
        reason = _why_not(terms, runs, values)
        if reason is None and values is not None:
            differences[seed] = math.fsum(
                sign * values.by_hash[cell.config_hash] for sign, cell in terms if cell is not None
            )
        else:
            absent[seed] = reason or "no value"
    summary = summarize(list(differences.values())) if differences else None
    return {
        "what": what,
        "compared": compared,
        "mean": summary.mean if summary else None,
        "low": summary.low if summary else None,
        "high": summary.high if summary else None,
        "seeds": f"{len(differences)} of {len(sums)}",
        "signs": f"{summary.negative}, {summary.positive}" if summary else None,
        "p": summary.p if summary else None,
        "says": _says(summary),
        "absent": "; ".join(f"seed {seed} {reason}" for seed, reason in absent.items()) or "none",
    }


def _why_not(terms: Sequence[Term], runs: Mapping[str, RunRecord], values: Values | None) -> str | None:
    """Return why runs may not stand in one sum: one is missing, or they did not begin alike."""
    known = [runs.get(cell.config_hash) if cell is not None else None for _, cell in terms]
    by_hash = values.by_hash if values is not None else {}
    for run in known:
        if run is None:
            return "missing"
        if run.status != "completed":
            return f"{run.variant} {run.optimizer} {run.status}"
        if run.config_hash not in by_hash:
            return values.absent if values is not None else "no value"
    first, *others = [run for run in known if run is not None]
    return next(filter(None, (why_not(first, other, one_config=False) for other in others)), None)


def _says(summary: PairedSummary | None) -> str:
    if summary is None:
        return "nothing"
    if summary.n == 1:
        return "one seed, no interval"
    if not summary.excludes_zero:
        return "no difference shown"
    return "lower" if summary.mean < 0 else "higher"


def _text(value: Coordinate) -> str:
    return value if isinstance(value, str) else f"{value:g}"
