"""Statistics against scipy.stats, printed tables and cases worked by hand."""

import itertools
import math
import random

import numpy
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from results.stats import (
    difference_at_equal_time,
    half_width,
    holm,
    interpolate,
    paired_differences,
    seeds_needed,
    sign_test,
    summarize,
    t_quantile,
)

# A few roundings of float64 on the way; the special functions of scipy are good to about 1e-13.
CLOSE = 1e-10


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_interval_and_p_value_are_those_of_scipy(seed, n):
    draw = random.Random(seed)
    baseline = [draw.gauss(1.4, 0.01) for _ in range(n)]
    other = [value - 0.01 + draw.gauss(0.0, 0.005) for value in baseline]
    summary = summarize([b - a for a, b in zip(baseline, other, strict=True)])
    oracle = scipy.stats.ttest_rel(other, baseline)
    interval = oracle.confidence_interval(0.95)
    # Differences of values near 1.4 carry the rounding of those values.
    absolute = 64 * numpy.finfo(float).eps
    assert summary.t == pytest.approx(oracle.statistic, rel=1e-8)
    assert summary.p == pytest.approx(oracle.pvalue, rel=1e-8)
    assert summary.low == pytest.approx(interval.low, rel=CLOSE, abs=absolute)
    assert summary.high == pytest.approx(interval.high, rel=CLOSE, abs=absolute)


def test_interval_of_a_case_worked_by_hand():
    # Differences 1, 2, 3, 4: mean 2.5, sd sqrt(5/3), se sqrt(5/12); printed: t(0.975, 3) = 3.182446.
    summary = summarize([1.0, 2.0, 3.0, 4.0])
    assert summary.mean == 2.5
    assert summary.sd == pytest.approx(math.sqrt(5 / 3), rel=CLOSE)
    half = 3.182446 * math.sqrt(5 / 12)
    assert summary.low == pytest.approx(2.5 - half, abs=1e-6)
    assert summary.high == pytest.approx(2.5 + half, abs=1e-6)
    assert (summary.negative, summary.positive, summary.ties) == (0, 4, 0)
    assert summary.sign_p == 0.125
    assert summary.excludes_zero


@pytest.mark.parametrize(
    ("degrees", "confidence", "printed"),
    [
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (4, 0.95, 2.776),
        (9, 0.95, 2.262),
        (4, 0.99, 4.604),
        (30, 0.9, 1.697),
    ],
)
def test_t_quantile_is_that_of_printed_tables(degrees, confidence, printed):
    assert t_quantile(confidence, degrees) == pytest.approx(printed, abs=5e-4)


def test_interval_covers_the_true_mean_as_often_as_it_says():
    draw = numpy.random.default_rng(0)
    repeats = 2000
    samples = draw.normal(0.3, 1.0, size=(repeats, 5))
    inside = sum(s.low <= 0.3 <= s.high for s in map(summarize, samples.tolist()))
    # Five standard deviations of a binomial with p = 0.95.
    assert abs(inside / repeats - 0.95) < 5 * math.sqrt(0.95 * 0.05 / repeats)


def test_one_seed_has_a_mean_and_no_interval():
    summary = summarize([-0.25])
    assert summary.mean == -0.25
    assert (summary.sd, summary.low, summary.high, summary.p) == (None, None, None, None)
    assert not summary.excludes_zero


def test_equal_differences_claim_no_p_value():
    summary = summarize([0.5, 0.5, 0.5])
    assert (summary.low, summary.high, summary.t, summary.p) == (0.5, 0.5, None, None)
    assert summarize([0.0, 0.0]).excludes_zero is False


def test_ties_count_for_neither_sign():
    summary = summarize([-1.0, 0.0, 2.0, 3.0])
    assert (summary.negative, summary.positive, summary.ties) == (1, 2, 1)


@pytest.mark.parametrize(("negative", "positive"), [(0, 5), (5, 0), (1, 4), (3, 3), (0, 1), (7, 2)])
def test_sign_test_is_the_exact_binomial_one(negative, positive):
    oracle = scipy.stats.binomtest(negative, negative + positive, 0.5).pvalue
    assert sign_test(negative, positive) == pytest.approx(oracle, rel=CLOSE)


