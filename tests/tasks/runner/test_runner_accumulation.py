"""One update is the same however the global batch is cut, over micro-batches or over processes."""

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from optimizers.build import build_optimizer
from results.store import read_record
from tasks.errors import UserError
from tasks.runner.config.schema import LoopConfig
from tasks.runner.device import Device
from tasks.runner.distributed import Ranks
from tasks.runner.loop import Trainer
from tasks.runner.metrics import lines
from tasks.runner.paths import ROOT
from tasks.runner.progress import Silent
from tasks.runner.sharing import Split, split_batch
from tasks.runner.training import open_task

EPS = torch.finfo(torch.float64).eps
CPU = Device(torch.device("cpu"), "cpu", "float64", "asked for", 1)


def trained(lab: Any, *changes: str, steps: int = 2) -> tuple[Trainer, list[tuple[float, float]]]:
    """Make some updates in float64; return the trainer and the loss and gradient norm of each."""
    config = lab.config("loop.precision=float64", "loop.warmup_steps=0", *changes)
    task = open_task(config, Silent())
    model = task.build_model().double()
    optimizer = build_optimizer(model, config.optimizer)
    split = split_batch(config.loop, task.tokens_per_sample, 1)
    trainer = Trainer(config.loop, task, model, model, optimizer, split, CPU, Ranks())
    seen = []
    for _ in range(steps):
        loss, norm, _ = trainer.update()
        trainer.step += 1
        seen.append((loss, norm))
    return trainer, seen


def oracle(
    lab: Any, *changes: str, steps: int = 2
) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """Do the same with plain formulas: mean loss of the whole batch, clip by norm, AdamW by hand."""
    config = lab.config("loop.precision=float64", "loop.warmup_steps=0", *changes)
    task = open_task(config, Silent())
    model = task.build_model().double().train()
    stream = task.stream(0, 1)
    optimizer, loop = config.optimizer, config.loop
    named = dict(model.named_parameters())
    first = {name: torch.zeros_like(p) for name, p in named.items()}
    second = {name: torch.zeros_like(p) for name, p in named.items()}
    seen = []
    for step in range(1, steps + 1):
        loss = task.loss(model, stream.next_batch(loop.global_batch))
        gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        scale = min(1.0, loop.clip_norm / (norm + 1e-6)) if loop.clip_norm else 1.0
        progress = (step - 1) / (loop.max_steps - 1)
        floor = loop.final_lr_fraction
        lr = optimizer.lr * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)
        with torch.no_grad():
            for name, p in named.items():
                g = gradients[name] * scale
                first[name] = optimizer.beta1 * first[name] + (1 - optimizer.beta1) * g
                second[name] = optimizer.beta2 * second[name] + (1 - optimizer.beta2) * g * g
                mean = first[name] / (1 - optimizer.beta1**step)
                root = (second[name] / (1 - optimizer.beta2**step)).sqrt()
                if p.ndim >= 2:  # matrices and embeddings decay; norms and strengths do not
                    p.mul_(1 - lr * optimizer.weight_decay)
                p.sub_(lr * mean / (root + optimizer.eps))
        seen.append((loss.item(), norm))
    return named, seen


@pytest.mark.parametrize("micro", [0, 1, 3, 100])
@pytest.mark.parametrize("clip", ["0", "0.05"])
def test_update_is_that_of_plain_formulas_over_the_whole_batch(lab: Any, micro: int, clip: str) -> None:
    changes = ("loop.global_batch=7", f"loop.clip_norm={clip}", "attention=xsa", "optimizer.eps=1e-4")
    trainer, seen = trained(lab, *changes, f"loop.micro_batch={micro}")
    named, wanted = oracle(lab, *changes)
    for (loss, norm), (want_loss, want_norm) in zip(seen, wanted, strict=True):
        assert loss == pytest.approx(want_loss, rel=100 * EPS)
        assert norm == pytest.approx(want_norm, rel=1e4 * EPS)
    for name, parameter in trainer.plain_model.named_parameters():
        # Sums of 7 * 32 tokens in another order; AdamW divides by a root of at least eps = 1e-4.
        torch.testing.assert_close(parameter, named[name], rtol=1e5 * EPS, atol=1e5 * EPS)


def test_pieces_cover_the_batch_with_a_smaller_last_one() -> None:
    assert Split(7, 3).pieces == [3, 3, 1]
    assert Split(6, 3).pieces == [3, 3]
    assert Split(2, 2).pieces == [2]
    for samples in range(1, 20):
        for micro in range(1, samples + 1):
            pieces = Split(samples, micro).pieces
            assert sum(pieces) == samples
            assert max(pieces) <= micro


def loop(**changes: Any) -> LoopConfig:
    return LoopConfig(**{"max_steps": 1, "global_batch": 8, **changes})


def test_tokens_and_samples_are_two_names_of_one_batch() -> None:
    assert split_batch(loop(global_batch=8), 32, 1) == split_batch(
        loop(global_batch=8 * 32, batch_unit="tokens"), 32, 1
    )
    assert split_batch(loop(micro_batch=3), 32, 2) == Split(8, 3, 0, 2)
    assert split_batch(loop(micro_batch=100), 32, 1) == Split(8, 8)


@pytest.mark.parametrize(
    ("changes", "world", "parts"),
    [
        (
            {"global_batch": 100, "batch_unit": "tokens"},
            1,
            ["loop.global_batch: 100 tokens", "multiple", "32"],
        ),
        ({"global_batch": 16, "batch_unit": "tokens"}, 1, ["loop.global_batch: 16 tokens", "multiple", "32"]),
        ({"global_batch": 7}, 8, ["loop.global_batch: 7 samples for 8 processes", "at most 7"]),
    ],
)
def test_a_ragged_batch_is_refused_in_one_line(changes: dict, world: int, parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"loop\.global_batch") as raised:
        split_batch(loop(**changes), 32, world)
    assert [part for part in parts if part not in str(raised.value)] == []
    assert "\n" not in str(raised.value)


def test_a_ragged_batch_is_a_users_mistake_in_a_run(lab: Any) -> None:
    with pytest.raises(UserError, match="multiple"):
        lab.train("loop.batch_unit=tokens", "loop.global_batch=100")
    assert not list((lab.root / "records").iterdir())


def test_two_processes_train_as_one_does(lab: Any) -> None:
    """Under torchrun: the same global batch, so the same losses but for the order of sums."""
    changes = ("loop.global_batch=8", "loop.micro_batch=3", "loop.max_steps=5", "loop.precision=float64")
    alone = lab.at("one").train(*changes)
    together = lab.at("two")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tasks",
    ]
    done = subprocess.run(
        [*command, "run", "text/tiny", *together.overrides(*changes)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (together.root / "runs").iterdir()
    want, got = (
        {
            kind: [line["loss"] for line in lines(path / "metrics.jsonl") if line["kind"] == kind]
            for kind in kinds
        }
        for path, kinds in ((alone.run_directory, ("train", "validation")), (run, ("train", "validation")))
    )
    assert len(want["train"]) == 5
    for kind, values in want.items():
        assert got[kind] == pytest.approx(values, rel=1e6 * EPS)
    (path,) = (together.root / "records").iterdir()
    record = read_record(path)
    assert record.data.samples_seen == 40
    assert record.data.batches_sha256 == alone.record.data.batches_sha256
