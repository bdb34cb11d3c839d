"""Percentiles, and whether a difference is more than noise.

Two contenders are compared by pairs: a pair is one round (or one turn of starts), in which both were measured one right
after the other, so that what drifts on the machine touches both alike. The figure is the median over the pairs of the
ratio of their times. Its 95 % interval is that of the sign test, from order statistics of the ratios: it assumes no
distribution (Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2; David and Nagaraja, Order
Statistics, section 7.1). Fewer than six pairs have no such interval.

An interval from rounds of one process says nothing of how much two processes that run the same code differ (Mytkowicz
et al., Producing Wrong Data Without Doing Anything Obviously Wrong!, ASPLOS 2009; Kalibera and Jones, Rigorous
Benchmarking in Reasonable Time, ISMM 2013). So eager runs in two processes, and a difference is only called one if it
is also greater than what the interval of these two allows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

CONFIDENCE = 0.95

Verdict = Literal["faster", "slower", "noise", "too few pairs"]


class LatencyRatio(msgspec.Struct, frozen=True):
    """How many times as long as the subject `other` takes: above 1, the subject is faster.

    low, high: the 95 % interval of the ratio, None of too few pairs. floor: a ratio within 1/floor and floor is noise.
    """

    other: str
    ratio: float
    low: float | None
    high: float | None
    pairs: int
    floor: float
    verdict: Verdict


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds of a call over `calls` calls. A percentile that fewer than one call lies beyond is None.

    rounds: the median of each round.
    """

    p50: float
    p95: float | None
    p99: float | None
    calls: int
    rounds: tuple[float, ...] = ()


def latency_of(rounds: Sequence[Sequence[float]]) -> Latency:
    """Milliseconds of calls, round by round."""
    calls = sorted(ms for one in rounds for ms in one)
    return Latency(
        statistics.median(calls),
        percentile(calls, 95),
        percentile(calls, 99),
        len(calls),
        tuple(map(statistics.median, rounds)),
    )


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """By nearest rank: the least value that `percent` % of all values do not exceed."""
    if len(ordered) * (100 - percent) < 100:
        return None
    return ordered[-(-len(ordered) * percent // 100) - 1]


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The confidence interval of the median of the values' distribution; None for too few values."""
    ordered, count = sorted(values), len(values)
    below = 0
    outside = 0.0  # the probability that fewer than `below` of the values lie below the true median
    while (more := outside + math.comb(count, below) / 2**count) <= (1 - CONFIDENCE) / 2:
        outside, below = more, below + 1
    return (ordered[below - 1], ordered[count - below]) if below else None


def noise_floor(first: Sequence[float], second: Sequence[float]) -> float:
    """The ratio, 1 or more, by which the times of two equal processes may differ, from their rounds."""
    ratios = [b / a for a, b in zip(first, second, strict=False)]  # one may have ended amid the rounds
    low, high = median_interval(ratios) or (min(ratios), max(ratios))
    return max(1.0, high, 1 / low)


def compare(other: str, own: Sequence[float], others: Sequence[float], floor: float = 1.0) -> LatencyRatio:
    """Compare times that were measured pairwise. Where one was measured more often, there are no pairs: the ratio is
    that of the medians, and has no interval."""
    if len(own) == len(others):
        ratios = [b / a for a, b in zip(own, others, strict=True)]
        ratio, interval = statistics.median(ratios), median_interval(ratios)
    else:
        ratio, interval = statistics.median(others) / statistics.median(own), None
    verdict: Verdict
    if interval is None:
        verdict = "too few pairs"
    elif interval[0] > 1 and ratio > floor:
        verdict = "faster"
    elif interval[1] < 1 and ratio < 1 / floor:
        verdict = "slower"
    else:
        verdict = "noise"
    low, high = interval or (None, None)
    return LatencyRatio(other, ratio, low, high, min(len(own), len(others)), floor, verdict)


def in_words(comparison: LatencyRatio, subject: str = "aotc") -> str:
    """`aotc is 2.1 × as fast as eager (1.9 to 2.3)`, or why nothing can be said."""
    ratio, other, low, high = comparison.ratio, comparison.other, comparison.low, comparison.high
    if low is None or high is None:
        return (
            f"{other} takes {ratio:.3g} × as long as {subject} (measured {comparison.pairs} ×: too few for a verdict)"
        )
    if comparison.verdict == "noise":
        within = f"{ratio:.3f}, {low:.3f} to {high:.3f}"
        if not low <= 1 <= high:  # the interval alone would be a difference
            within += f"; but two processes of eager differ by up to {comparison.floor:.3g} ×"
        return f"{subject} and {other} do not differ beyond the noise ({within})"
    if comparison.verdict == "faster":
        return f"{subject} is {ratio:.3g} × as fast as {other} ({low:.3g} to {high:.3g})"
    return f"{subject} takes {1 / ratio:.3g} × as long as {other} ({1 / high:.3g} to {1 / low:.3g})"
