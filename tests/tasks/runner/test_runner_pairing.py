"""Runs that differ in the variant alone start from the same weights and see the same batches."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from tasks.runner.config.compose import options
from tasks.runner.trace import Trace
from xsa_core.attention.variants import VARIANTS


@pytest.fixture(scope="module")
def runs(make_lab: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, list[str]]]:
    """Record and hash of every single batch, of each variant at seed 0 and of `sa` at seed 1."""
    root = tmp_path_factory.mktemp("pairs")
    hash_batch, result = Trace.hash_batch, {}
    with pytest.MonkeyPatch.context() as patch:
        for name, seed in [*((variant, 0) for variant in VARIANTS), ("sa", 1)]:
            hashes: list[str] = []

            def each(trace: Trace, batch: Any, hashes: list[str] = hashes) -> None:
                hashes.append(hashlib.sha256(b"".join(part.numpy().tobytes() for part in batch)).hexdigest())
                hash_batch(trace, batch)

            patch.setattr(Trace, "hash_batch", each)
            outcome = make_lab(root).train(
                f"attention={name}", f"seed={seed}", "loop.micro_batch=3", "loop.max_steps=3"
            )
            result[f"{name} {seed}"] = outcome.record, hashes
    return result


def test_every_variant_has_a_config() -> None:
    assert sorted(VARIANTS) == options("attention")


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "sa"])
def test_variant_shares_initial_weights_and_every_batch_with_plain_attention(
    runs: dict, variant: str
) -> None:
    plain, plain_batches = runs["sa 0"]
    record, batches = runs[f"{variant} 0"]
    assert record.status == plain.status == "completed"
    assert record.model.initial_weights_sha256 == plain.model.initial_weights_sha256
    assert len(batches) == 6  # two micro-batches of three steps
    assert batches == plain_batches
    assert record.data == plain.data
    assert record.pair_hash == plain.pair_hash
    assert record.config_hash != plain.config_hash


def test_variants_compute_different_things(runs: dict) -> None:
    """Or the pairs above would compare a run with itself."""
    losses = {runs[f"{variant} 0"][0].metrics["validation_loss"] for variant in VARIANTS}
    assert len(losses) == len(VARIANTS)


def test_another_seed_has_other_weights_and_other_batches(runs: dict) -> None:
    (first, first_batches), (second, second_batches) = runs["sa 0"], runs["sa 1"]
    assert first.model.initial_weights_sha256 != second.model.initial_weights_sha256
    assert first.data.batches_sha256 != second.data.batches_sha256
    assert set(first_batches).isdisjoint(second_batches)
    assert first.data.fingerprint == second.data.fingerprint
    assert first.cell_hash == second.cell_hash


def test_batch_hash_depends_on_order_values_and_shape() -> None:
    import torch

    def of(*batches: Any) -> str:
        trace = Trace()
        for batch in batches:
            trace.hash_batch(batch)
        return trace.batches_sha256

    a, b = torch.arange(6).view(2, 3), torch.arange(6).view(2, 3) + 1
    same = of((a, b))
    assert same == of((a.clone(), b.clone()))
    others = [
        of((b, a)),
        of((a, a)),
        of((a.view(3, 2), b)),
        of((a.int(), b)),
        of((a, b), (a, b)),
        of((a,), (b,)),
    ]
    assert len({same, *others}) == len(others) + 1


def test_only_the_variants_own_parameters_are_left_out_of_the_hash(runs: dict) -> None:
    own = {name for name in VARIANTS if runs[f"{name} 0"][0].model.variant_weights_sha256 is not None}
    more = {
        name for name in VARIANTS if runs[f"{name} 0"][0].model.parameters > runs["sa 0"][0].model.parameters
    }
    assert own == more == {"xsa_learned", "head_norm"}
