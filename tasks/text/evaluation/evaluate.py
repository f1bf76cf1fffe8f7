"""One model through lm-evaluation-harness: task by task, scores, standard errors and single documents."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import math
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tasks.errors import UserError
from tasks.text.evaluation.journal import Journal
from tasks.text.evaluation.tasks import load_tasks, offline, primary_metric
from tasks.text.trained import Trained

BOOTSTRAPS = 1000  # resamples for standard errors that have no formula, such as a perplexity's
PLAIN_FILTER = "none"  # the harness's name for answers taken as they are


@dataclass(frozen=True)
class TaskScores:
    """What came out of one task.

    Attributes:
        rows: documents that were evaluated, of `available`.
        metrics, stderr: by the harness's metric name; `name@filter` where answers were filtered first.
        correct: per metric that is right or wrong for a document, whether each was right, in order.
        documents_sha256: of the documents in order, as the harness hashes them.
        requests, cut_contexts, split_continuations: see `Counts`.
    """

    rows: int
    available: int
    fewshot: int
    version: str
    primary: str
    higher_is_better: bool
    metrics: dict[str, float]
    stderr: dict[str, float | None]
    correct: dict[str, list[bool]]
    documents_sha256: str
    requests: int
    cut_contexts: int
    split_continuations: int


def harness_version() -> str:
    """Return the version of the installed lm-evaluation-harness.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("the package lm-eval is not installed; install requirements.lock") from None


def evaluate_tasks(
    trained: Trained,
    names: Sequence[str],
    *,
    data_dir: str | None = None,
    limit: int | None = None,
    budget: int | None = None,
    seed: int = 0,
    advance: Callable[[str, int, int], None] = lambda what, done, total: None,
    journal: Journal | None = None,
) -> dict[str, TaskScores]:
    """Return the scores of every task, by name (of a group: of its tasks).

    Args:
        trained: the model on its device.
        names: the harness's task names.
        data_dir, limit: local documents (see `load_tasks`), and how many of each task, the first ones.
        budget: positions of a batch, see `Scorer`.
        seed: of drawn continuations.
        advance: is told task and what is done, how much of it and of how much.
        journal: keeps scores as they come, so that a stopped evaluation goes on.

    Raises:
        UserError: an unknown task, no data for it, or one that asks for what a language model has not.
    """
    if data_dir is not None:
        offline()  # before the harness is imported, which imports the hub's client
    quiet()
    from tasks.text.evaluation.harness import HarnessModel

    loaded = load_tasks(names, data_dir)["tasks"]
    scores = {}
    for name, task in loaded.items():
        model = HarnessModel(trained, budget, seed, partial(_told, advance, name), journal)
        scores[name] = _one_task(model, name, task, limit)
    return scores


def _told(advance: Callable[[str, int, int], None], name: str, what: str, done: int, total: int) -> None:
    advance(f"{name}, {what}", done, total)


def quiet() -> None:
    """Keep the harness's bars and notices off the terminal; its errors stay."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # bootstraps in this process
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import lm_eval.api.metrics
    from datasets import disable_progress_bars

    disable_progress_bars()
    lm_eval.api.metrics.print = lambda *words, **options: None  # it announces every bootstrap


def _one_task(model: Any, name: str, task: Any, limit: int | None) -> TaskScores:
    from lm_eval.evaluator import evaluate

    if task.config.num_fewshot is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=1234)  # the harness's own; without it, it warns
    try:
        found = evaluate(lm=model, task_dict={"tasks": {name: task}}, limit=limit, bootstrap_iters=BOOTSTRAPS)
    except Exception as error:
        if isinstance(error, UserError) or not (isinstance(error, ValueError) or _of_documents(error)):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise UserError(
            f"task {name}: the harness cannot use its documents ({reason}); expected the columns and values "
            "of its data set on the hub"
        ) from error
    metrics, stderr = _numbers(found["results"][name])
    primary = primary_metric(name, list(metrics))
    better = found["higher_is_better"].get(name, {}).get(primary.partition("@")[0])
    samples = found["samples"][name]
    return TaskScores(
        rows=found["n-samples"][name]["effective"],
        available=found["n-samples"][name]["original"],
        fewshot=int(found["n-shot"].get(name) or 0),
        version=str(found["versions"].get(name)),
        primary=primary,
        higher_is_better=better is not False,
        metrics=metrics,
        stderr=stderr,
        correct={metric: bits for metric in metrics if (bits := _correct(samples, metric)) is not None},
        documents_sha256=_documents(samples),
        requests=model.counts.requests or len(samples),
        cut_contexts=model.counts.cut_contexts,
        split_continuations=model.counts.split_continuations,
    )


def _of_documents(error: BaseException) -> bool:
    """Tell whether an error came from what the harness does with documents, not from our adapter."""
    from tasks.text.evaluation import harness

    frames = traceback.walk_tb(error.__traceback__)
    return all(frame.f_code.co_filename != harness.__file__ for frame, _ in frames)


def _name(key: str) -> str:
    metric, _, chosen = key.partition(",")
    return metric if chosen in ("", PLAIN_FILTER) else f"{metric}@{chosen}"


def _numbers(results: dict[str, Any]) -> tuple[dict[str, float], dict[str, float | None]]:
    """Return metrics and standard errors from the harness's flat keys `acc,none`, `acc_stderr,none`."""
    metrics: dict[str, float] = {}
    stderr: dict[str, float | None] = {}
    for key, value in results.items():
        metric, comma, chosen = key.partition(",")
        if not comma or (isinstance(value, str) and not metric.endswith("_stderr")):
            continue
        if metric.endswith("_stderr"):
            known = isinstance(value, int | float) and math.isfinite(value)  # the harness writes "N/A"
            stderr[_name(f"{metric.removesuffix('_stderr')},{chosen}")] = float(value) if known else None
        else:
            metrics[_name(key)] = float(value)
    return metrics, {name: stderr.get(name) for name in metrics}


def _of_filter(samples: Sequence[dict[str, Any]], chosen: str) -> list[dict[str, Any]]:
    return sorted((s for s in samples if s["filter"] == chosen), key=lambda sample: sample["doc_id"])


def _correct(samples: Sequence[dict[str, Any]], name: str) -> list[bool] | None:
    """Return whether each document was right; None for a metric of another kind, such as a perplexity."""
    metric, _, chosen = name.partition("@")
    values = [sample.get(metric) for sample in _of_filter(samples, chosen or PLAIN_FILTER)]
    if not values or any(value not in (0, 1) for value in values):  # True and 1.0 are 1
        return None
    return [bool(value) for value in values]


def _documents(samples: Sequence[dict[str, Any]]) -> str:
    chosen = samples[0]["filter"]
    hashes = [sample["doc_hash"] for sample in _of_filter(samples, chosen)]
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()
