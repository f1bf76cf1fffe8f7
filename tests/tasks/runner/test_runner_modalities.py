"""Every task goes through the one loop: it trains, stops, resumes bit for bit, and leaves a whole record."""

from pathlib import Path

import pytest
import torch

from results.record import RunRecord
from tasks.runner import checkpoint
from tasks.runner.config.compose import load_config
from tasks.runner.loop import Trainer
from tasks.runner.probing import probe_checkpoint
from tasks.runner.progress import Silent
from tasks.runner.training import Outcome, train
from tasks.speech import synthetic

VISION = ("model.width=16", "model.depth=2", "model.n_heads=2")
SPEECH = ("model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.dropout=0.1")
# experiment -> overrides that make it small
SMALL = {
    "vision/digits": (
        "model.width=16",
        "model.depth=2",
        "model.n_heads=2",
        "model.dropout=0.1",
        "data.augment=shift",
    ),
    "speech/words": (*SPEECH, "data.time_masks=1", "data.noise_db=5.0"),
    "speech/sentences": (*SPEECH, "model.beam=2", "output.sample_bytes=100"),
}
COMMON = (
    "loop.max_steps=4", "loop.warmup_steps=1", "loop.global_batch=6", "loop.micro_batch=4",
    "loop.eval_every=2", "loop.eval_samples=12", "loop.checkpoint_every=0", "loop.log_every=1",
    "loop.threads=1", "loop.precision=float32", "output.tensorboard=false", "output.progress=none",
)  # fmt: skip
CASES = [(name, "adamw") for name in SMALL] + [("vision/digits", "muon"), ("speech/words", "muon")]


@pytest.fixture(scope="module", autouse=True)
def _few_utterances(tmp_path_factory: pytest.TempPathFactory):
    """Synthetic speech of a few utterances, in a cache of its own."""
    patch = pytest.MonkeyPatch()
    place = tmp_path_factory.mktemp("cache")
    patch.setattr(synthetic, "cache_root", lambda: place)
    patch.setitem(synthetic.RECIPES, "words", synthetic.Recipe("words", 76, 38))
    patch.setitem(synthetic.RECIPES, "sentences", synthetic.Recipe("sentences", 24, 12))
    yield
    patch.undo()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def run(root: Path, experiment: str, *overrides: str) -> Outcome:
    places = (f"output.runs={root / 'runs'}", f"output.records={root / 'records'}")
    config = load_config(experiment, (*SMALL[experiment], *COMMON, *places, *overrides))
    return train(config, Silent())


@pytest.mark.parametrize(("experiment", "optimizer"), CASES)
def test_a_stopped_run_of_any_task_resumes_bit_for_bit(tmp_path, monkeypatch, experiment, optimizer):
    variant = ("attention=xsa_learned", f"optimizer={optimizer}")
    whole = run(tmp_path / "whole", experiment, *variant)
    update = Trainer.update

    def stopped(trainer: Trainer):
        if trainer.step == 1:
            trainer.stop_signal = 15
        return update(trainer)

    monkeypatch.setattr(Trainer, "update", stopped)
    first = run(tmp_path / "parts", experiment, *variant)
    assert (first.record.status, first.exit_status) == ("interrupted", 143)
    monkeypatch.setattr(Trainer, "update", update)
    second = run(tmp_path / "parts", experiment, *variant)
    assert second.record.metrics == whole.record.metrics
    assert second.record.data == whole.record.data
    if optimizer == "adamw":
        probed = probe_checkpoint(str(second.run_directory), Silent(), samples=3, batch=2, threads=1)
        assert [row["layer"] for row in probed.rows] == [0, 1]
        assert all(row["tokens"] > 0 and -1 <= row["cosine_output_value"] <= 1 for row in probed.rows)
    states = [
        checkpoint.load(checkpoint.resolve(str(o.run_directory))).content["model"] for o in (whole, second)
    ]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():  # the mark of a converted layer may be NaN
        assert torch.equal(as_bytes(tensor), as_bytes(states[1][name])), name


@pytest.mark.parametrize("experiment", sorted(SMALL))
def test_variants_of_any_task_are_exact_pairs_with_whole_records(tmp_path, experiment):
    records: dict[str, RunRecord] = {}
    for variant in ("sa", "xsa", "head_norm"):
        records[variant] = run(tmp_path, experiment, f"attention={variant}").record
    plain = records["sa"]
    assert plain.primary_metric in plain.metrics
    assert plain.environment.attention_backend
    for record in records.values():
        assert record.status == "completed"
        assert record.model.initial_weights_sha256 == plain.model.initial_weights_sha256
        assert record.data == plain.data
        assert record.pair_hash == plain.pair_hash
    assert len({record.metrics["validation_loss"] for record in records.values()}) == 3
