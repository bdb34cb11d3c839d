"""Autotune picks as races: who won, by how much, and how long each bar is."""

from __future__ import annotations

import msgspec

from aotc.picks import Candidate, Pick

CLOSE = 0.03
"""A runner-up within this share of the winner's time may win the next build: measurements repeat no better."""
LONGEST_BAR = 5.0
"""Bars end at this many times the fastest time, so that one slow candidate does not flatten the others."""


class RaceBar(msgspec.Struct, frozen=True):
    """One candidate. `width` is 0 to 1 of the chart, `median_width` that of its median; `clipped` where the bar would
    be longer; `ms` None: no time."""

    candidate: Candidate
    name: str
    config: str
    ms: float | None
    ratio: float | None
    width: float
    median_width: float
    clipped: bool
    chosen: bool


class Race(msgspec.Struct, frozen=True):
    """One pick. `verdict` says in words who won by how much; `close` where chance may have decided.

    `share` is about the part of a call that all uses of the winner take, 0 to 1; None where it is not known.
    """

    pick: Pick
    bars: tuple[RaceBar, ...]
    verdict: str
    close: bool
    share: float | None = None


class RaceGroup(msgspec.Struct, frozen=True):
    """The races of one bucket, and what they were measured on."""

    bucket: str
    device: str
    triton: str
    races: tuple[Race, ...]


def make_race(pick: Pick, call_ms: float | None = None) -> Race:
    """`call_ms` is what a call of the whole library takes, where that was measured."""
    times = [candidate.ms for candidate in pick.candidates if candidate.ms is not None]
    fastest = min(times, default=0.0)
    longest = min(max(times, default=0.0), fastest * LONGEST_BAR)
    bars = [_bar(candidate, index == pick.chosen, fastest, longest) for index, candidate in enumerate(pick.candidates)]
    verdict, close = _verdict(pick)
    bars.sort(key=lambda bar: (bar.ms is None, bar.ms or 0.0))
    return Race(pick, tuple(bars), verdict, close, _share(pick, call_ms))


def _share(pick: Pick, call_ms: float | None) -> float | None:
    """Of operators, which are counted; no share where it would be more than the call: one of both was disturbed."""
    if pick.kind != "operator" or not call_ms or pick.winner.ms is None:
        return None
    share = pick.uses * pick.winner.ms / call_ms
    return share if share <= 1 else None


def _bar(candidate: Candidate, chosen: bool, fastest: float, longest: float) -> RaceBar:
    ms, median = candidate.ms, candidate.median_ms
    return RaceBar(
        candidate=candidate,
        name=candidate.name,
        config=describe_config(candidate),
        ms=ms,
        ratio=ms / fastest if ms is not None and fastest > 0 else None,
        width=min(1.0, ms / longest) if ms is not None and longest > 0 else 0.0,
        median_width=min(1.0, median / longest) if median is not None and longest > 0 else 0.0,
        clipped=ms is not None and ms > longest,
        chosen=chosen,
    )


def describe_config(candidate: Candidate) -> str:
    return ", ".join(f"{name}={value}" for name, value in candidate.config.items())


def _verdict(pick: Pick) -> tuple[str, bool]:
    if pick.winner.ms is None:
        return "taken without a measurement", False
    if pick.margin is None:
        return "the only candidate with a time", False
    if pick.margin < 0:
        return f"although {pick.runner_up} takes {-pick.margin:.1%} less time", False
    said = f"{pick.margin:.1%} ahead of {pick.runner_up}"
    if pick.within_spread:
        return f"{said}: not decided by time, half of the winner's own calls took that long", True
    close = pick.margin <= CLOSE
    return f"{said}: so close that another build may choose otherwise" if close else said, close
