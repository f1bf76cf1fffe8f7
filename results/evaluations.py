"""Downstream evaluations as tables: scores, paired differences over seeds, and document by document."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from results.eval_pairing import (
    EvalPair,
    arm_label,
    cell_key,
    cell_labels,
    model_label,
    shared_tasks,
)
from results.eval_record import EvalRecord, TaskResult
from results.record import Record
from results.stats import PairedSummary, holm, sign_test, summarize
from results.tables import Column, Table

AVERAGE = "average"
DIGITS = 4
# Said below every table of primary metrics.
ASSUMED = (
    "metric: the paper does not say which accuracy its table shows; assumed is acc_norm (by characters of "
    "the answer) where the harness offers it, acc elsewhere; the records keep both"
)


def evaluations(records: Sequence[Record]) -> list[EvalRecord]:
    """Return the evaluations among ``records``, ordered for tables."""
    found = [record for record in records if isinstance(record, EvalRecord)]
    return sorted(found, key=lambda record: (model_label(record), record.name, record.run_id))


def score_table(record: EvalRecord) -> Table:
    """Return the scores of one evaluation: a row per task, the primary metric first."""
    rows = []
    for name, result in record.tasks.items():
        others = [
            f"{metric} {value:.4f}"
            for metric, value in result.metrics.items()
            if metric != result.primary_metric
        ]
        rows.append({"task": name, **_score(result), "others": ", ".join(others) or "none"})
    if record.mean is not None:
        rows.append(
            {"task": AVERAGE, "score": record.mean}
            | dict.fromkeys(("metric", "stderr", "rows", "of", "cut", "others"), "")
        )
    columns = (
        Column("task", "task"),
        Column("metric", "metric"),
        Column("score", "score", DIGITS),
        Column("stderr", "stderr", DIGITS),
        Column("rows", "rows"),
        Column("of", "of"),
        Column("cut", "contexts cut"),
        Column("others", "other metrics"),
    )
    chosen = record.checkpoint
    notes = [
        f"{arm_label(record)}, seed {chosen.seed}, {model_label(record)}, {chosen.parameters:,} parameters, "
        f"tokenizer {chosen.tokenizer}, context {chosen.max_seq_len}",
        f"lm-evaluation-harness {record.harness_version}, zero-shot"
        + (f", first {record.limit} documents of each task" if record.limit else ""),
        ASSUMED,
    ]
    return Table(record.run_id, f"Evaluation: {record.name}", columns, tuple(rows), tuple(notes))


def _score(result: TaskResult) -> dict[str, object]:
    name = result.primary_metric
    return {
        "metric": name,
        "score": result.metrics[name],
        "stderr": result.stderr.get(name),
        "rows": result.rows,
        "of": result.rows_available,
        "cut": result.cut_contexts,
    }


def evaluations_table(found: Sequence[EvalRecord]) -> Table:
    """Return every score of every evaluation, all metrics."""
    labels = cell_labels(found)
    rows = [
        {
            "model": labels[cell_key(record)],
            "attention": arm_label(record),
            # As text: a seed is a name, not a quantity to be grouped in thousands.
            "seed": str(record.checkpoint.seed),
            "task": name,
            "metric": metric + (" (primary)" if metric == result.primary_metric else ""),
            "score": value,
            "stderr": result.stderr.get(metric),
            "rows": result.rows,
            "of": result.rows_available,
            "cut": result.cut_contexts,
            "weights": record.checkpoint.weights_sha256[:12],
            "record": record.run_id,
        }
        for record in found
        for name, result in record.tasks.items()
        for metric, value in result.metrics.items()
    ]
    columns = (
        Column("model", "model"),
        Column("attention", "attention"),
        Column("seed", "seed"),
        Column("task", "task"),
        Column("metric", "metric"),
        Column("score", "score", DIGITS),
        Column("stderr", "stderr", DIGITS),
        Column("rows", "rows"),
        Column("of", "of"),
        Column("cut", "contexts cut"),
        Column("weights", "weights"),
        Column("record", "record"),
    )
    notes = ("stderr: the harness's, over documents; what seeds add is not in it", ASSUMED)
    return Table("evaluations", "Downstream evaluations", columns, tuple(rows), notes)


def documents_table(pairs: Sequence[EvalPair]) -> Table:
    """Return every pair task by task: on how many documents only one of the two is right (McNemar's test)."""
    labels = cell_labels(pair.other for pair in pairs)
    rows = []
    for pair in pairs:
        for name in shared_tasks(pair.baseline, pair.other):
            first, second = pair.baseline.tasks[name], pair.other.tasks[name]
            metric = second.primary_metric
            row: dict[str, object] = {
                "model": labels[cell_key(pair.other)],
                "attention": arm_label(pair.other),
                "seed": str(pair.other.checkpoint.seed),
                "task": name,
                "metric": metric,
                "rows": second.rows,
                "baseline": first.metrics[metric],
                "other": second.metrics[metric],
                "difference": second.metrics[metric] - first.metrics[metric],
            }
            before, after = first.correct(), second.correct()
            if before is not None and after is not None:
                lost = sum(a and not b for a, b in zip(before, after, strict=True))
                won = sum(b and not a for a, b in zip(before, after, strict=True))
                row |= {"lost": lost, "won": won, "p": sign_test(lost, won)}
            rows.append(row)
    columns = (
        Column("model", "model"),
        Column("attention", "attention"),
        Column("seed", "seed"),
        Column("task", "task"),
        Column("metric", "metric"),
        Column("rows", "rows"),
        Column("baseline", "sa", DIGITS),
        Column("other", "this arm", DIGITS),
        Column("difference", "difference", DIGITS, signed=True),
        Column("lost", "only sa right"),
        Column("won", "only this arm right"),
        Column("p", "p (McNemar)", probability=True),
    )
    notes = (
        "McNemar's exact test asks whether these two models differ on such documents, "
        "not whether trainings with other seeds would",
        "p values are not corrected for the number of rows",
        ASSUMED,
    )
    return Table("evaluation-documents", "Downstream, document by document", columns, tuple(rows), notes)


def evaluation_effects_table(pairs: Sequence[EvalPair]) -> Table:
    """Return the mean difference to plain attention over seeds, per task and for their average."""
    rows = [
        {"model": cell, "attention": arm, "task": name, **_effect_row(*found)}
        for (cell, arm), tasks in evaluation_summaries(pairs).items()
        for name, found in tasks.items()
    ]
    adjusted = holm({str(i): row["p"] for i, row in enumerate(rows)})
    rows = [{**row, "holm": adjusted[str(i)]} for i, row in enumerate(rows)]
    columns = (
        Column("model", "model"),
        Column("attention", "attention"),
        Column("task", "task"),
        Column("baseline", "sa", DIGITS),
        Column("other", "this arm", DIGITS),
        Column("difference", "difference", DIGITS, signed=True),
        Column("low", "95% from", DIGITS, signed=True),
        Column("high", "to", DIGITS, signed=True),
        Column("seeds", "seeds"),
        Column("signs", "lower/higher"),
        Column("p", "p", probability=True),
        Column("holm", "p (Holm)", probability=True),
    )
    notes = (
        "difference: this arm minus sa on each task's primary metric, per seed, on the same documents",
        "interval: 95% of Student's t over seeds; missing with one seed",
        "p (Holm): two-sided paired t test, corrected over all rows of this table",
        ASSUMED,
    )
    return Table("evaluation-effects", "Downstream: effects over seeds", columns, tuple(rows), notes)


def _scores(pair: EvalPair) -> dict[str, tuple[float, float]]:
    """Return baseline and other on every shared task, and on their average where all of them may rise."""
    names = shared_tasks(pair.baseline, pair.other)
    metrics = {name: pair.other.tasks[name].primary_metric for name in names}
    scores = {
        name: (pair.baseline.tasks[name].metrics[metric], pair.other.tasks[name].metrics[metric])
        for name, metric in metrics.items()
    }
    if len(names) > 1 and all(pair.other.tasks[name].higher_is_better for name in names):
        first, second = zip(*scores.values(), strict=True)
        scores[f"{AVERAGE} of {len(names)}"] = (
            math.fsum(first) / len(names),
            math.fsum(second) / len(names),
        )
    return scores


def evaluation_summaries(
    pairs: Sequence[EvalPair],
) -> dict[tuple[str, str], dict[str, tuple[float, float, PairedSummary]]]:
    """Return per model and arm, per task: mean of the baseline, mean of the arm, summary over seeds."""
    labels = cell_labels(pair.other for pair in pairs)
    groups: dict[tuple[str, str], dict[str, dict[int, tuple[float, float]]]] = defaultdict(dict)
    for pair in pairs:
        of_arm = groups[labels[cell_key(pair.other)], arm_label(pair.other)]
        for name, both in _scores(pair).items():
            of_arm.setdefault(name, {})[pair.other.checkpoint.seed or 0] = both
    return {
        key: {name: _over_seeds(seeds) for name, seeds in tasks.items()}
        for key, tasks in sorted(groups.items())
    }


def _over_seeds(seeds: dict[int, tuple[float, float]]) -> tuple[float, float, PairedSummary]:
    values = [pair for _, pair in sorted(seeds.items())]
    return (
        math.fsum(first for first, _ in values) / len(values),
        math.fsum(second for _, second in values) / len(values),
        summarize([second - first for first, second in values]),
    )


def _effect_row(baseline: float, other: float, summary: PairedSummary) -> dict[str, object]:
    return {
        "baseline": baseline,
        "other": other,
        "difference": summary.mean,
        "low": summary.low,
        "high": summary.high,
        "seeds": summary.n,
        "signs": f"{summary.negative}/{summary.positive}",
        "p": summary.p,
    }
