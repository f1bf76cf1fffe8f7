"""Where a suite's learning rate comes from: the plain baseline's best in the suite that searched it."""

from collections.abc import Sequence
from dataclasses import dataclass

from results.rates import RateChoice, choose_rate
from tasks.runner import suite as suites
from tasks.runner.suite import PAIRED_BASELINE, Cell, Suite
from tasks.runner.sweep_jobs import run_record

RATE = "optimizer.lr"
MISSING = "has not been chosen yet"


@dataclass(frozen=True)
class RateCheck:
    """What is to be said about a suite's learning rate, and whether all is well."""

    line: str
    good: bool


def searches_rate(suite: Suite, scale: str) -> bool:
    """Tell whether an axis of the suite sets the learning rate."""
    return any(suites.drives(axis, values, RATE) for axis, values in suite.scales[scale].axes.items())


def check_rate(name: str, suite: Suite, scale: str, cells: Sequence[Cell]) -> RateCheck | None:
    """Return what the records say about the learning rate of a suite's cells; None where nothing is searched.

    Records of the search are looked for where the cells keep theirs.
    """
    source = suite.tuned_by or (name if searches_rate(suite, scale) else None)
    if source is None or not cells:
        return None
    search = cells
    if suite.tuned_by is not None:
        definition = suites.load_suite(source)
        found = suites.expand(suites.scale_of(definition, source, scale))
        search = suites.recorded_in(found, cells[0].config.output.records)
    baseline = [cell.config for cell in search if cell.config.attention.variant == PAIRED_BASELINE]
    rates = sorted({config.optimizer.lr for config in baseline})
    runs = {rate: [run_record(c) for c in baseline if c.optimizer.lr == rate] for rate in rates}
    command = f"./xsa sweep {source} --scale {scale}"
    choice = choose_rate(runs)
    if choice is None:
        found = sum(record is not None for row in runs.values() for record in row)
        return RateCheck(
            f"learning rate: {MISSING}, {found} of {len(baseline)} baseline runs of {source} have a record; "
            f"run {command}",
            False,
        )
    check = judged(choice, command)
    used = {config.optimizer.lr for config in baseline_of(cells)}
    if suite.tuned_by is not None and check.good and used != {choice.best}:
        others = ", ".join(f"{rate:g}" for rate in sorted(used - {choice.best}))
        if choice.best in used:  # other sizes, at rates of their own
            return RateCheck(f"{check.line}; of this suite some cells run at {others}, not searched", True)
        return RateCheck(f"{check.line}; but this suite runs at {others}", False)
    return check


def baseline_of(cells: Sequence[Cell]) -> list:
    """Return the configs of the plain cells."""
    return [cell.config for cell in cells if cell.config.attention.variant == PAIRED_BASELINE]


def judged(choice: RateChoice, command: str) -> RateCheck:
    """Return the choice in words; good when better rates cannot lie outside the range."""
    low, high = min(choice.losses), max(choice.losses)
    text = (
        f"learning rate: {choice.best:g} is the plain baseline's best of {len(choice.losses)} from {low:g} "
        f"to {high:g} ({choice.seeds} seed{'s' if choice.seeds != 1 else ''})"
    )
    if choice.inside:
        return RateCheck(f"{text}, inside the searched range", True)
    factor = 0.5 if choice.best == low else 2
    rates = ",".join(f"{rate:g}" for rate in sorted({*choice.losses, choice.best * factor}))
    return RateCheck(
        f"{text}, at the edge of the searched range: search further with {command} {RATE}={rates}", False
    )
