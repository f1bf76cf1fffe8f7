"""What the records say and how sure that is, in sentences: the opening of the results page.

A sentence carries no more than its intervals: one seed gives a direction, an interval that covers zero
shows no difference, and of many places only what is left after Holm's correction counts as found.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from results.effects import LEVEL, Effect
from results.eval_pairing import EvalPair
from results.evaluations import AVERAGE, evaluation_summaries
from results.metrics import Metric
from results.metrics import metric as metric_facts
from results.names import slug
from results.pairing import BASELINE
from results.record import BenchRecord
from results.stats import PairedSummary, holm, summarize
from results.suites.tables import STATISTICS
from results.suites.view import SCORE, Point, SuiteView
from results.tables import show


@dataclass(frozen=True)
class Difference:
    """Differences to the baseline by seed at one place, with their p value corrected over its family."""

    by_seed: Mapping[int, float]
    summary: PairedSummary | None
    holm_p: float | None


def word(difference: Difference, better: str | None) -> str:
    """Return in a word or two what one difference shows."""
    summary = difference.summary
    if summary is None:
        return "missing"
    if summary.n == 1:
        return f"{_direction(summary.mean, better)} on one seed"
    if not summary.excludes_zero or (difference.holm_p is not None and difference.holm_p > LEVEL):
        return "no difference shown"
    return _direction(summary.mean, better)


def _direction(mean: float, better: str | None) -> str:
    if mean == 0:
        return "equal"
    direction = "lower" if mean < 0 else "higher"
    return direction if better is None else ("better" if direction == better else "worse")


def pooled(differences: Sequence[Difference]) -> PairedSummary | None:
    """Return the mean over places, seed by seed: seeds stay the units, so places do not count as repetitions.

    Of the seeds that every place has which is there at all; None without any.
    """
    known = [one.by_seed for one in differences if one.by_seed]
    if not known:
        return None
    seeds = sorted(set.intersection(*(set(one) for one in known)))
    means = [math.fsum(one[seed] for one in known) / len(known) for seed in seeds]
    return summarize(means) if means else None


def sentence(arm: str, facts: Metric, differences: Sequence[Difference], place: str) -> str:
    """Return what the differences of one arm come to, all together and one by one.

    Args:
        place: what one of them is called, a place of a grid or a cell.
    """
    known = [one.summary for one in differences if one.summary is not None]
    subject = f"{arm} minus {BASELINE} in {facts.title}"
    if not known:
        return f"{subject}: nothing to compare yet."
    together = known[0] if len(known) == 1 else pooled(differences)
    parts = []
    if together is not None:
        over = f"mean over {len(known)} {place}s " if len(known) > 1 else ""
        # One difference may belong to a family; their mean is a single test.
        own = next(one for one in differences if one.summary is not None).holm_p if len(known) == 1 else None
        shown = word(Difference({}, together, own), facts.better)
        parts.append(f"{over}{_estimate(together, facts)}: {shown}")
    if len(differences) > 1:
        if len(known) > 1:
            ends = [show(end(one.mean for one in known), facts.digits, signed=True) for end in (min, max)]
            lower, pairs = sum(one.negative for one in known), sum(one.n for one in known)
            parts.append(f"{place} by {place} {ends[0]} to {ends[1]}, lower in {lower} of {pairs} pairs")
        counts = Counter(word(one, facts.better) for one in differences)
        order = sorted(counts, key=lambda name: (name == "missing", name == "no difference shown", name))
        alone = ", ".join(f"{counts[name]} {name}" for name in order)
        parts.append(f"of {len(differences)} {place}s each alone {alone}")
    end = "" if max(one.n for one in known) > 1 else "; one seed gives a direction, not a finding"
    return f"{subject}: {'; '.join(parts)}{end}."


def _estimate(summary: PairedSummary, facts: Metric) -> str:
    """Return a mean with its interval and its number of seeds."""
    mean = show(summary.mean, facts.digits, signed=True)
    seeds = f"{summary.n} seed{'' if summary.n == 1 else 's'}"
    if summary.low is None or summary.high is None:
        return f"{mean} ({seeds}, no interval)"
    low, high = (show(bound, facts.digits, signed=True) for bound in (summary.low, summary.high))
    return f"{mean} (95% from {low} to {high}, {seeds})"


def _corrected(points: Sequence[Point]) -> list[Difference]:
    adjusted = holm({str(i): point.summary.p if point.summary else None for i, point in enumerate(points)})
    return [Difference(point.differences, point.summary, adjusted[str(i)]) for i, point in enumerate(points)]


def suite_findings(view: SuiteView, found: Sequence[Point], facts: Metric) -> list[str]:
    """Return a sentence per arm of a suite; Holm's correction is over all its places and arms."""
    others = [point for point in found if point.arm != BASELINE]
    corrected = _corrected(others)
    by_arm: dict[str, list[Difference]] = defaultdict(list)
    for point, difference in zip(others, corrected, strict=True):
        by_arm[point.arm].append(difference)
    return [
        f"{title(view)}: {sentence(arm, facts, differences, 'place')}" for arm, differences in by_arm.items()
    ]


