"""Which downstream evaluations may be compared, and what models are called.

A pair is a model with plain attention and another from runs that differ in the attention alone (same config
otherwise, seed, step and data), evaluated on the same documents in the same precision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from results.eval_record import EvalRecord
from results.jsonio import dumps
from results.pairing import BASELINE


@dataclass(frozen=True)
class EvalPair:
    """Two comparable evaluations."""

    baseline: EvalRecord
    other: EvalRecord


def arm_label(record: EvalRecord) -> str:
    """Return the attention of a model, with what differs from its defaults."""
    attention = record.checkpoint.attention
    parts = [record.checkpoint.variant]
    for key, usual in (("strength", 1.0), ("layers", "all")):
        if attention.get(key, usual) != usual:
            parts.append(f"{key}={attention[key]}")
    return " ".join(parts)


def model_label(record: EvalRecord) -> str:
    """Return a model's run without its attention and seed."""
    checkpoint = record.checkpoint
    if checkpoint.experiment is None:
        return f"model without history {checkpoint.weights_sha256[:8]}"
    return f"{checkpoint.experiment} {checkpoint.optimizer}, step {checkpoint.step}"


def cell_key(record: EvalRecord) -> str:
    """Return what is repeated over seeds: a run without attention and seed, and how it was evaluated."""
    checkpoint, environment = record.checkpoint, record.environment
    trained = [checkpoint.experiment, checkpoint.optimizer, checkpoint.step, checkpoint.cell_hash]
    history = trained if checkpoint.cell_hash is not None else [checkpoint.weights_sha256]
    return dumps([history, record.limit, environment.device.partition(":")[0], environment.precision])


def cell_labels(found: Iterable[EvalRecord]) -> dict[str, str]:
    """Return a label per cell; the same run evaluated otherwise, or another config, is told apart by name."""
    records = {cell_key(record): record for record in found}
    labels = {}
    for key, record in records.items():
        limit = f", first {record.limit} documents" if record.limit else ""
        labels[key] = f"{model_label(record)}{limit}"
    names = list(labels.values())
    for key, record in records.items():
        if names.count(labels[key]) > 1:
            config = (record.checkpoint.cell_hash or "none")[:8]
            where = f"{record.environment.device.partition(':')[0]} {record.environment.precision}"
            labels[key] += f" (config {config}, {where})"
    return labels


def _what(record: EvalRecord) -> str:
    """Return what two evaluations must share to be a pair: the training but attention, the arithmetic."""
    checkpoint = record.checkpoint
    return dumps(
        [
            cell_key(record),
            checkpoint.pair_hash,
            checkpoint.seed,
            checkpoint.data_fingerprint,
            checkpoint.tokenizer,
            record.harness_version,
        ]
    )


def pair_evaluations(found: Sequence[EvalRecord]) -> list[EvalPair]:
    """Return every pair of a baseline and another evaluation; models without history are in none.

    Of several records of the same model and documents the latest counts.
    """
    groups: dict[str, dict[str, EvalRecord]] = defaultdict(dict)
    for record in sorted(found, key=lambda record: (record.finished_at, record.run_id)):
        if record.checkpoint.pair_hash is not None:
            groups[_what(record)][f"{arm_label(record)} {sorted(record.tasks)}"] = record
    pairs = []
    for _, group in sorted(groups.items()):
        baselines = [record for record in group.values() if record.checkpoint.variant == BASELINE]
        for record in group.values():
            if record.checkpoint.variant == BASELINE:
                continue
            # The baseline that shares most tasks.
            fitting = [base for base in baselines if shared_tasks(base, record)]
            if fitting:
                best = max(fitting, key=lambda base: (len(shared_tasks(base, record)), base.run_id))
                pairs.append(EvalPair(best, record))
    return sorted(pairs, key=lambda pair: (model_label(pair.other), arm_label(pair.other), pair.other.run_id))


def shared_tasks(baseline: EvalRecord, other: EvalRecord) -> list[str]:
    """Return the tasks that both were evaluated on, document for document, by the same metric."""
    return [
        name
        for name, result in other.tasks.items()
        if name in baseline.tasks
        and baseline.tasks[name].documents_sha256 == result.documents_sha256
        and baseline.tasks[name].primary_metric == result.primary_metric
        and baseline.tasks[name].version == result.version
    ]
