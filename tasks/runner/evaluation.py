"""From a checkpoint to the record of its downstream evaluation."""

import argparse
import time
from typing import Any

import torch

from results.eval_record import CheckpointFacts, EvalRecord, TaskResult, pack_bits
from results.evaluations import score_table
from results.record import utc_now
from tasks.runner.config.schema import LoopConfig
from tasks.runner.device import Device, choose_device
from tasks.runner.progress import make_display
from tasks.runner.recording import attention_backend, environment
from tasks.runner.trained import load_trained
from tasks.text.evaluation.evaluate import TaskScores, evaluate_tasks, harness_version
from tasks.text.evaluation.tasks import task_names
from tasks.text.trained import Trained

__all__ = ["evaluate", "score_table"]


def evaluate(options: argparse.Namespace) -> EvalRecord:
    """Evaluate as the options of `./xsa eval` say.

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
    started, clock = utc_now(), time.perf_counter()
    scores = _with_progress(trained, tasks, device, options)
    return EvalRecord(
        name=name,
        harness_version=version,
        limit=options.limit,
        checkpoint=facts,
        tasks={task: task_result(found) for task, found in scores.items()},
        environment=environment(
            device, attention_backend(trained.model, device, trained.model.config.max_seq_len), False
        ),
        seconds=time.perf_counter() - clock,
        started_at=started,
        finished_at=max(utc_now(), started),
        extra={"data": "local files" if options.data_dir else "Hugging Face hub", "seed": options.seed},
    )


def _with_progress(
    trained: Trained, tasks: list[str], device: Device, options: argparse.Namespace
) -> dict[str, TaskScores]:
    with make_display("auto") as display, device.autocast(), torch.no_grad():
        shown: dict[str, Any] = {"what": None}
        with display.work("evaluation") as report:

            def advance(what: str, done: int, total: int) -> None:
                shown["what"] = what
                report(what, done / max(1, total))

            return evaluate_tasks(
                trained,
                tasks,
                data_dir=options.data_dir,
                limit=options.limit,
                budget=options.batch_tokens,
                seed=options.seed,
                advance=advance,
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
