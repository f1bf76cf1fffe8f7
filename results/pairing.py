"""Which two runs may be compared, and why the others may not.

A pair is a baseline run and another that differ in the attention variant and in nothing else: the same
config outside the attention group, seed, data, order of batches and initial weights, the same kind of
arithmetic. Every run that finds no partner is refused with a reason, so that nothing disappears from a
table unnoticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from results.record import Record, RunRecord

BASELINE = "sa"


@dataclass(frozen=True)
class Pair:
    """Two comparable runs; ``cautions`` names what differs without forbidding the comparison."""

    baseline: RunRecord
    other: RunRecord
    cautions: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        """Seed that both share."""
        return self.baseline.seed

    def difference(self, metric: str) -> float | None:
        """Return ``other - baseline`` of a metric, ``None`` when either lacks it."""
        first, second = self.baseline.metrics.get(metric), self.other.metrics.get(metric)
        return None if first is None or second is None else second - first


@dataclass(frozen=True)
class Refusal:
    """A run that was not paired, and why."""

    record: RunRecord
    reason: str


@dataclass(frozen=True)
class Pairing:
    """All pairs, and all runs of other variants that have none."""

    pairs: tuple[Pair, ...]
    refused: tuple[Refusal, ...]


def why_not(baseline: RunRecord, other: RunRecord, *, one_config: bool = True) -> str | None:
    """Return why two runs may not be compared as a pair, ``None`` when they may.

    Without ``one_config`` their configs may differ outside attention too, in what the caller compares: the
    same data in the same order and the same initial weights are asked for as always.
    """
    for record in (baseline, other):
        if record.status != "completed":
            return f"{record.run_id} is {record.status}" + (f": {record.reason}" if record.reason else "")
    if baseline.model is None or other.model is None or baseline.data is None or other.data is None:
        return "no model or data facts recorded"
    checks: list[tuple[str, object, object]] = [
        ("task", baseline.task, other.task),
        ("seed", baseline.seed, other.seed),
        ("data fingerprint", baseline.data.fingerprint, other.data.fingerprint),
        (
            "config outside the attention group (pair_hash)",
            baseline.pair_hash,
            other.pair_hash if one_config else baseline.pair_hash,
        ),
        ("order of batches (batches_sha256)", baseline.data.batches_sha256, other.data.batches_sha256),
        (
            "initial weights",
            baseline.model.initial_weights_sha256,
            other.model.initial_weights_sha256,
        ),
        ("device", baseline.environment.device, other.environment.device),
        ("precision", baseline.environment.precision, other.environment.precision),
    ]
    for what, first, second in checks:
        if first != second:
            return f"different {what}: {_short(first)} and {_short(second)}"
    if baseline.data.batches_sha256 is None:
        return "no hash of the batches recorded, so equal data order cannot be shown"
    if baseline.config_hash == other.config_hash:
        return "the same config twice"
    return None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "..."


def cautions(baseline: RunRecord, other: RunRecord) -> tuple[str, ...]:
    """Return what differs between two comparable runs and may still move a result."""
    first, second = baseline.environment, other.environment
    found: list[str] = []
    if first.git_commit != second.git_commit:
        found.append(f"different commits: {_short(first.git_commit)} and {_short(second.git_commit)}")
    if first.git_dirty or second.git_dirty:
        found.append("made with uncommitted changes")
    changed = sorted(
        name
        for name in first.versions.keys() | second.versions.keys()
        if first.versions.get(name) != second.versions.get(name)
    )
    if changed:
        found.append(f"different versions of {', '.join(changed)}")
    for what, one, two in (
        ("threads", first.threads, second.threads),
        ("device name", first.device_name, second.device_name),
        ("processor", first.cpu, second.cpu),
        ("compile", first.compile, second.compile),
    ):
        if one != two:
            found.append(f"different {what}: {one} and {two}")
    return tuple(found)


def latest_runs(records: Sequence[Record]) -> tuple[list[RunRecord], list[Refusal]]:
    """Return one training run per config, device and precision, and the earlier ones it supersedes.

    A completed run goes before one that is not, a later before an earlier: a rerun replaces, it never adds
    a seed.
    """
    groups: dict[tuple[str, str, str], list[RunRecord]] = defaultdict(list)
    for record in records:
        if isinstance(record, RunRecord):
            groups[record.config_hash, record.environment.device, record.environment.precision].append(record)
    kept: list[RunRecord] = []
    superseded: list[Refusal] = []
    for group in groups.values():
        *earlier, last = sorted(group, key=_recency)
        kept.append(last)
        superseded += [Refusal(record, f"superseded by {last.run_id}") for record in earlier]
    return kept, superseded


def _recency(record: RunRecord) -> tuple[bool, datetime, str]:
    moment = datetime.fromisoformat(record.finished_at or record.started_at)
    return record.status == "completed", moment, record.run_id


def _order(record: RunRecord) -> tuple[str, str, str, int, str]:
    return record.experiment, record.optimizer, record.variant, record.seed, record.run_id


def pair_records(records: Sequence[Record], baseline: str = BASELINE) -> Pairing:
    """Return every pair of a ``baseline`` run with another variant, and every other run with its reason.

    Records that are not training runs are passed over. The order of ``records`` does not matter.
    """
    kept, refused = latest_runs(records)
    kept.sort(key=_order)
    baselines = [record for record in kept if record.variant == baseline]
    pairs: list[Pair] = []
    for record in kept:
        if record.variant == baseline:
            continue
        near = [
            base for base in baselines if base.experiment == record.experiment and base.seed == record.seed
        ]
        reasons = [(base, why_not(base, record)) for base in near]
        partners = [base for base, reason in reasons if reason is None]
        if len(partners) == 1:
            pairs.append(Pair(partners[0], record, cautions(partners[0], record)))
        elif partners:
            names = ", ".join(base.run_id for base in partners)
            refused.append(Refusal(record, f"more than one baseline fits: {names}"))
        elif record.status != "completed":
            refused.append(Refusal(record, why_not(record, record) or record.status))
        else:
            refused.append(Refusal(record, _closest_reason(record, reasons, baseline)))
    return Pairing(tuple(pairs), tuple(sorted(refused, key=lambda refusal: _order(refusal.record))))


def _closest_reason(record: RunRecord, reasons: Sequence[tuple[RunRecord, str | None]], baseline: str) -> str:
    """Return the reason of the likeliest partner: the same config outside attention before anything else."""
    if not reasons:
        return f"no {baseline} run of {record.experiment} with seed {record.seed}"
    base, reason = min(
        reasons,
        key=lambda item: (
            item[0].pair_hash != record.pair_hash,
            item[0].optimizer != record.optimizer,
            item[0].run_id,
        ),
    )
    return f"{base.run_id}: {reason}"
