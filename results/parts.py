"""What records are made of: strict parts that every kind of record shares.

Units: times in seconds, memory in bytes, losses in nats per token, ``bits_per_byte`` in bits per byte.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from results.jsonio import plain
from results.messages import one_line

SCHEMA_VERSION = 1

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


class Part(BaseModel):
    """Strict base: no unknown keys, no coercion."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class Environment(Part):
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


class ModelFacts(Part):
    """Size and starting point of the model.

    ``initial_weights_sha256`` covers the parameters that all variants share, ``variant_weights_sha256`` those
    that a variant adds (learned strength, gains); two runs are a pair only when the former are equal.
    """

    parameters: Count
    parameters_non_embedding: Count | None = None
    initial_weights_sha256: Text
    variant_weights_sha256: str | None = None
    extra: Free = Field(default_factory=dict)


class DataFacts(Part):
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


class Throughput(Part):
    """Speed of this run's own clock: informative only, since overhead is measured by interleaved benchmarks.

    ``tokens_per_second`` and ``samples_per_second`` are medians over the steps after warm-up.
    """

    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    seconds_training: float | None = None
    seconds_evaluation: float | None = None
    extra: Free = Field(default_factory=dict)


Kind = TypeVar("Kind", bound=BaseModel)


def checked(kind: type[Kind], data: Any) -> Kind:
    """Return the model that plain data describes. Raises ``ValueError`` with one line."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ValueError(one_line(error, kind)) from None


def _dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _dumped(item) for key, item in value.items()}
    return value


class BaseRecord(Part):
    """What every kind of record has: a schema version, a file name, checked changes."""

    schema_version: Literal[1] = SCHEMA_VERSION

    @property
    def file_name(self) -> str:
        """Name of the file this record is stored under."""
        return f"{self.run_id}.json"  # type: ignore[attr-defined]

    def updated(self, **changes: Any) -> Self:
        """Return a copy with ``changes``, checked as a whole. Raises ``ValueError`` with one line.

        Nested parts may be given as dictionaries or as the part itself.
        """
        data = self.model_dump() | {name: _dumped(value) for name, value in changes.items()}
        return checked(type(self), data)

    def _check_times(self, started: str, finished: str | None) -> None:
        if finished is not None and datetime.fromisoformat(finished) < datetime.fromisoformat(started):
            # Clocks do jump; a record that claims to end before it began would poison every duration.
            raise ValueError(f"finished_at {finished} lies before started_at {started}; use the later one")
