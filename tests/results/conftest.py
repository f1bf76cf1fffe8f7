"""Synthetic records for tests: they exist in temporary directories only and describe no run."""

import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from results.record import BenchRecord, RunRecord

START = "2024-01-02T03:04:05.000000+00:00"
END = "2024-01-02T03:06:05.000000+00:00"


def digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def environment(**changes: Any) -> dict[str, Any]:
    return {
        "python": "3.11.9",
        "platform": "Linux",
        "cpu": "made-up CPU",
        "threads": 2,
        "versions": {"torch": "2.10.0", "numpy": "2.4.0"},
        "git_commit": "0123456789abcdef",
        "git_dirty": False,
        "device": "cpu",
        "precision": "float32",
        "precision_reason": "no fast bfloat16",
        "attention_backend": "sdpa",
        "compile": False,
    } | changes


def made_up_run(
    variant: str = "sa",
    seed: int = 0,
    *,
    loss: float = 1.4,
    experiment: str = "text/quick",
    optimizer: str = "adamw",
    attention: dict[str, Any] | None = None,
    loop: dict[str, Any] | None = None,
    points: int = 60,
    evaluations: int = 10,
    **changes: Any,
) -> RunRecord:
    """Return a completed run whose curves fall from ln 256 to about ``loss``."""
    attention = {"variant": variant, "strength": 1.0, "backend": "auto"} | (attention or {})
    loop = {"max_steps": 10 * points} | (loop or {})
    config = {"experiment": experiment, "seed": seed, "optimizer": {"name": optimizer}, "loop": loop}
    identity = digest(config, attention)
    # Everything random hangs on the seed alone, so that pairs share their noise as real pairs do.
    noise = random.Random(seed)

    def at(step: int, spread: float) -> float:
        fall = math.exp(-4.0 * step / (10 * points))
        return loss + (math.log(256) - loss) * fall + noise.gauss(0.0, spread)

    train_steps = [10 * (i + 1) for i in range(points)]
    stride = max(1, points // max(1, evaluations))
    validation_steps = train_steps[stride - 1 :: stride] if evaluations else []
    train = [at(step, 0.03) for step in train_steps]
    validation = [at(step, 0.004) for step in validation_steps]
    final = validation[-1] if validation else loss
    fields: dict[str, Any] = {
        "run_id": f"{experiment.replace('/', '-')}_{variant}_{optimizer}_s{seed}_{identity[:8]}",
        "experiment": experiment,
        "task": experiment.partition("/")[0],
        "config": config | {"attention": attention},
        "config_hash": identity[:16],
        "pair_hash": digest(config)[:16],
        "variant": variant,
        "optimizer": optimizer,
        "seed": seed,
        "status": "completed",
        "environment": environment(),
        "model": {
            "parameters": 3_200_000,
            "parameters_non_embedding": 3_100_000,
            "initial_weights_sha256": digest("weights", seed),
        },
        "data": {
            "name": "made-up",
            "fingerprint": digest("data"),
            "batches_sha256": digest("batches", seed, loop),
            "tokens_seen": 8192 * len(train_steps),
        },
        "curves": {
            "train": {
                "step": train_steps,
                "loss": train,
                "grad_norm": [1.0] * points,
                "lr": [1e-3] * points,
                "tokens_per_second": [20_000.0] * points,
            },
            "validation": {
                "step": validation_steps,
                "loss": validation,
                "bits_per_byte": [value / math.log(2) for value in validation],
            },
        },
        "metrics": {"validation_loss": final, "validation_bits_per_byte": final / math.log(2)},
        "primary_metric": "validation_bits_per_byte",
        "throughput": {"tokens_per_second": 20_123.4, "seconds_training": 60.0},
        "peak_memory_bytes": 10**9,
        "sample": "The made-up text\nof a model.",
        "started_at": START,
        "finished_at": END,
    }
    return RunRecord.model_validate(fields | changes)


def made_up_bench(**changes: Any) -> BenchRecord:
    fields: dict[str, Any] = {
        "name": "attention",
        "config": {"shape": {"batch": 4, "heads": 8}},
        "environment": environment(),
        "rows": [{"length": 512, "ratio": 1.0123}, {"length": 1024, "ratio": 1.0001, "note": "a|b"}],
        "summary": {"median_ratio": 1.0062},
        "started_at": START,
        "finished_at": END,
    }
    return BenchRecord.model_validate(fields | changes)


@pytest.fixture(scope="session")
def make_run() -> Callable[..., RunRecord]:
    """Return the maker of training records."""
    return made_up_run


@pytest.fixture(scope="session")
def make_bench() -> Callable[..., BenchRecord]:
    """Return the maker of benchmark records."""
    return made_up_bench
