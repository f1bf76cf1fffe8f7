"""All of a suite for a report: its table, its figure, and its lines on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from results.evaluations import ASSUMED
from results.findings import probe_findings, suite_findings
from results.record import Record
from results.suites.figures import axis_figure, probe_figure
from results.suites.interaction import interaction_table
from results.suites.tables import probe_table, suite_table, task_table
from results.suites.view import (
    SuiteView,
    points,
    suite_evaluations,
    suite_probes,
    suite_runs,
    suite_values,
)
from results.tables import Table, markdown


@dataclass(frozen=True)
class Page:
    """A suite's lines on the page, and what it says in a few sentences."""

    lines: list[str]
    findings: list[str]


def has_records(view: SuiteView, records: Sequence[Record]) -> bool:
    """Tell whether any cell of the suite has a record."""
    return bool(suite_runs(view, records))


def suite_page(
    view: SuiteView,
    records: Sequence[Record],
    folder: Path,
    table: Callable[[Table], None],
    drawn: Callable[[Sequence[Path]], None],
    curves: Mapping[str, str] = MappingProxyType({}),
) -> Page:
    """Write a suite's table and figure below ``folder`` through ``table`` and ``drawn``; return its page.

    ``curves`` has the figures of training curves, stem by config hash: a suite about curves shows them.
    """
    runs = suite_runs(view, records)
    stem = f"figures/suite-{view.stem}"
    paths: list[Path] = []
    more: list[Table] = []
    findings: list[str] = []
    if view.view == "probe":
        probes = suite_probes(view, records)
        shown = probe_table(view, probes)
        paths = probe_figure(view, probes, folder / stem) if probes else []
        findings = probe_findings(view, probes)
    else:
        values = suite_values(view, runs, records)
        found = points(view, runs, values)
        shown = suite_table(view, found, values)
        if values is not None and values.by_hash and view.axes:
            paths = axis_figure(view, found, values.facts, folder / stem)
            findings = suite_findings(view, found, values.facts)
        evaluated = suite_evaluations(runs, records) if view.view == "evaluation" else {}
        if evaluated:
            more.append(task_table(view, evaluated))
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
    if view.view == "evaluation":
        lines += [f"{ASSUMED[:1].upper()}{ASSUMED[1:]}.", ""]
    lines += [markdown(shown, heading=False).rstrip("\n"), ""]
    for one in more:
        lines += [f"{one.title}:", "", markdown(one, heading=False).rstrip("\n"), ""]
        lines += [f"{note[:1].upper()}{note[1:]}." for note in one.notes if note != ASSUMED] + [""]
    lines += [f"![{view.title}]({stem}.svg)", ""] if paths else []
    if view.view == "curves":
        for stem, place in _curves(view, curves).items():
            lines += [f"![{view.title}, {place}]({stem}.svg)", ""]
    return Page(lines, findings)


def _curves(view: SuiteView, curves: Mapping[str, str]) -> dict[str, str]:
    """Return the figures of the suite's places, each with the name of its place."""
    return {
        curves[cell.config_hash]: ", ".join(map(str, cell.place.values()))
        for cell in view.cells
        if cell.config_hash in curves
    }
