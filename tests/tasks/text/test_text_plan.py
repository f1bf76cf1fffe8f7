"""The model of sizes, operations and memory, held against the decoder itself."""

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

import xsa_core.loss
from tasks.runner.config.compose import load_config
from tasks.text import plan
from tasks.text.task import build_gpt
from xsa_core import initialize

PAPER = {"text/paper_0.7b": 0.68, "text/paper_1.3b": 1.41, "text/paper_2.7b": 2.68}
SHAPES = (
    (),
    ("model.qk_norm=true", "model.n_sinks=3"),
    ("model.bias=true", "model.tie_embeddings=false"),
    ("model.n_kv_heads=1", "model.head_dim=24", "model.mlp_ratio=2.5"),
    ("model.post_embedding_norm=false", "model.bias=true", "model.n_sinks=1"),
)


@pytest.mark.parametrize(("experiment", "billions"), PAPER.items())
def test_the_papers_models_have_the_papers_sizes_outside_the_embedding(experiment, billions):
    config = load_config(experiment)
    with torch.device("meta"):
        model = build_gpt(config, plan.vocabulary_of(config))
    assert round(model.num_parameters(non_embedding=True) / 1e9, 2) == billions
    sizes = plan.sizes_of(config, plan.vocabulary_of(config))
    assert sizes.parameters == model.num_parameters()
    assert sizes.non_embedding == model.num_parameters(non_embedding=True)


@pytest.mark.parametrize("experiment", PAPER)
def test_the_papers_schedule_is_half_a_million_tokens_a_step_for_two_hundred_thousand_steps(experiment):
    config = load_config(experiment)
    assert config.data.seq_len == 2048
    assert config.loop.global_batch == 256 * 2048
    assert config.loop.batch_unit == "tokens"
    assert (config.loop.max_steps, config.loop.warmup_steps) == (200_000, 2_000)
    assert config.loop.final_lr_fraction == 0.1
    assert 2e-4 <= config.optimizer.lr <= 4e-4
    assert config.model.post_embedding_norm


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_parameters_are_those_of_the_model(changes):
    config = load_config("text/tiny", changes)
    model = build_gpt(config, 300)
    sizes = plan.sizes_of(config, 300)
    assert sizes.parameters == model.num_parameters()
    assert sizes.non_embedding == model.num_parameters(non_embedding=True)


@pytest.mark.parametrize("changes", SHAPES[:4:3], ids=str)
def test_operations_are_those_that_torch_counts(changes):
    config = load_config("text/tiny", ("attention.backend=reference", "data.seq_len=48", *changes))
    sizes = plan.sizes_of(config, 300)
    model = build_gpt(config, 300)
    tokens = torch.randint(300, (2, sizes.length))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    matrices, attention = plan.flops_per_token(sizes)  # three times those of the forward
    # The reference multiplies the whole T x T matrix, of which causal attention needs (T + 1) / 2 rows.
    whole = attention * sizes.length / ((sizes.length + 1) / 2)
    assert 3 * counter.get_total_flops() == pytest.approx(tokens.numel() * (matrices + whole), rel=1e-9)


def measured_peak(monkeypatch, config, vocabulary, batch, passes):
    """Live bytes at the peak of one update after the first, by torch's own tracker of storages."""
    # The tracker does not look into a custom operator; the loss is its own Python underneath.
    monkeypatch.setattr(xsa_core.loss, "_sweep", xsa_core.loss._sweep._init_fn)
    model = build_gpt(config, vocabulary)
    initialize(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens, targets = torch.randint(vocabulary, (2, batch, config.data.seq_len))
    half = config.loop.precision == "bfloat16"

    def update(tracker=None):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(passes):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model(tokens, targets)
            loss.backward()
            if tracker is not None:
                tracker.reset_mod_stats()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    update()  # the optimizer's state exists from here on
    tracker = MemTracker()
    tracker.track_external(model, optimizer, tokens, targets)
    with tracker:
        update(tracker)
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("changes", "vocabulary", "batch"),
    [
        # Activations are the most, as in a large model with long samples.
        (("model.n_layers=4", "model.d_model=96", "model.n_heads=9", "model.head_dim=16"), 256, 6),
        # Weights and optimizer are the most, and few tokens.
        (("model.d_model=192", "model.tie_embeddings=false"), 300, 1),
        # The vocabulary is the most.
        (("model.n_heads=4", "model.n_kv_heads=2", "data.seq_len=128"), 20_000, 4),
    ],
    ids=["activations", "weights", "vocabulary"],
)
def test_memory_is_within_fifteen_percent_of_the_measured_peak(
    monkeypatch, changes, vocabulary, batch, passes, precision
):
    config = load_config("text/tiny", (*changes, f"loop.precision={precision}"))
    sizes = plan.sizes_of(config, vocabulary)
    product = 2 if precision == "bfloat16" else 4
    modelled = plan.peak_memory(sizes, batch, product=product, accumulates=passes > 1, strip=plan.STRIP).total
    measured = measured_peak(monkeypatch, config, vocabulary, batch, passes)
    assert modelled == pytest.approx(measured, rel=0.15)


def test_constants_of_the_loss_are_those_of_the_library():
    assert plan.LOSS_BLOCK == xsa_core.loss.BLOCK_BYTES
    assert plan.STRIP == xsa_core.loss.STRIP_BYTES


def test_fsdp_divides_what_lasts_and_keeps_activations():
    sizes = plan.sizes_of(load_config("text/paper_1.3b"), 50257)
    one, eight = (plan.peak_memory(sizes, 2, product=2, accumulates=True, shards=shards) for shards in (1, 8))
    for part in ("weights", "optimizer"):
        assert getattr(eight, part) == getattr(one, part) / 8
    assert eight.activations == one.activations
    assert one.weights == 4 * sizes.parameters
    assert one.optimizer == 8 * sizes.parameters
