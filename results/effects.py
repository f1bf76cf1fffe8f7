"""What changing the attention did, cell by cell: paired differences over seeds, Holm within a family.

A family is all effects of one metric in one task: the more arms are tried, the likelier one of them looks
good.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from results.cells import Cell, arm_key, arm_labels, group_cells
from results.metrics import metric as metric_facts
from results.metrics import primary_metric
from results.pairing import BASELINE, Pair, latest_runs, pair_records
from results.record import Record, RunRecord
from results.stats import PairedSummary, holm, summarize

LEVEL = 0.05


@dataclass(frozen=True)
class Effect:
    """One arm against the baseline in one cell. ``summary`` is ``None`` where no pair exists: a missing cell.

    ``differences`` maps seed to other minus baseline; ``holm_p`` is adjusted within the family.
    """

    cell: Cell
    arm: str
    variant: str
    metric: str
    differences: dict[int, float]
    baseline_mean: float | None
    other_mean: float | None
    summary: PairedSummary | None
    holm_p: float | None
    notes: tuple[str, ...]


def verdict(effect: Effect) -> str:
    """Return in words what the interval carries, and nothing beyond it."""
    summary = effect.summary
    if summary is None:
        return "missing"
    if summary.n == 1:
        return "one seed, no interval"
    if not summary.excludes_zero:
        return "no difference shown"
    better = metric_facts(effect.metric).better
    direction = "lower" if summary.mean < 0 else "higher"
    word = direction if better is None else ("better" if direction == better else "worse")
    if effect.holm_p is not None and effect.holm_p > LEVEL:
        return f"{word}, but not after Holm correction"
    return word


def _values(pair: Pair, name: str) -> tuple[float, float] | None:
    first, second = pair.baseline.metrics.get(name), pair.other.metrics.get(name)
    if first is None or second is None or not (math.isfinite(first) and math.isfinite(second)):
        return None
    return first, second


def _effect(cell: Cell, arm: str, variant: str, name: str, pairs: Sequence[Pair]) -> Effect:
    values: dict[int, tuple[float, float]] = {}
    notes: set[str] = set()
    for pair in pairs:
        found = _values(pair, name)
        if found is None:
            notes.add(f"seed {pair.seed} has no finite {name}")
        else:
            values[pair.seed] = found
            # What differs, without the values: over many seeds those would fill the page.
            notes |= {caution.partition(":")[0] for caution in pair.cautions}
    differences = {seed: second - first for seed, (first, second) in sorted(values.items())}
    seeds = {record.seed for record in cell.records if record.variant == BASELINE}
    absent = sorted(seeds - values.keys())
    if values and absent:
        notes.add("missing seeds: " + ", ".join(map(str, absent)))
    n = len(values)
    return Effect(
        cell=cell,
        arm=arm,
        variant=variant,
        metric=name,
        differences=differences,
        baseline_mean=math.fsum(first for first, _ in values.values()) / n if n else None,
        other_mean=math.fsum(second for _, second in values.values()) / n if n else None,
        summary=summarize(list(differences.values())) if n else None,
        holm_p=None,
        notes=tuple(sorted(notes)),
    )


def _corrected(effects: list[Effect]) -> list[Effect]:
    families: dict[tuple[str, str], dict[str, float | None]] = defaultdict(dict)
    for i, effect in enumerate(effects):
        p = effect.summary.p if effect.summary is not None else None
        families[effect.cell.task, effect.metric][str(i)] = p
    adjusted = {i: p for family in families.values() for i, p in holm(family).items()}
    return [Effect(**{**effect.__dict__, "holm_p": adjusted[str(i)]}) for i, effect in enumerate(effects)]


def effects(records: Sequence[Record]) -> list[Effect]:
    """Return the effect of every arm in every cell, on the cell's primary metric.

    Every arm that one cell of an experiment has is listed for all its cells; where it was not run, or found
    no partner, the effect is there with an empty summary.
    """
    runs, _ = latest_runs(records)
    by_arm: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    cells = group_cells(runs)
    cell_of = {record.run_id: cell.key for cell in cells for record in cell.records}
    for pair in pair_records(runs).pairs:
        by_arm[cell_of[pair.other.run_id], arm_key(pair.other)].append(pair)
    arms: dict[str, dict[str, RunRecord]] = defaultdict(dict)
    for record in runs:
        if record.variant != BASELINE:
            arms[record.experiment].setdefault(arm_key(record), record)
    labels = arm_labels(runs)
    found: list[Effect] = []
    for cell in cells:
        name = primary_metric(cell.records)
        if name is None:
            continue
        for key in sorted(arms[cell.experiment], key=lambda key: labels[key]):
            variant = arms[cell.experiment][key].variant
            found.append(_effect(cell, labels[key], variant, name, by_arm[cell.key, key]))
    return _corrected(found)
