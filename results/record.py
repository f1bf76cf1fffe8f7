"""What a run writes about itself: one record, one schema, nothing to be parsed back out of logs.

Three kinds exist. :class:`RunRecord` is a training run, :class:`BenchRecord` a benchmark,
:class:`EvalRecord` a trained model's downstream evaluation. All are strict: an unknown key, a wrong type,
curves of unequal length or a time without a zone is an error when the record is made, so that what stands in
``results/runs`` can be trusted later. What a task wants to keep beyond the named fields goes into the
``extra`` dictionaries.

Units: times in seconds, memory in bytes, losses in nats per token, ``bits_per_byte`` in bits per byte.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from results.eval_record import EvalRecord
from results.jsonio import dumps
from results.parts import (
    SCHEMA_VERSION,
    BaseRecord,
    Count,
    Curve,
    DataFacts,
    Environment,
    Free,
    ModelFacts,
    Moment,
    Name,
    Text,
    Throughput,
    checked,
    utc_now,
)

__all__ = [
    "KINDS",
    "SCHEMA_VERSION",
    "STATUSES",
    "BenchRecord",
    "Curve",
    "DataFacts",
    "Environment",
    "EvalRecord",
    "ModelFacts",
    "Record",
    "RunRecord",
    "Throughput",
    "parse_record",
    "to_plain",
    "utc_now",
]

STATUSES = ("running", "completed", "failed", "interrupted")


class RunRecord(BaseRecord):
    """One training run.

    ``config`` is resolved, ``config_hash`` identifies the run, ``pair_hash`` is the hash of the config
    without its attention group: records that share it differ in the variant alone. ``reason`` says why a
    run failed or stopped. ``cell_hash`` is the hash without attention group and seed: what is repeated over
    seeds (``None``: told from the config itself). ``primary_metric`` names the entry of ``metrics`` that
    comparisons are about. A record does not change; :meth:`updated` gives a new one.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["train"] = "train"
    run_id: Name
    experiment: Text
    task: Text
    config: Free
    config_hash: Text
    pair_hash: Text
    cell_hash: Text | None = None
    variant: Text
    optimizer: Text
    seed: int
    status: Literal["running", "completed", "failed", "interrupted"]
    reason: str | None = None
    environment: Environment
    model: ModelFacts | None = None
    data: DataFacts | None = None
    curves: dict[str, Curve] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    primary_metric: str | None = None
    throughput: Throughput = Field(default_factory=Throughput)
    peak_memory_bytes: Count | None = None
    sample: str | None = None
    started_at: Moment
    finished_at: Moment | None = None
    extra: Free = Field(default_factory=dict)

    @field_validator("metrics", "curves")
    @classmethod
    def _ordered(cls, value: dict[str, Any]) -> dict[str, Any]:
        return dict(sorted(value.items()))

    @model_validator(mode="after")
    def _consistent(self) -> RunRecord:
        if self.status in ("failed", "interrupted") and not self.reason:
            raise ValueError(f"a run that is {self.status} needs a reason; say in one line why it ended")
        if self.status == "completed":
            # A run may fail before it has a model or data; one that completed has both, or nothing pairs.
            absent = [name for name in ("finished_at", "model", "data") if getattr(self, name) is None]
            if absent:
                raise ValueError(f"a completed run needs {', '.join(absent)}; set it or use another status")
            if self.primary_metric is not None and self.primary_metric not in self.metrics:
                known = ", ".join(self.metrics) or "none"
                raise ValueError(f"primary_metric {self.primary_metric!r} is not among the metrics ({known})")
        self._check_times(self.started_at, self.finished_at)
        return self


class BenchRecord(BaseRecord):
    """One benchmark: ``rows`` are its measurements (flat dictionaries), ``summary`` what they come to."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["bench"] = "bench"
    run_id: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,199})?$")] = ""
    name: Name
    config: Free
    environment: Environment
    rows: list[Free]
    summary: Free = Field(default_factory=dict)
    started_at: Moment
    finished_at: Moment
    extra: Free = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> BenchRecord:
        self._check_times(self.started_at, self.finished_at)
        if not self.run_id:
            # The same benchmark on the same machine replaces its record; any other gets its own.
            where = [self.environment.device, self.environment.device_name, self.environment.cpu]
            digest = hashlib.sha256(dumps([self.name, self.config, where]).encode()).hexdigest()[:8]
            device = self.environment.device.replace(":", "")
            # A frozen model is filled in past its own guard, here at its making and nowhere else.
            self.__dict__["run_id"] = f"bench-{self.name}-{device}-{digest}"
        return self


Record = RunRecord | BenchRecord | EvalRecord
KINDS: dict[str, type[RunRecord] | type[BenchRecord] | type[EvalRecord]] = {
    "train": RunRecord,
    "bench": BenchRecord,
    "eval": EvalRecord,
}


def parse_record(data: Any) -> Record:
    """Return the record that plain data describes. Raises ``ValueError`` with one line."""
    if not isinstance(data, dict) or "schema_version" not in data or "kind" not in data:
        raise ValueError("not a record: a record is an object with 'schema_version' and 'kind'")
    version = data["schema_version"]
    # By type first: True would pass for 1.
    if not isinstance(version, int) or isinstance(version, bool):
        raise ValueError(
            f"schema_version: expected a whole number, got {version!r}; restore or remove the record"
        )
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"written with schema version {version}, this program reads up to {SCHEMA_VERSION}; update it"
        )
    kind = data["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known kinds: {', '.join(KINDS)}")
    return checked(KINDS[kind], data)


def to_plain(record: Record) -> dict[str, Any]:
    """Return a record as plain data, fields in the order of the schema, free dictionaries sorted."""
    return record.model_dump(mode="python")
