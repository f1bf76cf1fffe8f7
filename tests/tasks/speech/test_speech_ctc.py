"""CTC: what a search finds equals the sum over all paths, and room is counted right."""

import itertools

import jiwer
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.speech.ctc import beam_search, greedy, positions_needed
from tasks.speech.transcription import error_rates


def merged(path):
    return tuple(symbol for symbol, _ in itertools.groupby(path) if symbol)


def by_all_paths(log_probs):
    """Log probability of every transcript, by adding up every path through (T, V)."""
    length, symbols = log_probs.shape
    found = {}
    for path in itertools.product(range(symbols), repeat=length):
        value = sum(log_probs[t, s] for t, s in enumerate(path))
        found[merged(path)] = np.logaddexp(found.get(merged(path), -np.inf), value)
    return found


def random_log_probs(seed, length=5, symbols=3):
    return np.log(np.random.default_rng(seed).dirichlet(np.ones(symbols), length))


@pytest.mark.parametrize("seed", range(20))
def test_a_wide_beam_finds_the_most_probable_transcript(seed):
    log_probs = random_log_probs(seed)
    found = by_all_paths(log_probs)
    assert tuple(beam_search(log_probs, 200)) == max(found, key=found.get)


@pytest.mark.parametrize("seed", range(5))
def test_greedy_reads_the_best_path(seed):
    log_probs = random_log_probs(seed, 9)
    assert greedy(log_probs) == list(merged(log_probs.argmax(1)))


def test_the_beam_can_beat_the_best_path():
    # 'a' by two paths at 0.36 and 0.24 each way, the blank path at 0.4 alone is the best single one
    log_probs = np.log(np.array([[0.6, 0.4], [0.6, 0.4]]))
    assert greedy(log_probs) == []
    assert beam_search(log_probs, 4) == [1]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_positions_needed_are_the_fewest_with_a_finite_loss(symbols):
    needed = positions_needed(symbols)

    def loss(length):
        log_probs = torch.full((length, 1, 4), 0.25).log()
        sizes = torch.tensor([length]), torch.tensor([len(symbols)])
        return torch.nn.functional.ctc_loss(log_probs, torch.tensor([symbols]), *sizes, reduction="sum")

    assert loss(needed).isfinite()
    assert needed == 1 or loss(needed - 1).isinf()


def test_error_rates_are_edits_over_all_letters_and_words():
    found = error_rates(["abc d", "ef"], ["abd d", "e"])
    assert found == {"character_error_rate": pytest.approx(2 / 7), "word_error_rate": pytest.approx(2 / 3)}
    assert found["word_error_rate"] == pytest.approx(jiwer.wer(["abc d", "ef"], ["abd d", "e"]))
