"""Statistics of paired comparisons: differences over seeds, t interval, sign count, Holm, equal time.

Everything here is a pure function of numbers. Only the quantiles come from ``scipy.special`` (Student's t
and the binomial distribution); importing it is quick, which ``scipy.stats`` is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import bdtr, stdtr, stdtrit


@dataclass(frozen=True)
class PairedSummary:
    """What ``n`` paired differences (other minus baseline, one per seed) say.

    ``low``, ``high`` bound the mean at ``confidence``; they and ``sd``, ``se``, ``p`` are ``None`` where
    ``n`` is too small to know (one seed has no spread). ``negative``, ``positive`` and ``ties`` count
    signs; ``sign_p`` is the two-sided sign test over the pairs that are not ties.
    """

    n: int
    mean: float
    sd: float | None
    se: float | None
    low: float | None
    high: float | None
    t: float | None
    p: float | None
    negative: int
    positive: int
    ties: int
    sign_p: float
    confidence: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval exists and zero lies outside it."""
        return self.low is not None and self.high is not None and (self.low > 0.0 or self.high < 0.0)


def _finite(values: Sequence[float], what: str) -> list[float]:
    result = [float(value) for value in values]
    if not all(math.isfinite(value) for value in result):
        raise ValueError(
            f"{what} has a value that is not finite; leave diverged runs out and list them instead"
        )
    return result


def _confidence(value: float) -> float:
    if not 0.0 < value < 1.0:
        raise ValueError(f"confidence is {value}, expected a number between 0 and 1 such as 0.95")
    return value


def t_quantile(confidence: float, degrees: int) -> float:
    """Return the two-sided quantile of Student's t: 95% of the mass lies within plus or minus it.

    Raises ``ValueError`` for a confidence outside (0, 1) or fewer than one degree of freedom.
    """
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom, expected at least 1; use two seeds or more")
    return float(stdtrit(degrees, 0.5 + 0.5 * _confidence(confidence)))


def sign_test(negative: int, positive: int) -> float:
    """Return the two-sided exact p value that both signs are equally likely (ties left out beforehand)."""
    n = negative + positive
    if n == 0:
        return 1.0
    return min(1.0, 2.0 * float(bdtr(min(negative, positive), n, 0.5)))


def summarize(differences: Sequence[float], confidence: float = 0.95) -> PairedSummary:
    """Return mean, t interval, p value and sign count of paired ``differences``.

    The interval is ``mean +- t(confidence, n - 1) * sd / sqrt(n)``, exact when differences are normal. One
    seed gives a mean without an interval. Raises ``ValueError`` for no differences or one that is not
    finite.
    """
    values = _finite(differences, "differences")
    n = len(values)
    if n == 0:
        raise ValueError("no differences to summarize; pair at least one seed")
    _confidence(confidence)
    mean = math.fsum(values) / n
    sd = se = low = high = t = p = None
    if n > 1:
        sd = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
        se = sd / math.sqrt(n)
        half = t_quantile(confidence, n - 1) * se
        low, high = mean - half, mean + half
        if se > 0.0:
            t = mean / se
            p = 2.0 * float(stdtr(n - 1, -abs(t)))
        # Without any spread the t value is 0/0 or infinite: it stays missing, and the sign count has to
        # speak.
    negative = sum(value < 0.0 for value in values)
    positive = sum(value > 0.0 for value in values)
    return PairedSummary(
        n=n,
        mean=mean,
        sd=sd,
        se=se,
        low=low,
        high=high,
        t=t,
        p=p,
        negative=negative,
        positive=positive,
        ties=n - negative - positive,
        sign_p=sign_test(negative, positive),
        confidence=confidence,
    )


def paired_differences(baseline: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """Return ``other - baseline`` for every seed that both have, ordered by seed."""
    return {seed: other[seed] - baseline[seed] for seed in sorted(baseline.keys() & other.keys())}


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return Holm's step-down adjusted p values of one family (Holm 1979), missing ones staying missing.

    The k-th smallest of m is multiplied by m - k + 1, then made non-decreasing and cut at 1. Raises
    ``ValueError`` for a p value outside [0, 1].
    """
    known = [(p, name) for name, p in p_values.items() if p is not None]
    for p, name in known:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p value of {name} is {p}, expected a number from 0 to 1")
    adjusted: dict[str, float | None] = dict.fromkeys(p_values)
    running = 0.0
    for rank, (p, name) in enumerate(sorted(known)):
        running = max(running, min(1.0, (len(known) - rank) * p))
        adjusted[name] = running
    return adjusted


def half_width(sd: float, n: int, confidence: float = 0.95) -> float:
    """Return half the width of the t interval that ``n`` seeds with spread ``sd`` give: the effect of n."""
    return t_quantile(confidence, n - 1) * sd / math.sqrt(n)


def seeds_needed(sd: float, effect: float, confidence: float = 0.95, limit: int = 10_000) -> int | None:
    """Return the smallest n whose interval is narrower than ``effect`` per side, ``None`` above ``limit``.

    This is a planning number: with it an effect of this size is expected to clear zero in about half of all
    repetitions, not in all.
    """
    if not effect > 0.0:
        raise ValueError(f"effect is {effect}, expected a positive size; pass its absolute value")
    return next((n for n in range(2, limit + 1) if half_width(sd, n, confidence) < effect), None)


def interpolate(steps: Sequence[int], values: Sequence[float], at: float) -> float | None:
    """Return the curve's value at step ``at``, linear between its points, ``None`` outside them."""
    if len(steps) != len(values):
        raise ValueError(f"{len(values)} values for {len(steps)} steps; give one per step")
    if not steps or not steps[0] <= at <= steps[-1]:
        return None
    for i in range(len(steps)):
        if steps[i] == at:
            return float(values[i])
        if steps[i] > at:
            weight = (at - steps[i - 1]) / (steps[i] - steps[i - 1])
            return float((1.0 - weight) * values[i - 1] + weight * values[i])
    return None


def difference_at_equal_time(
    baseline: tuple[Sequence[int], Sequence[float]],
    other: tuple[Sequence[int], Sequence[float]],
    step_time_ratio: float,
) -> float | None:
    """Return ``other - baseline`` after the same time of training, ``None`` when curves do not reach.

    Each curve is (steps, values). ``step_time_ratio`` is the time of one step of the other over one of the
    baseline, from the interleaved step benchmark, never from the clocks of the two trainings. The moment
    compared is the latest that both curves cover: a slower other is taken at its last step's time share.
    With a learning-rate schedule tied to the number of steps this counts against whichever is cut short,
    since that run has not yet annealed; it is a bound, not the result of a run planned for fewer steps.
    """
    if not (math.isfinite(step_time_ratio) and step_time_ratio > 0.0):
        raise ValueError(f"step_time_ratio is {step_time_ratio}, expected a positive number such as 1.05")
    if not baseline[0] or not other[0]:
        return None
    time = min(float(baseline[0][-1]), other[0][-1] * step_time_ratio)
    # Rounding must not push the last point of a curve beyond its own end.
    at_other = min(time / step_time_ratio, float(other[0][-1]))
    first, second = interpolate(*baseline, time), interpolate(*other, at_other)
    return None if first is None or second is None else second - first
