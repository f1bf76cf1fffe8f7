"""A suite as results see it: the cells that were to be run, each known by the hash of its config.

Whoever knows configs expands a suite to such a view; here it meets the records. A cell without a record is
missing, one that failed has its reason, and both are shown.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from results.eval_record import EvalRecord
from results.metrics import Metric, metric, primary_metric
from results.pairing import BASELINE, latest_runs, pair_records
from results.record import BenchRecord, Record, RunRecord
from results.stats import PairedSummary, summarize

PROBE = "probe"  # name of the benchmark record that holds the statistics of Figure 1

SCORE = Metric("mean score of the downstream tasks", better="higher")

Coordinate = str | float


@dataclass(frozen=True)
class CellView:
    """One run that belongs to the suite. ``place`` are its values on the axes other than attention."""

    place: Mapping[str, Coordinate]
    arm: str
    seed: int
    config_hash: str


@dataclass(frozen=True)
class SuiteView:
    """A suite at one scale. ``x`` is the axis drawn horizontally; ``rate`` says how the rate was chosen.

    ``interaction`` is an axis along which the difference of an arm to the baseline is itself compared.
    """

    name: str
    scale: str
    title: str
    source: str
    note: str
    view: str
    x: str | None
    cells: tuple[CellView, ...]
    rate: str | None = None
    interaction: str | None = None

    @property
    def stem(self) -> str:
        """Stem of its files."""
        return f"{self.name}-{self.scale}".replace("_", "-")

    @property
    def axes(self) -> list[str]:
        """Names of the axes other than attention."""
        return list(dict.fromkeys(axis for cell in self.cells for axis in cell.place))

    @property
    def places(self) -> list[dict[str, Coordinate]]:
        """The points of the grid, in order."""
        return [dict(key) for key in dict.fromkeys(place_key(cell.place) for cell in self.cells)]

    @property
    def arms(self) -> list[str]:
        """Attention arms, the baseline first."""
        return sorted({cell.arm for cell in self.cells}, key=lambda arm: (arm != BASELINE, arm))


@dataclass(frozen=True)
class Point:
    """One arm at one place of the grid: values by seed, its paired differences, and what is not there.

    ``absent`` maps a seed to why it has no value; ``summary`` is of the differences to the baseline, ``None``
    for the baseline itself and where no pair exists.
    """

    place: Mapping[str, Coordinate]
    arm: str
    wanted: int
    values: Mapping[int, float]
    differences: Mapping[int, float]
    absent: Mapping[int, str]
    summary: PairedSummary | None

    @property
    def mean(self) -> float | None:
        """Mean of the values, ``None`` without any."""
        return math.fsum(self.values.values()) / len(self.values) if self.values else None


def place_key(place: Mapping[str, Coordinate]) -> tuple[tuple[str, Coordinate], ...]:
    """Return a place as a key."""
    return tuple(place.items())


def suite_runs(view: SuiteView, records: Sequence[Record]) -> dict[str, RunRecord]:
    """Return the suite's runs by config hash: of each the completed one, the latest of those."""
    wanted = {cell.config_hash for cell in view.cells}
    kept, _ = latest_runs([r for r in records if isinstance(r, RunRecord) and r.config_hash in wanted])
    # The same config on two kinds of device: the completed one, then the later.
    kept.sort(key=lambda run: (run.status == "completed", run.finished_at or run.started_at, run.run_id))
    return {run.config_hash: run for run in kept}


def suite_probes(view: SuiteView, records: Sequence[Record]) -> list[BenchRecord]:
    """Return the probes of the suite's runs, by seed."""
    wanted = {cell.config_hash for cell in view.cells}
    found = [
        record
        for record in records
        if isinstance(record, BenchRecord)
        and record.name == PROBE
        and record.config.get("config_hash") in wanted
    ]
    return sorted(found, key=lambda record: (record.config.get("seed", 0), record.run_id))


