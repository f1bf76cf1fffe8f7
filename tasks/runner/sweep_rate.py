"""Where a suite's learning rate comes from: the plain baseline's best in the suite that searched it."""

from collections.abc import Sequence
from dataclasses import dataclass

from results.rates import RateChoice, choose_rate
from tasks.runner import suite as suites
from tasks.runner.config.schema import RunConfig
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
    """Return what the records say about the learning rates of a suite's cells; None where none is searched.

    A rate belongs to an optimizer: each is held against the search that was made with it. Records of the
    search are looked for where the cells keep theirs.
    """
    if not cells or (suite.tuned_by is None and not searches_rate(suite, scale)):
        return None
    optimizers = list(dict.fromkeys(cell.config.optimizer.name for cell in cells))
    checks = []
    for optimizer in optimizers:
        own = [cell for cell in cells if cell.config.optimizer.name == optimizer]
        # With one optimizer there is nothing to tell apart.
        title = "learning rate" if len(optimizers) == 1 else f"learning rate of {optimizer}"
        found = check_optimizer(name, suite, scale, own)
        checks.append(RateCheck(f"{title}: {found.line}", found.good))
    return RateCheck("; ".join(check.line for check in checks), all(check.good for check in checks))


def source_of(name: str, suite: Suite, optimizer: str) -> str | None:
    """Return the suite that searched the rate of an optimizer, None where the suite names none for it."""
    if isinstance(suite.tuned_by, dict):
        return suite.tuned_by.get(optimizer)
    return suite.tuned_by or name


def check_optimizer(name: str, suite: Suite, scale: str, cells: Sequence[Cell]) -> RateCheck:
    """Return what is to be said about the rate of cells that share an optimizer."""
    optimizer = cells[0].config.optimizer.name
    source = source_of(name, suite, optimizer)
    if source is None:
        return RateCheck(f"nothing searches that of {optimizer}; name its suite in tuned_by of {name}", False)
    search = cells
    if suite.tuned_by is not None:
        found = suites.expand(suites.scale_of(suites.load_suite(source), source, scale))
        search = suites.recorded_in(found, cells[0].config.output.records)
    baseline = [config for config in baseline_of(search) if config.optimizer.name == optimizer]
    command = f"./xsa sweep {source} --scale {scale}"
    if not baseline:
        return RateCheck(
            f"{source} does not search that of {optimizer}; run {command} optimizer={optimizer}", False
        )
    rates = sorted({config.optimizer.lr for config in baseline})
    runs = {rate: [run_record(c) for c in baseline if c.optimizer.lr == rate] for rate in rates}
    choice = choose_rate(runs)
    if choice is None:
        count = sum(record is not None for row in runs.values() for record in row)
        return RateCheck(
            f"{MISSING}, {count} of {len(baseline)} baseline runs of {source} have a record; run {command}",
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


def baseline_of(cells: Sequence[Cell]) -> list[RunConfig]:
    """Return the configs of the plain cells."""
    return [cell.config for cell in cells if cell.config.attention.variant == PAIRED_BASELINE]


def judged(choice: RateChoice, command: str) -> RateCheck:
    """Return the choice in words; good when better rates cannot lie outside the range."""
    low, high = min(choice.losses), max(choice.losses)
    text = (
        f"{choice.best:g} is the plain baseline's best of {len(choice.losses)} from {low:g} "
        f"to {high:g} ({choice.seeds} seed{'s' if choice.seeds != 1 else ''})"
    )
    if choice.inside:
        return RateCheck(f"{text}, inside the searched range", True)
    factor = 0.5 if choice.best == low else 2
    rates = ",".join(f"{rate:g}" for rate in sorted({*choice.losses, choice.best * factor}))
    return RateCheck(
        f"{text}, at the edge of the searched range: search further with {command} {RATE}={rates}", False
    )
