"""All of a suite for a report: its table, its figure, and its lines on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from results.record import Record
from results.suites.figures import axis_figure, probe_figure
from results.suites.interaction import interaction_table
from results.suites.tables import probe_table, suite_table
from results.suites.view import SuiteView, points, suite_probes, suite_runs, suite_values
from results.tables import Table, markdown


def has_records(view: SuiteView, records: Sequence[Record]) -> bool:
    """Tell whether any cell of the suite has a record."""
    return bool(suite_runs(view, records))


def suite_page(
    view: SuiteView,
    records: Sequence[Record],
    folder: Path,
    table: Callable[[Table], None],
    drawn: Callable[[Sequence[Path]], None],
) -> list[str]:
    """Write a suite's table and figure below ``folder`` through ``table`` and ``drawn``; return its lines."""
    runs = suite_runs(view, records)
    stem = f"figures/suite-{view.stem}"
    paths: list[Path] = []
    more: list[Table] = []
    if view.view == "probe":
        probes = suite_probes(view, records)
        shown = probe_table(view, probes)
        paths = probe_figure(view, probes, folder / stem) if probes else []
    else:
        values = suite_values(view, runs, records)
        found = points(view, runs, values)
        shown = suite_table(view, found, values)
        if values is not None and values.by_hash and view.axes:
            paths = axis_figure(view, found, values.facts, folder / stem)
        if view.interaction:
            more.append(interaction_table(view, runs, values))
    shown, *more = [
        Table(f"suite-{one.name}", one.title, one.columns, one.rows, one.notes) for one in (shown, *more)
    ]
    for one in (shown, *more):
        table(one)
    drawn(paths)
    done = sum(run.status == "completed" for run in runs.values())
    lines = [f"### {view.title} ({view.source}), scale {view.scale}", ""]
    lines += [f"{done} of {len(view.cells)} runs completed; {view.note}.", ""]
    if view.rate:
        lines += [f"{view.rate[:1].upper()}{view.rate[1:]}.", ""]
    lines += [markdown(shown, heading=False).rstrip("\n"), ""]
    for one in more:
        lines += [f"{one.title}:", "", markdown(one, heading=False).rstrip("\n"), ""]
    return lines + ([f"![{view.title}]({stem}.svg)", ""] if paths else [])