@dataclass(frozen=True)
class Values:
    """What a suite is about: a value per config hash, and how it is shown."""

    facts: Metric
    by_hash: Mapping[str, float]
    absent: str  # why a completed run may have none


def suite_values(view: SuiteView, runs: Mapping[str, RunRecord], records: Sequence[Record]) -> Values | None:
    """Return the primary metric of the suite's runs, or the mean downstream score where it evaluates them.

    ``None`` when no run has completed.
    """
    completed = {key: run for key, run in runs.items() if run.status == "completed"}
    if view.view == "evaluation":
        means = {key: record.mean for key, record in suite_evaluations(completed, records).items()}
        scores = {key: mean for key, mean in means.items() if mean is not None}
        return Values(SCORE, scores, "not evaluated on these documents") if completed else None
    name = primary_metric(completed.values())
    if name is None:
        return None
    known = {key: run.metrics[name] for key, run in completed.items() if name in run.metrics}
    finite = {key: value for key, value in known.items() if math.isfinite(value)}
    return Values(metric(name), finite, f"no finite {name}")


def suite_evaluations(runs: Mapping[str, RunRecord], records: Sequence[Record]) -> dict[str, EvalRecord]:
    """Return the evaluation of every run, by config hash, all of them on the same documents.

    Of several sets of documents (all, the first few) that on which most runs were evaluated is taken, and
    the largest of those; of several evaluations the latest.
    """
    groups: dict[tuple[tuple[str, str, str], ...], dict[str, EvalRecord]] = defaultdict(dict)
    found = [r for r in records if isinstance(r, EvalRecord) and r.checkpoint.config_hash in runs]
    for record in sorted(found, key=lambda r: (r.finished_at, r.run_id)):
        documents = ((n, t.documents_sha256, t.primary_metric) for n, t in sorted(record.tasks.items()))
        groups[tuple(documents)][record.checkpoint.config_hash or ""] = record

    def weight(group: Mapping[str, EvalRecord]) -> tuple[int, int, str]:
        rows = sum(task.rows for task in next(iter(group.values())).tasks.values())
        return len(group), rows, max(record.finished_at for record in group.values())

    return max(groups.values(), key=weight, default={})


def points(view: SuiteView, runs: Mapping[str, RunRecord], values: Values | None) -> list[Point]:
    """Return every arm at every place of the grid, those without any record too."""
    partner = {
        pair.other.config_hash: pair.baseline.config_hash for pair in pair_records(list(runs.values())).pairs
    }
    by_hash = values.by_hash if values is not None else {}
    found = []
    for place in view.places:
        for arm in view.arms:
            cells = [cell for cell in view.cells if dict(cell.place) == place and cell.arm == arm]
            if cells:
                found.append(_point(place, arm, cells, runs, by_hash, partner, values))
    return found


def _point(
    place: Mapping[str, Coordinate],
    arm: str,
    cells: Sequence[CellView],
    runs: Mapping[str, RunRecord],
    by_hash: Mapping[str, float],
    partner: Mapping[str, str],
    values: Values | None,
) -> Point:
    present = {cell.seed: by_hash[cell.config_hash] for cell in cells if cell.config_hash in by_hash}
    differences = {
        cell.seed: by_hash[cell.config_hash] - by_hash[partner[cell.config_hash]]
        for cell in cells
        if cell.config_hash in by_hash and partner.get(cell.config_hash) in by_hash
    }
    absent = {
        cell.seed: _why_absent(runs.get(cell.config_hash), values)
        for cell in cells
        if cell.config_hash not in by_hash
    }
    summary = summarize(list(differences.values())) if differences else None
    return Point(place, arm, len(cells), present, differences, absent, summary)


def _why_absent(run: RunRecord | None, values: Values | None) -> str:
    if run is None:
        return "missing"
    if run.status == "completed":
        return values.absent if values is not None else "no value"
    return f"{run.status}: {run.reason}" if run.reason else run.status
