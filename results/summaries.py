"""The tables of a report, each a pure function of the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from results.cells import arm_key, arm_labels, group_cells
from results.effects import Effect, verdict
from results.metrics import metric as metric_facts
from results.pairing import Refusal
from results.record import BenchRecord, RunRecord
from results.tables import Column, Table, show

EFFECT_NOTES = (
    "difference: this arm minus sa, per seed, on equal data order and initial weights",
    "interval: 95% of Student's t over seeds",
    "lower/higher: seeds with a difference below and above zero",
    "p (Holm): two-sided paired t test, corrected over all rows of this table",
    "verdict: what the interval carries; `no difference shown` is not `no difference`",
)


def runs_table(task: str, runs: Sequence[RunRecord]) -> Table:
    """Return every run of a task, one per row, with all its metrics."""
    labels = arm_labels(runs)
    names = sorted({name for record in runs for name in record.metrics})
    columns = [
        Column("run_id", "run"),
        Column("cell", "cell"),
        Column("attention", "attention"),
        Column("seed", "seed"),
        Column("status", "status"),
        *(Column(name, metric_facts(name).title, metric_facts(name).digits) for name in names),
        Column("parameters", "parameters"),
        Column("steps", "steps"),
        Column("device", "device"),
        Column("precision", "precision"),
    ]
    rows = []
    for cell in group_cells(runs):
        for record in cell.records:
            train = record.curves.get("train")
            rows.append(
                {
                    **record.metrics,
                    "run_id": record.run_id,
                    "cell": cell.label,
                    "attention": labels[arm_key(record)],
                    # As text: a seed is a name, not a quantity to be grouped in thousands.
                    "seed": str(record.seed),
                    "status": record.status,
                    "parameters": record.model.parameters if record.model else None,
                    "steps": train.step[-1] if train and train.step else None,
                    "device": record.environment.device,
                    "precision": record.environment.precision,
                }
            )
    return Table(f"runs-{task}", f"Runs: {task}", tuple(columns), tuple(rows))


def effect_row(effect: Effect) -> dict[str, Any]:
    """Return one effect as the row of a table."""
    summary = effect.summary
    row: dict[str, Any] = {
        "cell": effect.cell.label,
        "arm": effect.arm,
        "metric": metric_facts(effect.metric).title,
        "baseline": effect.baseline_mean,
        "other": effect.other_mean,
        "seeds": 0,
        "verdict": verdict(effect),
        "notes": "; ".join(effect.notes) or "none",
    }
    if summary is not None:
        row |= {
            "difference": summary.mean,
            "low": summary.low,
            "high": summary.high,
            "sd": summary.sd,
            "seeds": summary.n,
            "signs": f"{summary.negative}/{summary.positive}",
            "p": summary.p,
            "holm": effect.holm_p,
        }
    return row


def effects_table(name: str, title: str, effects: Sequence[Effect]) -> Table:
    """Return effects as a table, missing ones with their cells marked as missing."""
    digits = max((metric_facts(effect.metric).digits for effect in effects), default=4)
    columns = (
        Column("cell", "cell"),
        Column("arm", "attention"),
        Column("metric", "metric"),
        Column("baseline", "sa", digits),
        Column("other", "this arm", digits),
        Column("difference", "difference", digits, signed=True),
        Column("low", "95% from", digits, signed=True),
        Column("high", "to", digits, signed=True),
        Column("sd", "sd over seeds", digits),
        Column("seeds", "seeds"),
        Column("signs", "lower/higher"),
        Column("p", "p", probability=True),
        Column("holm", "p (Holm)", probability=True),
        Column("verdict", "verdict"),
        Column("notes", "notes"),
    )
    return Table(name, title, columns, tuple(map(effect_row, effects)), EFFECT_NOTES)


def unfinished_table(runs: Sequence[RunRecord]) -> Table:
    """Return every run that did not complete, with its reason."""
    rows = [
        {
            "run_id": record.run_id,
            "experiment": record.experiment,
            "attention": record.variant,
            "optimizer": record.optimizer,
            "seed": str(record.seed),
            "status": record.status,
            "reason": record.reason or "no end was recorded: still running, or killed",
        }
        for record in runs
        if record.status != "completed"
    ]
    columns = tuple(
        Column(key, title)
        for key, title in (
            ("run_id", "run"),
            ("experiment", "experiment"),
            ("attention", "attention"),
            ("optimizer", "optimizer"),
            ("seed", "seed"),
            ("status", "status"),
            ("reason", "reason"),
        )
    )
    return Table("unfinished", "Runs that did not complete", columns, tuple(rows))


def unpaired_table(refused: Sequence[Refusal]) -> Table:
    """Return every run that is in no comparison, and why."""
    rows = [
        {
            "run_id": refusal.record.run_id,
            "experiment": refusal.record.experiment,
            "attention": refusal.record.variant,
            "seed": str(refusal.record.seed),
            "reason": refusal.reason,
        }
        for refusal in refused
    ]
    columns = (
        Column("run_id", "run"),
        Column("experiment", "experiment"),
        Column("attention", "attention"),
        Column("seed", "seed"),
        Column("reason", "why it is in no comparison"),
    )
    return Table("unpaired", "Runs without a partner", columns, tuple(rows))


def bench_table(record: BenchRecord) -> Table:
    """Return the rows of a benchmark; columns in order of appearance, summary and machine as notes."""
    keys: dict[str, None] = {}
    for row in record.rows:
        keys |= dict.fromkeys(row)
    environment = record.environment
    machine = environment.device_name or environment.cpu or environment.device
    notes = [f"{key.replace('_', ' ')}: {show(value)}" for key, value in record.summary.items()]
    notes.append(
        f"machine: {machine}, {environment.threads} threads, {environment.precision}, "
        f"torch {environment.versions.get('torch', 'unknown')}"
    )
    columns = tuple(Column(key, key.replace("_", " ")) for key in keys)
    return Table(record.run_id, f"Benchmark: {record.name}", columns, tuple(record.rows), tuple(notes))
