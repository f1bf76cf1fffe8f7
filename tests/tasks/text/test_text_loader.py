import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.samples.order import ROUNDS, permute, seeded_words
from tasks.text.loader import TokenWindows, batch_hash, validation_starts, validation_windows

SEEDS = st.integers(0, 2**31)
MASK = 2**64 - 1


def _tokens(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int64)  # a token says where it stands


@given(st.integers(1, 300), SEEDS, st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_the_order_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(n), n, seed, epoch)
    np.testing.assert_array_equal(np.sort(order), np.arange(n))


@given(st.integers(1, 10**15), SEEDS)
@settings(max_examples=50, deadline=None)
def test_the_order_equals_the_network_in_plain_integers(n: int, seed: int) -> None:
    half = max(2, ((n - 1).bit_length() + 1) // 2)
    keys = [int(key) for key in seeded_words(ROUNDS, "permutation", seed, 3)]

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        return x ^ x >> 31

    def walk(x: int) -> int:
        while True:
            left, right = x >> half, x & (2**half - 1)
            for key in keys:
                left, right = right, left ^ mix(right + key & MASK) & (2**half - 1)
            x = left << half | right
            if x < n:
                return x

    places = sorted({0, n // 2, n - 1})
    assert permute(np.array(places), n, seed, 3).tolist() == [walk(place) for place in places]


@pytest.mark.parametrize("n", [2, 3, 7, 16, 50])
def test_every_place_is_equally_likely_to_come_first(n: int) -> None:
    expected = 60
    draws = expected * n
    firsts = [int(permute(np.array([0]), n, seed, 0)[0]) for seed in range(draws)]
    counts = np.bincount(firsts, minlength=n)
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    # Mean n-1 and variance 2(n-1) if uniform; six deviations are never reached by chance.
    assert chi_squared < (n - 1) + 6 * np.sqrt(2 * (n - 1))


def test_neighbours_in_the_order_are_not_neighbours_in_the_text() -> None:
    n = 10_000
    order = permute(np.arange(n), n, 0, 0).astype(np.float64)
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 6 / np.sqrt(n)
    assert (np.abs(np.diff(order)) == 1).sum() < 20  # 2 are expected


@given(st.integers(1, 12), st.integers(0, 400), SEEDS)
@settings(max_examples=100, deadline=None)
def test_an_epoch_reads_disjoint_windows_and_leaves_less_than_two(seq_len: int, more: int, seed: int) -> None:
    n = seq_len + 1 + more
    windows = TokenWindows(_tokens(n), seq_len, seed)
    for _ in range(2):
        inputs, targets = windows.next_batch(windows.windows_per_epoch)
        read = inputs.flatten().tolist()
        assert len(read) == len(set(read))
        assert n - len(read) <= 2 * seq_len
        assert int(targets.max()) < n
    assert windows.epoch == 2


def test_targets_are_the_tokens_one_place_on() -> None:
    inputs, targets = TokenWindows(_tokens(1000), 16, 0).next_batch(5)
    assert inputs.shape == targets.shape == (5, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert targets.equal(inputs + 1)  # a token says where it stands


def test_seeds_and_epochs_give_other_orders_and_other_cuts() -> None:
    tokens = _tokens(10_000)

    def epoch_of(seed: int, epoch: int) -> np.ndarray:
        windows = TokenWindows(tokens, 64, seed)
        return windows.starts(epoch, np.arange(windows.windows_per_epoch))

    epochs = [epoch_of(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(starts) for starts in epochs}) == len(epochs)
    assert len({int(starts.min()) for starts in epochs}) > 8  # the cuts: 64 are possible
    np.testing.assert_array_equal(epochs[0], epoch_of(0, 0))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_share_out_what_one_rank_would_read(world_size: int) -> None:
    tokens = _tokens(2000)
    alone = TokenWindows(tokens, 8, 5)
    ranks = [TokenWindows(tokens, 8, 5, rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(30):  # beyond the end of an epoch
        expected = alone.next_starts(4 * world_size).tolist()
        taken = [start for rank in ranks for start in rank.next_starts(4).tolist()]
        assert sorted(taken) == sorted(expected)


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    tokens = _tokens(500)
    one, two = TokenWindows(tokens, 8, 5), TokenWindows(tokens, 8, 5)
    pieces = [two.next_starts(size) for size in (1, 30, 2, 67)]
    np.testing.assert_array_equal(one.next_starts(100), np.concatenate(pieces))


@pytest.mark.parametrize("taken", [0, 1, 7, 61, 200])
def test_a_restored_loader_goes_on_exactly(taken: int) -> None:
    tokens = _tokens(500)
    original = TokenWindows(tokens, 8, 5)
    for _ in range(taken):
        original.next_batch(3)
    restored = TokenWindows(tokens, 8, 5)
    restored.load_state_dict(original.state_dict())
    for _ in range(30):
        for a, b in zip(original.next_batch(3), restored.next_batch(3), strict=True):
            assert a.equal(b)


def test_a_position_carries_over_to_another_number_of_ranks() -> None:
    tokens = _tokens(5000)
    two = [TokenWindows(tokens, 8, 5, rank=rank, world_size=2) for rank in range(2)]
    for rank in two:
        rank.next_batch(6)
    alone = TokenWindows(tokens, 8, 5)
    alone.next_batch(12)
    three = [TokenWindows(tokens, 8, 5, rank=rank, world_size=3) for rank in range(3)]
    for rank in three:
        rank.load_state_dict(two[0].state_dict())
    taken = [start for rank in three for start in rank.next_starts(2).tolist()]
    assert sorted(taken) == sorted(alone.next_starts(6).tolist())
    five = TokenWindows(tokens, 8, 5, world_size=5)
    with pytest.raises(ValueError, match="12 windows, cannot be shared by 5 ranks"):
        five.load_state_dict(two[0].state_dict())


@pytest.mark.parametrize(
    ("change", "name"), [((501, 8, 5), "tokens"), ((500, 9, 5), "seq_len"), ((500, 8, 6), "seed")]
)
def test_a_position_in_other_data_is_refused(change: tuple[int, int, int], name: str) -> None:
    n, seq_len, seed = change
    state = TokenWindows(_tokens(500), 8, 5).state_dict()
    with pytest.raises(ValueError, match=f"has {name} "):
        TokenWindows(_tokens(n), seq_len, seed).load_state_dict(state)


def test_the_order_of_a_hundred_billion_tokens_is_not_stored() -> None:
    class Endless:
        def __len__(self) -> int:
            return 10**11

        def __getitem__(self, key: slice) -> np.ndarray:
            return np.arange(key.start, key.stop)

    windows = TokenWindows(Endless(), 2048, 0)
    windows.load_state_dict(windows.state_dict() | {"windows": 40_000_000})
    inputs, targets = windows.next_batch(4)
    assert targets.equal(inputs + 1)
    assert len(set(inputs[:, 0].tolist())) == 4


@given(st.integers(1, 9), st.integers(0, 300), st.integers(1, 50), st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_validation_windows_are_fixed_spread_evenly_and_none_comes_twice(
    seq_len: int, more: int, samples: int, batch: int
) -> None:
    tokens = _tokens(seq_len + 1 + more)
    batches = list(validation_windows(tokens, seq_len, samples, batch))
    again = list(validation_windows(tokens, seq_len, samples, batch))
    assert [batch_hash(*b) for b in batches] == [batch_hash(*b) for b in again]
    read = torch.cat([inputs for inputs, _ in batches])
    available = (len(tokens) - 1) // seq_len
    assert len(read) == min(samples, available)
    assert len(set(read.flatten().tolist())) == read.numel()
    steps = np.diff(validation_starts(tokens, seq_len, samples)) // seq_len
    assert not len(steps) or steps.max() - steps.min() <= 1
    assert available - int(read[-1, 0]) // seq_len <= -(-available // len(read))  # up to the end


@pytest.mark.parametrize(
    "make", [lambda t: TokenWindows(t, 10, 0), lambda t: validation_windows(t, 10, 1, 1)]
)
def test_too_few_tokens_for_a_window_is_an_error_that_says_how_many(make) -> None:
    make(_tokens(11))
    with pytest.raises(ValueError, match=r"10 tokens are too few.* 11 or more"):
        make(_tokens(10))


def test_impossible_ranks_and_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        TokenWindows(_tokens(100), 8, 0, rank=2, world_size=2)
    with pytest.raises(ValueError, match="batch_size is 0"):
        TokenWindows(_tokens(100), 8, 0).next_batch(0)
    with pytest.raises(ValueError, match="expected indices from 0 to 4"):
        permute(np.array([5]), 5, 0, 0)


def test_batch_hash_sees_every_token_and_the_shape() -> None:
    batch = torch.arange(12).reshape(3, 4)
    changed = batch.clone()
    changed[2, 3] += 1
    hashes = [batch_hash(b) for b in (batch, changed, batch.reshape(4, 3), batch.T)]
    assert len(set(hashes)) == 4
    assert batch_hash(batch) == batch_hash(batch.numpy().astype(np.uint16))
    assert batch_hash(batch.T.contiguous()) == batch_hash(batch.T)