def probe_findings(view: SuiteView, probes: Sequence[BenchRecord]) -> list[str]:
    """Return how the statistics of Figure 1 go from the first layer to the last, mean over models."""
    if not probes:
        return []
    parts = []
    for name, what in STATISTICS.items():
        layers: dict[int, list[float]] = defaultdict(list)
        for record in probes:
            for row in record.rows:
                layers[row["layer"]].append(row[name])
        means = [math.fsum(values) / len(values) for _, values in sorted(layers.items())]
        parts.append(f"{what} {means[0]:.3f} in the first layer and {means[-1]:.3f} in the last")
    models = f"{len(probes)} model{'' if len(probes) == 1 else 's'}"
    return [f"{title(view)}: {', '.join(parts)}; {models}, each with its own seed."]


def title(view: SuiteView) -> str:
    """Return a suite's name for a sentence."""
    return f"**{view.title}** ({view.source}, scale {view.scale})"


def effect_findings(by_task: Mapping[tuple[str, str], Sequence[Effect]], shown: frozenset[str]) -> list[str]:
    """Return a sentence per experiment and arm, of those cells that no suite shows.

    Args:
        by_task: effects by task and metric, corrected within those.
        shown: config hashes of runs that suites show.
    """
    groups: dict[tuple[str, str, str], list[Effect]] = defaultdict(list)
    for (_, name), group in by_task.items():
        for effect in group:
            if not any(record.config_hash in shown for record in effect.cell.records):
                groups[effect.cell.experiment, name, effect.arm].append(effect)
    lines = []
    for (experiment, name, arm), group in sorted(groups.items()):
        differences = [Difference(effect.differences, effect.summary, effect.holm_p) for effect in group]
        lines.append(f"**{experiment}**: {sentence(arm, metric_facts(name), differences, 'cell')}")
    return lines


def evaluation_findings(pairs: Sequence[EvalPair]) -> list[str]:
    """Return a sentence per evaluated model and arm, on the average of its tasks; not corrected."""
    lines = []
    for (cell, arm), tasks in evaluation_summaries(pairs).items():
        averages = [name for name in tasks if name.startswith(AVERAGE)]
        for name in averages or list(tasks):
            facts = Metric(f"the {name} tasks" if averages else name, SCORE.digits, SCORE.better)
            found = sentence(arm, facts, [Difference({}, tasks[name][2], None)], "task")
            lines.append(f"**Downstream**, {cell}: {found}")
    return lines


def bench_findings(benches: Sequence[BenchRecord]) -> list[str]:
    """Return what a training step with exclusive attention costs, as each benchmark measured it."""
    lines = []
    for bench in benches:
        rows = [row for row in bench.rows if row.get("attention") == "fused" and "model" in row]
        if not rows:
            continue
        ratios = sorted(row["ratio"] for row in rows)
        low, high = min(row["ratio_low"] for row in rows), max(row["ratio_high"] for row in rows)
        machine = bench.environment.device_name or bench.environment.cpu
        lines.append(
            f"**Time of a training step** ({machine}, {bench.environment.threads} threads): exclusive over "
            f"plain attention {ratios[0]:.3f} to {ratios[-1]:.3f} over {len(rows)} settings, "
            f"95% intervals within {low:.3f} to {high:.3f} ([rows](tables/{slug(bench.run_id)}.md))."
        )
    return lines
