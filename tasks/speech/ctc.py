"""Reading a transcript out of CTC's probabilities: the best path, and a prefix beam search.

Axis legend: T positions, V symbols; symbol 0 is CTC's blank (Graves et al. 2006).
"""

from collections import defaultdict
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

BLANK = 0
CANDIDATES = 12  # symbols of a position that the beam search considers


def greedy(log_probs: NDArray[np.float32]) -> list[int]:
    """Return the symbols on the best path through (T, V): repeats merged, blanks left out."""
    best = log_probs.argmax(axis=1)
    kept = np.concatenate([[True], best[1:] != best[:-1]]) & (best != BLANK)
    return best[kept].tolist()


def beam_search(log_probs: NDArray[np.float32], width: int) -> list[int]:
    """Return the most probable transcript among `width` prefixes kept at every position of (T, V).

    A prefix's probability is that of all paths to it: those that end in blank and those that do not are kept
    apart, since a repeated symbol starts anew only after a blank (Hannun et al. 2014, algorithm 1).
    """
    # prefix -> log probabilities of its paths that end in a blank, and in its last symbol
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -np.inf)}
    for row in log_probs.astype(np.float64):
        grown: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [-np.inf, -np.inf])
        symbols = np.argsort(-row, kind="stable")[: CANDIDATES + 1].tolist()
        for prefix, (blank, symbol) in beam.items():
            total = np.logaddexp(blank, symbol)
            entry = grown[prefix]
            entry[0] = np.logaddexp(entry[0], total + row[BLANK])
            if prefix:
                entry[1] = np.logaddexp(entry[1], symbol + row[prefix[-1]])
            for new in symbols:
                if new == BLANK:
                    continue
                longer = grown[(*prefix, new)]
                from_ = blank if prefix and new == prefix[-1] else total
                longer[1] = np.logaddexp(longer[1], from_ + row[new])
        ranked = sorted(grown.items(), key=lambda item: (-np.logaddexp(*item[1]), item[0]))
        beam = {prefix: (entry[0], entry[1]) for prefix, entry in ranked[:width]}
    return list(max(beam.items(), key=lambda item: np.logaddexp(*item[1]))[0])


def positions_needed(symbols: list[int]) -> int:
    """Return how many positions CTC needs for a transcript: one each, and a blank between equal ones."""
    return len(symbols) + sum(a == b for a, b in pairwise(symbols))
