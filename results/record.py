"""What a run writes about itself: one record, one schema, nothing to be parsed back out of logs.

Two kinds exist. :class:`RunRecord` is a training run, :class:`BenchRecord` a benchmark. Both are strict: an
unknown key, a wrong type, curves of unequal length or a time without a zone is an error when the record is
made, so that what stands in ``results/runs`` can be trusted later. What a task wants to keep beyond the named
fields goes into the ``extra`` dictionaries.

Units: times in seconds, memory in bytes, losses in nats per token, ``bits_per_byte`` in bits per byte.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from results.jsonio import dumps, plain
from results.messages import one_line

SCHEMA_VERSION = 1
STATUSES = ("running", "completed", "failed", "interrupted")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Free = Annotated[dict[str, Any], BeforeValidator(lambda value: plain(value))]


def utc_now() -> str:
    """Return the present time as records write it: ISO 8601, UTC, whole microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _utc(value: str) -> str:
    try:
        offset = datetime.fromisoformat(value).utcoffset()
    except ValueError:
        raise ValueError(f"{value!r} is not an ISO 8601 time; use utc_now()") from None
    if offset != timedelta(0):
        raise ValueError(f"{value!r} is not in UTC; use utc_now()")
    return value


Moment = Annotated[str, BeforeValidator(_utc)]


class _Part(BaseModel):
    """Strict base: no unknown keys, no coercion."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Environment(_Part):
    """Where and with what a run was made. ``precision_reason`` says why ``auto`` chose this precision."""

    python: Text
    platform: Text
    cpu: str
    threads: Count
    versions: dict[str, str]
    git_commit: str | None = None
    git_dirty: bool | None = None
    device: Text
    device_name: str | None = None
    precision: Text
    precision_reason: str | None = None
    attention_backend: str | None = None
    compile: bool | str = False
    extra: Free = Field(default_factory=dict)

    @field_validator("versions")
    @classmethod
    def _sorted(cls, value: dict[str, str]) -> dict[str, str]:
        return dict(sorted(value.items()))


class ModelFacts(_Part):
    """Size and starting point of the model.

    ``initial_weights_sha256`` covers the parameters that all variants share, ``variant_weights_sha256`` those
    that a variant adds (learned strength, gains); two runs are a pair only when the former are equal.
    """

    parameters: Count
    parameters_non_embedding: Count | None = None
    initial_weights_sha256: Text
    variant_weights_sha256: str | None = None
    extra: Free = Field(default_factory=dict)


class DataFacts(_Part):
    """What was trained on. ``batches_sha256`` is the running hash of every training batch, in order."""

    name: Text
    fingerprint: Text
    batches_sha256: str | None = None
    tokens_seen: Count | None = None
    samples_seen: Count | None = None
    extra: Free = Field(default_factory=dict)


class Curve(BaseModel):
    """Values over steps: ``step`` strictly increasing, every other series (any name) as long as ``step``."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, list[float]] = Field(init=False)

    step: list[Count]

    @model_validator(mode="after")
    def _even(self) -> Curve:
        for earlier, later in zip(self.step, self.step[1:], strict=False):
            if later <= earlier:
                raise ValueError(f"step must increase, but {later} follows {earlier}")
        for name, values in (self.__pydantic_extra__ or {}).items():
            if len(values) != len(self.step):
                raise ValueError(f"{name} has {len(values)} values for {len(self.step)} steps; give one each")
        return self

    def names(self) -> list[str]:
        """Names of the series beside ``step``."""
        return list(self.__pydantic_extra__ or {})

    def __contains__(self, name: str) -> bool:
        return name == "step" or name in (self.__pydantic_extra__ or {})

    def __getitem__(self, name: str) -> list[float] | list[int]:
        return self.step if name == "step" else (self.__pydantic_extra__ or {})[name]


class Throughput(_Part):
    """Speed of this run's own clock: informative only, since overhead is measured by interleaved benchmarks.

    ``tokens_per_second`` and ``samples_per_second`` are medians over the steps after warm-up.
    """

    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    seconds_training: float | None = None
    seconds_evaluation: float | None = None
    extra: Free = Field(default_factory=dict)


def _dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _dumped(item) for key, item in value.items()}
    return value


class _Record(_Part):
    schema_version: Literal[1] = SCHEMA_VERSION

    @property
    def file_name(self) -> str:
        """Name of the file this record is stored under."""
        return f"{self.run_id}.json"  # type: ignore[attr-defined]

    def updated(self, **changes: Any) -> Self:
        """Return a copy with ``changes``, checked as a whole. Raises ``ValueError`` with one line.

        Nested parts may be given as dictionaries or as the part itself.
        """
        return parse_record(self.model_dump() | {name: _dumped(value) for name, value in changes.items()})

    def _check_times(self, started: str, finished: str | None) -> None:
        if finished is not None and datetime.fromisoformat(finished) < datetime.fromisoformat(started):
            # Clocks do jump; a record that claims to end before it began would poison every duration.
            raise ValueError(f"finished_at {finished} lies before started_at {started}; use the later one")


class RunRecord(_Record):
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


class BenchRecord(_Record):
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


KINDS: dict[str, type[RunRecord] | type[BenchRecord]] = {"train": RunRecord, "bench": BenchRecord}
Record = RunRecord | BenchRecord


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
    try:
        return KINDS[kind].model_validate(data)
    except ValidationError as error:
        raise ValueError(one_line(error, KINDS[kind])) from None


def to_plain(record: Record) -> dict[str, Any]:
    """Return a record as plain data, fields in the order of the schema, free dictionaries sorted."""
    return record.model_dump(mode="python")
