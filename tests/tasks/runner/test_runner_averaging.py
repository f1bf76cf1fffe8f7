"""Averaged weights: the recursion, what is evaluated, and what a checkpoint hands on."""

import pytest
import torch

from tasks.errors import UserError
from tasks.runner import checkpoint
from tasks.runner.averaging import averaged, trained_weights
from tasks.runner.loop import Trainer

DECAY = 0.75


def test_the_average_follows_its_recursion_and_is_what_is_evaluated(lab, monkeypatch):
    seen, evaluated = [], []
    update, evaluate = Trainer.update, Trainer.evaluate

    def watched(trainer):
        if not seen:
            seen.append([p.detach().double().clone() for p in trainer.plain_model.parameters()])
        result = update(trainer)
        seen.append([p.detach().double().clone() for p in trainer.plain_model.parameters()])
        return result

    def last(trainer):
        evaluated[:] = [p.detach().double().clone() for p in trainer.trained_model.parameters()]
        return evaluate(trainer)

    monkeypatch.setattr(Trainer, "update", watched)
    monkeypatch.setattr(Trainer, "evaluate", last)
    outcome = lab.train(f"loop.ema={DECAY}", "loop.max_steps=4")
    expected = seen[1]  # torch's average starts at the first weights it is shown
    for weights in seen[2:]:
        expected = [DECAY * old + (1 - DECAY) * new for old, new in zip(expected, weights, strict=True)]
    for mine, theirs in zip(expected, evaluated, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    content = checkpoint.load(checkpoint.resolve(str(outcome.run_directory))).content
    kept = trained_weights(content)
    assert kept.keys() == content["model"].keys()
    name = next(iter(kept))
    assert torch.equal(kept[name].double(), evaluated[0])
    assert not torch.equal(kept[name], content["model"][name])


def test_a_stopped_run_goes_on_with_its_average(lab, monkeypatch):
    whole = lab.at("whole").train("loop.ema=0.9").record
    update = Trainer.update

    def stopped(trainer):
        trainer.stop_signal = 15 if trainer.step == 2 else None
        return update(trainer)

    monkeypatch.setattr(Trainer, "update", stopped)
    assert lab.train("loop.ema=0.9").record.status == "interrupted"
    monkeypatch.setattr(Trainer, "update", update)
    assert lab.train("loop.ema=0.9").record.metrics == whole.metrics
    assert lab.at("plain").train().record.metrics != whole.metrics


def test_nothing_is_kept_where_nothing_is_averaged(lab):
    assert averaged(torch.nn.Linear(2, 2), 0.0) is None
    assert trained_weights({"model": {"weight": 1}}) == {"weight": 1}
    with pytest.raises(UserError, match=r"loop.ema"):
        lab.config("loop.ema=1.0")
