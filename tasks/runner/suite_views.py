"""Suites as a report takes them: expanded, so that records meet the cells they belong to."""

from collections.abc import Sequence

from results.record import Record, RunRecord
from results.suites.view import CellView, SuiteView
from tasks.errors import UserError
from tasks.runner import suite as suites
from tasks.runner.suite import Cell, ScaleConfig, Suite
from tasks.runner.sweep_rate import check_rate


def views_of(records: Sequence[Record], directory: str) -> list[SuiteView]:
    """Return every suite at every scale that has a record among those of `directory`.

    Suites none of whose experiments was ever run are not expanded: composing configs takes time.
    """
    known = {record.experiment for record in records if isinstance(record, RunRecord)}
    hashes = {record.config_hash for record in records if isinstance(record, RunRecord)}
    found = []
    for name in suites.suites():
        suite = suites.load_suite(name)
        for scale, grid in suite.scales.items():
            if not grid.commands and experiments_of(grid) & known:
                cells = suites.recorded_in(suites.expand(grid), directory)
                if any(cell.config.config_hash() in hashes for cell in cells):
                    found.append(view_of(name, suite, scale, grid, cells))
    return found


def experiments_of(grid: ScaleConfig) -> set[str]:
    """Return the experiments a grid's runs may have."""
    linked = [value for values in grid.axes.values() for value in values if isinstance(value, dict)]
    named = {value["experiment"] for value in linked if "experiment" in value}
    return named | {grid.experiment} if grid.experiment else named


def view_of(name: str, suite: Suite, scale: str, grid: ScaleConfig, cells: Sequence[Cell]) -> SuiteView:
    """Return one suite at one scale for a report."""
    try:
        rate = check_rate(name, suite, scale, cells)
    except UserError:  # a record it needs is not readable; the report says so where it reads them all
        rate = None
    return SuiteView(
        name=name,
        scale=scale,
        title=suite.title,
        source=suite.source,
        note=grid.note,
        view=suite.view,
        x=suite.x,
        cells=tuple(
            CellView(
                place={axis: value for axis, value in cell.coordinates.items() if axis != "attention"},
                arm=cell.config.attention.variant,
                seed=cell.config.seed,
                config_hash=cell.config.config_hash(),
            )
            for cell in cells
        ),
        rate=rate.line if rate is not None else None,
        interaction=suite.interaction,
    )
