"""One run in many processes is the run of one process: curves, weights, data, checkpoints."""

import signal
from typing import Any

import pytest
import torch

EPS = torch.finfo(torch.float64).eps
# Sums of some hundred tokens in another order, and what a few steps of AdamW or Newton-Schulz make of that.
LOSSES = {"rel": 1e6 * EPS, "abs": 1e6 * EPS}
WEIGHTS = {"rtol": 1e7 * EPS, "atol": 1e7 * EPS}


def assert_fine(story: Any, name: str) -> None:
    for ranks in story.results[name]:
        assert [rank["status"] for rank in ranks] == [0] * len(ranks), ranks


def test_curves_are_those_of_one_process(story: Any, spread: tuple[str, str]) -> None:
    name, alone = spread
    assert_fine(story, alone)
    assert_fine(story, name)
    for kind, value in (("train", "loss"), ("train", "grad_norm"), ("validation", "loss")):
        want = story.curve(alone, kind, value)
        assert len(want) >= 2
        assert story.curve(name, kind, value) == pytest.approx(want, **LOSSES)
    assert all(norm > 0.5 for norm in story.curve(alone, "train", "grad_norm"))  # so clipping was at work


def test_weights_are_those_of_one_process_on_every_rank(story: Any, spread: tuple[str, str]) -> None:
    name, alone = spread
    want, got = story.weights(alone), story.weights(name)
    assert want.keys() == got.keys()
    for key, weight in want.items():
        torch.testing.assert_close(got[key], weight, **WEIGHTS)
    ranks = story.of_each_rank(name)
    assert len(ranks) == len(story.results[name][0])
    for key, weight in ranks[0].items():
        assert torch.equal(weight, got[key])
        assert all(torch.equal(other[key], weight) for other in ranks[1:]), key


def test_data_are_those_of_one_process(story: Any, spread: tuple[str, str]) -> None:
    record, alone = map(story.record, spread)
    assert record.data.batches_sha256 == alone.data.batches_sha256
    assert record.data.samples_seen == alone.data.samples_seen
    assert record.config_hash == alone.config_hash


def test_another_librarys_model_trains_as_in_one_process(story: Any) -> None:
    """Images instead of text; this task's loss is formed in float32."""
    name, alone = "images fsdp 2", "images auto 1"
    assert_fine(story, alone)
    assert_fine(story, name)
    close = 8 * torch.finfo(torch.float32).eps
    for value in ("loss", "grad_norm"):
        want = story.curve(alone, "train", value)
        assert story.curve(name, "train", value) == pytest.approx(want, rel=close)
    found = story.weights(name)
    for key, weight in story.weights(alone).items():
        # Among them is the adapter's note on the variant, in which NaN stands for a learned strength.
        torch.testing.assert_close(found[key], weight, rtol=0, atol=100 * close, equal_nan=True)
    assert story.record(name).data.batches_sha256 == story.record(alone).data.batches_sha256


def test_shards_in_bfloat16_compute_what_autocast_does(story: Any) -> None:
    """The same roundings but for the order of float32 sums, which a bfloat16 step may magnify to its own."""
    assert_fine(story, "half fsdp 2")
    want, got = (story.curve(f"half {how}", "train", "loss") for how in ("alone 1", "fsdp 2"))
    assert got == pytest.approx(want, rel=torch.finfo(torch.bfloat16).eps)
    assert got[-1] < got[0]


def test_a_run_goes_on_in_any_number_of_processes(story: Any, chain: str) -> None:
    *stopped, last = story.results[chain]
    for ranks in stopped:  # one rank got the signal, all stopped after the same step
        assert [rank["status"] for rank in ranks] == [128 + signal.SIGTERM] * len(ranks), ranks
    assert [rank["status"] for rank in last] == [0] * len(last), last
    alone = "muon alone 1"
    assert story.curve(chain, "train", "step") == story.curve(alone, "train", "step")
    assert story.curve(chain, "train", "loss") == pytest.approx(story.curve(alone, "train", "loss"), **LOSSES)
    found = story.weights(chain)
    for key, weight in story.weights(alone).items():
        torch.testing.assert_close(found[key], weight, **WEIGHTS)
    assert story.record(chain).data.batches_sha256 == story.record(alone).data.batches_sha256


def test_sharded_checkpoints_are_directories_and_the_others_files(story: Any) -> None:
    folder = story.run("4 shards to 2 shards to 1 to 2 copies") / "checkpoints"
    found = sorted(path.name for path in folder.glob("step-*") if path.suffix != ".json")
    assert found == ["step-00000001.dcp", "step-00000002.dcp", "step-00000003.pt", "step-00000004.pt"]


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("kind", ["copies", "shards"])
@pytest.mark.parametrize("name", ["muon", "muon_torch"])
def test_muon_over_three_ranks_is_that_of_one_bit_for_bit(
    story: Any, name: str, kind: str, count: int
) -> None:
    """Four and five matrices of mixed shapes, one without gradient, one in blocks: from equal gradients."""
    assert_fine(story, "updates 3")
    (alone,) = story.of_each_rank("updates 1")
    want = alone[f"{count} {name} alone"]
    ranks = story.of_each_rank("updates 3")
    assert len(ranks) == 3
    for rank in ranks:
        got = rank[f"{count} {name} {kind}"]
        assert len(got["momenta"]) == count - 1  # every rank has all of them, but for the unused matrix
        for index, momentum in want["momenta"].items():
            assert torch.equal(got["momenta"][index], momentum)
        for index, weight in enumerate(want["weights"]):
            assert torch.equal(got["weights"][index], weight), index
