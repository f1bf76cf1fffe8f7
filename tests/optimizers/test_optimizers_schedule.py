"""The learning rate over a run, against an explicit table."""

import math

import pytest
import torch

from optimizers.schedule import lr_factor, set_learning_rate

# 10 steps, 4 of warm-up, down to 0.1: cosines of 0, 36, 72, 108, 144 and 180 degrees, written out.
TABLE = [
    0.25,
    0.5,
    0.75,
    1.0,
    1.0,
    0.914057647468727,
    0.689057647468727,
    0.410942352531273,
    0.185942352531273,
    0.1,
]


def test_schedule_is_the_table() -> None:
    assert [lr_factor(step, 10, 4, 0.1) for step in range(10)] == pytest.approx(TABLE, rel=1e-12)


def test_paper_schedule_at_its_landmarks() -> None:
    """2,000 steps of warm-up, cosine to a tenth, 200,000 steps (paper, section 4)."""
    at = {0: 1 / 2000, 999: 0.5, 1999: 1.0, 2000: 1.0, 199_999: 0.1}
    for step, want in at.items():
        assert lr_factor(step, 200_000, 2000, 0.1) == pytest.approx(want, rel=1e-12)
    half = 2000 + (199_999 - 2000) / 2
    assert lr_factor(math.floor(half), 200_000, 2000, 0.1) == pytest.approx(0.55, abs=1e-5)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 3), (5, 0), (7, 6)])
def test_first_step_moves_and_last_step_is_the_floor(steps: int, warmup: int) -> None:
    factors = [lr_factor(step, steps, warmup, 0.2) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert max(factors) == pytest.approx(1.0)
    if steps > warmup + 1:
        assert factors[-1] == pytest.approx(0.2)
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)


def test_every_group_follows_its_own_peak() -> None:
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.4}])
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    for factor in (0.5, 0.25, 1.0):
        set_learning_rate(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * factor, 0.4 * factor]
