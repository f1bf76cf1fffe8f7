"""The order of samples, ranks and workers, restarts, and damaged samples."""

import pytest
import torch

from tasks.errors import UserError
from tasks.samples.source import Damaged, DamagedSampleError
from tasks.samples.stream import CHUNK, SampleStream, fixed_batches


class Numbers:
    """Samples (index, a random number of the sample's generator); those in `bad` cannot be read."""

    fingerprint = "numbers"

    def __init__(self, count, bad=()):
        self.count, self.bad = count, frozenset(bad)

    def __len__(self):
        return self.count

    def fetch(self, index, rng):
        if index in self.bad:
            raise DamagedSampleError(f"sample {index}", "torn")
        return index, 0 if rng is None else int(rng.integers(2**31))


def collate(samples):
    return tuple(torch.tensor(column) for column in zip(*samples, strict=True))


def taken(stream, *sizes):
    return torch.cat([torch.stack(stream.next_batch(size), 1) for size in sizes]).tolist()


def make(count=10, seed=0, bad=(), limit=0, **options):
    return SampleStream(Numbers(count, bad), collate, seed, damaged=Damaged(limit), **options)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_together_see_every_sample_once_in_an_epoch(world_size):
    count, epochs = 24, 2
    own = [
        [
            index
            for index, _ in taken(make(count, rank=rank, world_size=world_size), count * epochs // world_size)
        ]
        for rank in range(world_size)
    ]
    order = [own[place % world_size][place // world_size] for place in range(count * epochs)]
    assert sorted(order[:count]) == sorted(order[count:]) == list(range(count))
    assert order[:count] != order[count:]
    assert order == [index for index, _ in taken(make(count), count * epochs)]


def test_order_and_augmentation_follow_from_the_seed_alone():
    assert taken(make(seed=3), 4, 20) == taken(make(seed=3), 24)
    assert taken(make(seed=3), 24) != taken(make(seed=4), 24)


def test_a_sample_is_augmented_anew_in_every_epoch():
    both = taken(make(count=4), 8)
    first, second = dict(both[:4]), dict(both[4:])
    assert all(first[index] != second[index] for index in range(4))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers):
    length = 5 * CHUNK + 3
    bad = {1, 7}
    assert taken(make(40, bad=bad, limit=2, workers=workers), length) == taken(
        make(40, bad=bad, limit=2), length
    )


def test_a_restored_stream_goes_on_exactly_there():
    whole = taken(make(10, bad={3}, limit=1), 7, 30)
    stream = make(10, bad={3}, limit=1)
    taken(stream, 7)
    state = stream.state_dict()
    again = make(10, bad={3}, limit=1)
    again.load_state_dict(state)
    assert taken(again, 30) == whole[7:]
    assert again.damaged.found == stream.damaged.found | again.damaged.found


def test_a_position_moves_to_another_number_of_ranks():
    stream = make(10)
    first = taken(stream, 6)
    pair = [make(10, rank=rank, world_size=2) for rank in range(2)]
    for member in pair:
        member.load_state_dict(stream.state_dict())
    rest = [taken(member, 7) for member in pair]
    assert first + [rest[place % 2][place // 2] for place in range(14)] == taken(make(10), 20)


@pytest.mark.parametrize("change", [{"seed": 1}, {"count": 11}])
def test_a_position_in_other_data_is_refused(change):
    stream = make()
    with pytest.raises(UserError, match="expected"):
        make(**change).load_state_dict(stream.state_dict())


def test_a_position_that_ranks_cannot_share_is_refused():
    stream = make()
    stream.next_batch(3)
    with pytest.raises(UserError, match="cannot be shared"):
        make(world_size=2).load_state_dict(stream.state_dict())


def test_damaged_samples_are_passed_over_named_and_counted_once():
    stream = make(10, bad={2, 5}, limit=2)
    seen = [index for index, _ in taken(stream, 16)]
    assert sorted(seen[:8]) == sorted(set(range(10)) - {2, 5})
    assert stream.damaged.note() == (
        "2 damaged samples skipped (" + "; ".join(f"{name}: torn" for name in stream.damaged.found) + ")"
    )
    assert set(stream.damaged.found) == {"sample 2", "sample 5"}


def test_more_damaged_samples_than_allowed_are_an_error():
    with pytest.raises(
        UserError, match=r"2 damaged samples, 1 may be skipped \(sample \d: torn; sample \d: torn\)"
    ):
        make(10, bad={2, 5}, limit=1).next_batch(10)


def test_a_source_without_a_readable_sample_ends():
    with pytest.raises(UserError, match="no sample can be read"):
        make(3, bad={0, 1, 2}, limit=3).next_batch(1)


def test_an_empty_source_is_refused():
    with pytest.raises(UserError, match="no training samples"):
        make(0)
    with pytest.raises(UserError, match="no validation samples"):
        list(fixed_batches(Numbers(0), collate, 4, 2))


def test_evaluation_samples_are_spread_and_never_augmented():
    def batches(*arguments):
        return [
            [column.tolist() for column in batch] for batch in fixed_batches(Numbers(12), collate, *arguments)
        ]

    assert batches(6, 4) == [[[0, 2, 4, 6], [0] * 4], [[8, 10], [0] * 2]]
    assert [index for batch in batches(99, 5) for index in batch[0]] == [*range(12)]
