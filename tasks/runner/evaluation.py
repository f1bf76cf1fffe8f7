"""From a checkpoint to the record of its downstream evaluation."""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from results.eval_record import CheckpointFacts, EvalRecord, TaskResult, pack_bits
from results.evaluations import score_table
from results.record import Environment, utc_now
from results.store import write_record
from tasks.runner.config.schema import LoopConfig
from tasks.runner.device import Device, choose_device
from tasks.runner.paths import ROOT, trained_path
from tasks.runner.progress import Display, make_display
from tasks.runner.recording import attention_backend, environment
from tasks.runner.trained import load_trained
from tasks.text.evaluation.evaluate import TaskScores, evaluate_tasks, harness_version
from tasks.text.evaluation.journal import Journal, source_digest
from tasks.text.evaluation.tasks import task_names
from tasks.text.files import cache_root, exclusive
from tasks.text.trained import Trained

__all__ = ["evaluate", "score_table"]


def evaluate(options: argparse.Namespace, records: Path) -> tuple[EvalRecord, Path]:
    """Evaluate as the options of `./xsa eval` say, write the record, and return it with its path.

    Scores are kept in the run's folder as they come: stopped and started again, it goes on.

    Raises:
        UserError: a checkpoint, task, data or device that cannot be used.
    """
    version = harness_version()
    name, tasks = task_names(options.tasks)
    device = choose_device(
        LoopConfig(
            max_steps=1,
            global_batch=1,
            device=options.device,
            threads=options.threads,
            precision=options.precision,
        )
    )
    trained = load_trained(options.checkpoint, options.tokenizer)
    facts = checkpoint_facts(trained)
    trained.model.to(device.device, device.master)
    backend = attention_backend(trained.model, device, trained.model.config.max_seq_len)
    where = environment(device, backend, False)
    started, clock = utc_now(), time.perf_counter()
    with make_display("auto") as display, journal_of(options.checkpoint, facts, where, display) as journal:
        scores = _with_progress(trained, tasks, device, options, journal, display)
        record = EvalRecord(
            name=name,
            harness_version=version,
            limit=options.limit,
            checkpoint=facts,
            tasks={task: task_result(found) for task, found in scores.items()},
            environment=where,
            seconds=time.perf_counter() - clock + journal.seconds,
            started_at=started,
            finished_at=max(utc_now(), started),
            extra={"data": "local files" if options.data_dir else "Hugging Face hub", "seed": options.seed},
        )
        path = write_record(record, records)
        journal.remove()
    return record, path


@contextmanager
def journal_of(
    checkpoint: str, facts: CheckpointFacts, where: Environment, display: Display
) -> Iterator[Journal]:
    """Yield the journal of a model on this kind of machine under this code, this process's alone.

    It lies in the run's own folder; for any other model, or a run that cannot be written to, in the cache.
    """
    path = trained_path(checkpoint)
    around = [path, *path.absolute().parents[:2]]  # a run, or a checkpoint in one
    run = next((place for place in around if (place / "checkpoints").is_dir()), None)
    if run is not None and os.access(run, os.W_OK):
        folder = run / "evaluation"
    else:
        folder = cache_root() / "evaluation" / facts.weights_sha256[:16]
    code = source_digest(ROOT / "xsa_core", ROOT / "tasks" / "text")
    device = [where.device.partition(":")[0], where.device_name, where.precision, where.attention_backend]
    what = [facts.weights_sha256, facts.tokenizer, code, device, where.versions.get("torch")]
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    def waiting() -> None:
        display.note("another process evaluates this model; waiting for it to end")

    with exclusive(folder / ".lock", waiting):
        journal = Journal(folder / f"scores-{name}.jsonl")
        if journal.kept:
            display.note(f"going on: {journal.kept} batches are kept from an evaluation that was stopped")
        yield journal


def _with_progress(
    trained: Trained,
    tasks: list[str],
    device: Device,
    options: argparse.Namespace,
    journal: Journal,
    display: Display,
) -> dict[str, TaskScores]:
    with device.autocast(), torch.no_grad(), display.work("evaluation") as report:
        return evaluate_tasks(
            trained,
            tasks,
            data_dir=options.data_dir,
            limit=options.limit,
            budget=options.batch_tokens,
            seed=options.seed,
            advance=lambda what, done, total: report(what, done / max(1, total)),
            journal=journal,
        )


def checkpoint_facts(trained: Trained) -> CheckpointFacts:
    """Return what a record says of a model: its history, its weights' hash, its sizes."""
    known = {key: value for key, value in trained.history.items() if key in CheckpointFacts.model_fields}
    config = trained.model.config
    return CheckpointFacts(
        **{"variant": config.variant, **known},
        weights_sha256=trained.weights_sha256(),
        tokenizer=trained.tokenizer.name,
        vocab_size=config.vocab_size,
        max_seq_len=config.max_seq_len,
        parameters=trained.model.num_parameters(),
    )


def task_result(scores: TaskScores) -> TaskResult:
    """Return one task's scores as the record keeps them."""
    return TaskResult(
        rows=scores.rows,
        rows_available=scores.available,
        fewshot=scores.fewshot,
        version=scores.version,
        primary_metric=scores.primary,
        higher_is_better=scores.higher_is_better,
        metrics=scores.metrics,
        stderr=scores.stderr,
        items={metric: pack_bits(bits) for metric, bits in scores.correct.items()},
        documents_sha256=scores.documents_sha256,
        requests=scores.requests,
        cut_contexts=scores.cut_contexts,
        split_continuations=scores.split_continuations,
    )
