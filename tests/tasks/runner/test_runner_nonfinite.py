"""A loss or gradient that is not finite stops the run before the update, and the record says so."""

import math
from typing import Any

import pytest
import torch

from results.store import read_record
from tasks.runner import cli
from tasks.runner.loop import Trainer
from tasks.text.task import TextTask

STEP = 4  # the step that goes wrong


def poison(patch: pytest.MonkeyPatch, what: str) -> dict[str, Any]:
    """Spoil the loss or only the gradient at STEP; return what is seen of the weights at each step."""
    seen: dict[str, Any] = {"step": 0, "weights": []}
    loss, update = TextTask.loss, Trainer.update

    def spoilt(task: TextTask, model: Any, batch: Any) -> torch.Tensor:
        value = loss(task, model, batch)
        if seen["step"] != STEP or not model.training:
            return value
        if what == "loss":
            return value * math.nan
        # 0 * d sqrt(0) is not a number, while the loss stays as it is.
        return value + (next(model.parameters()) * 0).sqrt().sum()

    def watched(trainer: Trainer) -> Any:
        seen["step"] = trainer.step + 1
        seen["trainer"] = trainer
        seen["weights"].append([p.detach().clone() for p in trainer.plain_model.parameters()])
        return update(trainer)

    patch.setattr(TextTask, "loss", spoilt)
    patch.setattr(Trainer, "update", watched)
    return seen


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_run_stops_before_the_update(
    lab: Any, monkeypatch: pytest.MonkeyPatch, what: str, optimizer: str
) -> None:
    seen = poison(monkeypatch, what)
    outcome = lab.train(f"optimizer={optimizer}", "loop.clip_norm=1.0")
    assert outcome.exit_status == 1
    assert len(seen["weights"]) == STEP
    after = list(seen["trainer"].plain_model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(after, seen["weights"][-1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(after, seen["weights"][-2], strict=True))
    assert all(torch.isfinite(parameter).all() for parameter in after)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_record_says_step_loss_and_gradient_norm(
    lab: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    poison(monkeypatch, what)
    record = read_record(lab.train("loop.clip_norm=0").record_path)
    assert record.status == "failed"
    assert record.reason.startswith(f"step {STEP}: loss ")
    assert "gradient norm nan; stopped before the update" in record.reason
    assert ("loss nan" in record.reason) == (what == "loss")
    assert record.curves["train"].step == [1, 2, 3]
    assert record.data.samples_seen == 3 * 4


def test_command_line_exits_with_one(lab: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    poison(monkeypatch, "loss")
    assert cli.main(["run", "text/tiny", *lab.overrides()]) == 1
    printed = capsys.readouterr()
    assert f"failed, step {STEP}: loss nan" in printed.out
    assert "Traceback" not in printed.out + printed.err


def test_failed_run_never_replaces_the_record_of_a_completed_one(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = lab.train()
    before = good.record_path.read_bytes()
    poison(monkeypatch, "loss")
    bad = lab.train(fresh=True)
    assert bad.record.status == "failed"
    assert good.record_path.read_bytes() == before
    assert bad.record_path != good.record_path
    assert read_record(bad.record_path).status == "failed"


def test_completed_run_replaces_the_record_of_a_failed_one(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        poison(patch, "loss")
        bad = lab.train()
    assert read_record(bad.record_path).status == "failed"
    good = lab.train()
    assert good.record_path == bad.record_path
    assert read_record(good.record_path).status == "completed"


def test_an_unforeseen_error_is_recorded_and_raised(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(trainer: Trainer) -> Any:
        raise ArithmeticError("seven is not eight\nsecond line")

    monkeypatch.setattr(Trainer, "update", broken)
    with pytest.raises(ArithmeticError):
        lab.train()
    (path,) = (lab.root / "records").iterdir()
    record = read_record(path)
    assert (record.status, record.reason) == ("failed", "ArithmeticError: seven is not eight")
