"""When a difference is one: the interval of the sign test, and the noise between two equal processes."""

from __future__ import annotations

import math

import pytest

from aotc.tools.bench.latency_comparison import compare, in_words, latency_of, median_interval, noise_floor, percentile


@pytest.mark.parametrize(
    ("count", "rank"), [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (20, 6), (25, 8), (30, 10)]
)
def test_the_interval_is_that_of_the_table_of_the_sign_test(count: int, rank: int) -> None:
    """Ranks of the two-sided 95 % interval of a median, as printed tables give them (Conover, table A3, p = 0.5)."""
    assert median_interval(range(1, count + 1)) == (rank, count + 1 - rank)


@pytest.mark.parametrize("count", range(1, 6))
def test_fewer_than_six_values_have_no_interval(count: int) -> None:
    assert median_interval(range(count)) is None


@pytest.mark.parametrize("count", [6, 13, 40])
def test_the_interval_covers_the_median_with_95_percent_and_a_narrower_one_does_not(count: int) -> None:
    interval = median_interval(range(1, count + 1))
    assert interval is not None
    rank = int(interval[0])

    def coverage(rank: int) -> float:
        return 1 - 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count

    assert coverage(rank) >= 0.95 > coverage(rank + 1)


def test_a_percentile_that_no_call_lies_beyond_is_not_given() -> None:
    """Nearest rank: of 1 to 100, the 99th percentile is 99."""
    assert percentile(range(1, 101), 99) == 99
    assert percentile(range(1, 101), 95) == 95
    assert percentile(range(1, 100), 99) is None
    assert latency_of([[3.0, 1.0], [2.0, 6.0]]) == (latency := latency_of([[1.0, 3.0], [6.0, 2.0]]))
    assert (latency.p50, latency.p95, latency.calls, latency.rounds) == (2.5, None, 4, (2.0, 4.0))


OWN = (1.0, 1.1, 1.2, 1.0, 3.0, 1.1)  # the machine was slow in the fifth round, for both


def test_what_drifts_in_both_is_no_difference_and_hides_none() -> None:
    twice = compare("eager", OWN, [2 * ms for ms in OWN])
    assert (twice.ratio, twice.low, twice.high, twice.verdict) == (2.0, 2.0, 2.0, "faster")
    assert in_words(twice) == "aotc is 2 × as fast as eager (2 to 2)"
    half = compare("eager", OWN, [ms / 2 for ms in OWN])
    assert half.verdict == "slower"
    assert in_words(half) == "aotc takes 2 × as long as eager (2 to 2)"
    assert compare("eager", OWN, OWN).verdict == "noise"


def test_a_difference_that_two_processes_of_eager_show_too_is_noise() -> None:
    floor = noise_floor([1.0] * 6, [1.05, 1.02, 1.04, 1.06, 1.03, 1.05])
    assert floor == 1.06
    others = [1.05 * ms for ms in OWN]
    assert compare("eager", OWN, others).verdict == "faster"
    noise = compare("eager", OWN, others, floor)
    assert noise.verdict == "noise"
    assert in_words(noise).endswith("(1.050, 1.050 to 1.050; but two processes of eager differ by up to 1.06 ×)")
    assert in_words(compare("eager", OWN, OWN)).endswith("beyond the noise (1.000, 1.000 to 1.000)")
    assert noise_floor([1.05] * 6, [1.0] * 6) == pytest.approx(1.05)  # whichever of the two is slower


def test_too_few_pairs_give_no_verdict_however_far_apart() -> None:
    found = compare("default", [1.5, 1.0, 1.0, 1.0, 1.0, 1.0], [20.0])  # one start against six: no pairs
    assert (found.verdict, found.low, found.pairs) == ("too few pairs", None, 1)
    assert in_words(found) == "default takes 20 × as long as aotc (measured 1 ×: too few for a verdict)"