def test_sign_test_counts_every_outcome():
    n, k = 6, 1
    outcomes = [sum(signs) for signs in itertools.product((0, 1), repeat=n)]
    share = sum(min(count, n - count) <= k for count in outcomes) / len(outcomes)
    assert sign_test(k, n - k) == pytest.approx(share, rel=CLOSE)


@pytest.mark.parametrize("values", [[math.nan, 1.0], [math.inf], []])
def test_values_that_are_no_differences_are_refused(values):
    with pytest.raises(ValueError, match=r"not finite|no differences"):
        summarize(values)


def test_only_seeds_that_both_have_are_paired():
    assert paired_differences({3: 1.0, 1: 2.0, 2: 5.0}, {1: 2.5, 3: 0.5, 9: 0.0}) == {1: 0.5, 3: -0.5}


def test_holm_of_a_case_worked_by_hand():
    # Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04; made rising: 0.06 at the end.
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005, "e": None})
    expected = {"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}
    assert adjusted["e"] is None
    assert {name: adjusted[name] for name in expected} == pytest.approx(expected, rel=CLOSE)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=7))
def test_holm_rejects_exactly_what_the_step_down_procedure_rejects(values):
    adjusted = holm({str(i): p for i, p in enumerate(values)})
    level = 0.05
    rejected = set()
    for rank, i in enumerate(sorted(range(len(values)), key=lambda i: values[i])):
        if (len(values) - rank) * values[i] > level:
            break
        rejected.add(str(i))
    assert {name for name, p in adjusted.items() if p <= level} == rejected


def test_holm_never_makes_a_p_value_smaller_and_refuses_what_is_none():
    values = {"a": 0.2, "b": 0.9, "c": 0.4}
    assert all(holm(values)[name] >= p for name, p in values.items())
    with pytest.raises(ValueError, match="p value of a"):
        holm({"a": 1.5})


def test_more_seeds_narrow_the_interval_and_the_needed_number_is_the_smallest():
    widths = [half_width(0.01, n) for n in range(2, 12)]
    assert widths == sorted(widths, reverse=True)
    n = seeds_needed(0.01, 0.008)
    assert half_width(0.01, n) < 0.008 <= half_width(0.01, n - 1)
    assert seeds_needed(1.0, 1e-9, limit=50) is None


def test_interpolation_is_linear_and_never_leaves_the_curve():
    steps, values = [0, 10, 40], [4.0, 2.0, 5.0]
    at = [0.0, 2.5, 10.0, 25.0, 40.0]
    assert [interpolate(steps, values, x) for x in at] == pytest.approx(list(numpy.interp(at, steps, values)))
    assert interpolate(steps, values, 41.0) is None
    assert interpolate(steps, values, -1.0) is None


def test_equal_time_gives_a_slower_arm_fewer_steps():
    # Both losses fall by 0.01 a step; the arm is 0.1 better per step, but each of its steps takes 1.25 times
    # as long.
    steps = list(range(0, 101, 5))
    baseline = [5.0 - 0.01 * step for step in steps]
    other = [value - 0.1 for value in baseline]
    per_step = difference_at_equal_time((steps, baseline), (steps, other), 1.0)
    assert per_step == pytest.approx(-0.1)
    # After 100 baseline steps it has made 80: 20 steps behind cost 0.2.
    assert difference_at_equal_time((steps, baseline), (steps, other), 1.25) == pytest.approx(-0.1 + 0.2)
    # A faster arm ends early: compared where it ends, at 80 baseline steps.
    assert difference_at_equal_time((steps, baseline), (steps, other), 0.8) == pytest.approx(-0.1 - 0.2)


def test_equal_time_of_curves_that_do_not_meet_is_missing():
    assert difference_at_equal_time(([50, 100], [2.0, 1.0]), ([10, 20], [3.0, 2.0]), 1.0) is None
    assert difference_at_equal_time(([], []), ([10], [3.0]), 1.0) is None
    with pytest.raises(ValueError, match="positive number"):
        difference_at_equal_time(([1], [1.0]), ([1], [1.0]), 0.0)
