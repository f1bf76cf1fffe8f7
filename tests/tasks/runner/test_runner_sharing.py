"""A step's samples over ranks: disjoint, complete, in the order of one process."""

from typing import Any

import numpy as np
import pytest
import torch

from tasks.runner.sharing import Split, UnevenStream, cut, open_stream, whole_batch
from tasks.text.loader import TokenWindows

SEQ_LEN = 4


class Windows:
    """A task's stream over numbered tokens."""

    tokens = np.arange(SEQ_LEN * 41 + 1, dtype=np.int64)

    def stream(self, rank: int, world_size: int) -> TokenWindows:
        return TokenWindows(self.tokens, SEQ_LEN, 3, rank=rank, world_size=world_size)


def taken(task: Any, split: Split, steps: int) -> list[list[list[tuple]]]:
    """Return the micro-batches of every rank at each step."""
    splits = [Split(split.total, split.micro, rank, split.world_size) for rank in range(split.world_size)]
    streams = [open_stream(task, each) for each in splits]
    return [
        [[stream.next_batch(n) for n in each.pieces] for stream, each in zip(streams, splits, strict=True)]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("micro", [1, 2, 100])
def test_every_sample_of_a_step_is_one_ranks_and_an_epoch_is_complete(world: int, micro: int) -> None:
    total, task = 7, Windows()
    windows = task.stream(0, 1).windows_per_epoch
    steps = windows // total
    split = Split(total, min(micro, -(-total // world)), 0, world)
    alone = task.stream(0, 1)
    seen: list[int] = []
    for shares in taken(task, split, steps):
        want = alone.next_batch(total)
        ranks = [torch.cat([inputs[:, 0] for inputs, _ in share]).tolist() for share in shares]
        flat = [start for rank in ranks for start in rank]
        assert sorted(flat) == sorted(want[0][:, 0].tolist())
        seen += flat
        # And as one process would have cut it, in its order.
        joined = whole_batch(shares, split, 3)
        assert [len(batch[0]) for batch in joined] == [3, 3, 1]
        for part in (0, 1):
            assert torch.equal(torch.cat([batch[part] for batch in joined]), want[part])
    assert len(set(seen)) == steps * total


@pytest.mark.parametrize("total", range(1, 13))
@pytest.mark.parametrize("world", range(1, 6))
def test_shares_differ_by_at_most_one_and_go_in_step(total: int, world: int) -> None:
    if total < world:
        return
    splits = [Split(total, 2, rank, world) for rank in range(world)]
    assert sorted(place for each in splits for place in each.places(each.rank)) == list(range(total))
    counts = [each.samples for each in splits]
    assert max(counts) - min(counts) <= 1
    assert {each.passes for each in splits} == {max(len(each.pieces) for each in splits)}
    assert all(each.passes - len(each.pieces) <= 1 for each in splits)


def test_the_position_is_one_number_for_any_number_of_ranks() -> None:
    """Three ranks stop after a step of seven; one goes on, and so do two."""
    task = Windows()
    three = [open_stream(task, Split(7, 7, rank, 3)) for rank in range(3)]
    for rank, stream in enumerate(three):
        stream.next_batch(len(Split(7, 7, rank, 3).places(rank)))
    states = [stream.state_dict() for stream in three]
    assert states[1:] == states[:-1]
    alone = task.stream(0, 1)
    alone.next_batch(7)
    assert alone.state_dict() == states[0]
    want = alone.next_batch(7)
    two = [open_stream(task, Split(7, 7, rank, 2)) for rank in range(2)]
    for stream in two:
        stream.load_state_dict(states[0])
    got = [two[0].next_batch(4), two[1].next_batch(3)]
    assert torch.equal(torch.cat([inputs for inputs, _ in got]), want[0])


def test_a_stream_that_can_skip_is_not_made_to_read() -> None:
    class Skipping(TokenWindows):
        read = 0

        def next_batch(self, batch_size: int) -> Any:
            self.read += batch_size
            return super().next_batch(batch_size)

        def skip(self, samples: int) -> None:
            self.next_starts(samples)

    plain, skipping = (kind(Windows.tokens, SEQ_LEN, 3) for kind in (TokenWindows, Skipping))
    split = Split(7, 7, 1, 3)
    for _ in range(3):
        want, got = (UnevenStream(plain, split).next_batch(2), UnevenStream(skipping, split).next_batch(2))
        assert torch.equal(want[0], got[0])
    assert skipping.read == 6


def test_samples_of_sizes_of_their_own_are_hashed_as_they_come() -> None:
    shares = [[(torch.zeros(2, 5),)], [(torch.zeros(1, 4),)]]
    assert whole_batch(shares, Split(3, 2, 0, 2), 3) == [shares[0][0], shares[1][0]]


def test_micro_batches_cover_the_samples() -> None:
    for samples in range(1, 20):
        for micro in range(1, samples + 1):
            assert sum(cut(samples, micro)) == samples
            assert max(cut(samples, micro)) <= micro
