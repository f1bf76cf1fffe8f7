"""The record of a downstream evaluation: one trained model on the tasks of lm-evaluation-harness.

Scores of single documents are kept as bits, so that two models can be compared document by document long
after their weights are gone. Units: accuracies are shares from 0 to 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from results.jsonio import dumps
from results.parts import BaseRecord, Count, Environment, Free, Moment, Name, Part, Text


def pack_bits(values: Sequence[bool]) -> str:
    """Return the values as hexadecimal digits, four to a digit, the first in the highest bit, zeros last."""
    text = "".join("1" if value else "0" for value in values)
    text += "0" * (-len(text) % 4)
    return "".join(f"{int(text[i : i + 4], 2):x}" for i in range(0, len(text), 4))


def unpack_bits(digits: str, count: int) -> list[bool]:
    """Return the ``count`` values that :func:`pack_bits` packed.

    Raises ``ValueError`` for digits that are not hexadecimal, too few or too many, or with bits set after
    the last value.
    """
    if len(digits) != -(-count // 4) or any(digit not in "0123456789abcdef" for digit in digits):
        raise ValueError(f"{count} values need {-(-count // 4)} hexadecimal digits, got {digits[:40]!r}")
    bits = "".join(f"{int(digit, 16):04b}" for digit in digits)
    if "1" in bits[count:]:
        raise ValueError(f"bits are set after the last of {count} values")
    return [bit == "1" for bit in bits[:count]]


class CheckpointFacts(Part):
    """Which model was evaluated.

    ``weights_sha256`` covers names, shapes, dtypes and bits of all parameters: a checkpoint and what was
    exported from it have the same. The hashes of the config are those of the training run's record; they
    and the run's id are ``None`` for a model that comes without its history.
    """

    weights_sha256: Text
    run_id: str | None = None
    experiment: str | None = None
    variant: Text
    attention: Free = Field(default_factory=dict)
    optimizer: str | None = None
    seed: int | None = None
    step: Count | None = None
    config_hash: str | None = None
    pair_hash: str | None = None
    cell_hash: str | None = None
    data_fingerprint: str | None = None
    tokenizer: Text
    vocab_size: Count
    max_seq_len: Count
    parameters: Count


class TaskResult(Part):
    """One task's scores over its first ``rows`` of ``rows_available`` documents.

    ``stderr`` is the harness's own. ``items`` keeps, per metric that is right or wrong for each document,
    the documents' scores as :func:`pack_bits` writes them; ``documents_sha256`` is the hash of the documents
    in order, so two results with the same one speak of the same rows. ``primary_metric`` is what the
    paper's table shows. ``cut_contexts`` counts requests whose context did not fit the model and was cut
    from the left, ``split_continuations`` those whose continuation alone did not.
    """

    rows: Count
    rows_available: Count
    fewshot: Count = 0
    version: str | None = None
    primary_metric: Text
    higher_is_better: bool = True
    metrics: dict[str, float]
    stderr: dict[str, float | None]
    items: dict[str, str] = Field(default_factory=dict)
    documents_sha256: Text
    requests: Count
    cut_contexts: Count = 0
    split_continuations: Count = 0
    extra: Free = Field(default_factory=dict)

    @field_validator("metrics", "stderr", "items")
    @classmethod
    def _ordered(cls, value: dict) -> dict:
        return dict(sorted(value.items()))

    @model_validator(mode="after")
    def _consistent(self) -> TaskResult:
        if self.primary_metric not in self.metrics:
            known = ", ".join(self.metrics) or "none"
            raise ValueError(f"primary_metric {self.primary_metric!r} is not among the metrics ({known})")
        if self.rows > self.rows_available:
            raise ValueError(f"{self.rows} rows of {self.rows_available} available; correct the counts")
        for name, digits in self.items.items():
            right = sum(unpack_bits(digits, self.rows))
            score = self.metrics.get(name)
            if score is None or abs(score * self.rows - right) > 1e-6 * max(1, self.rows):
                raise ValueError(
                    f"items of {name}: {right} of {self.rows} are right, the metric says {score}"
                )
        return self

    def correct(self, metric: str | None = None) -> list[bool] | None:
        """Return whether each document was right by a metric (the primary one), ``None`` if not kept."""
        digits = self.items.get(metric or self.primary_metric)
        return None if digits is None else unpack_bits(digits, self.rows)


class EvalRecord(BaseRecord):
    """One evaluation: ``name`` is the suite, ``limit`` the most documents of a task (``None``: all)."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["eval"] = "eval"
    run_id: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,199})?$")] = ""
    name: Name
    harness_version: Text
    limit: Count | None = None
    checkpoint: CheckpointFacts
    tasks: dict[str, TaskResult]
    environment: Environment
    seconds: Annotated[float, Field(ge=0.0)]
    started_at: Moment
    finished_at: Moment
    extra: Free = Field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        """Mean of the tasks' primary metrics; ``None`` where one of them is not a share that grows."""
        results = self.tasks.values()
        if not results or not all(result.higher_is_better for result in results):
            return None
        return sum(result.metrics[result.primary_metric] for result in results) / len(results)

    @model_validator(mode="after")
    def _consistent(self) -> EvalRecord:
        if not self.tasks:
            raise ValueError("no tasks; an evaluation has at least one")
        self._check_times(self.started_at, self.finished_at)
        if not self.run_id:
            # The same tasks on the same model and kind of machine replace their record.
            where = [self.environment.device.partition(":")[0], self.environment.precision]
            what = [self.name, sorted(self.tasks), self.limit, self.checkpoint.weights_sha256, where]
            digest = hashlib.sha256(dumps(what).encode()).hexdigest()[:8]
            model = self.checkpoint.run_id or self.checkpoint.variant
            # A frozen model is filled in past its own guard, here at its making and nowhere else.
            self.__dict__["run_id"] = f"{f'eval-{self.name}-{model}'[:190]}-{digest}"
        return self
