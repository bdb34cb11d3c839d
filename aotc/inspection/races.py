"""Autotune picks as races: who won, by how much, and how long each bar is."""

from __future__ import annotations

import msgspec

from aotc.picks import Candidate, Pick

CLOSE = 0.03
"""A runner-up within this share of the winner's time may win the next build: measurements repeat no better."""
LONGEST_BAR = 5.0
"""Bars end at this many times the fastest time, so that one slow candidate does not flatten the others."""


class Bar(msgspec.Struct, frozen=True):
    """One candidate. `width` is 0 to 1 of the chart; `clipped` where the bar would be longer; `ms` None: no time."""

    name: str
    config: str
    ms: float | None
    ratio: float | None
    width: float
    clipped: bool
    chosen: bool


class Race(msgspec.Struct, frozen=True):
    """One pick. `verdict` says in words who won by how much; `close` where chance may have decided."""

    pick: Pick
    bars: tuple[Bar, ...]
    verdict: str
    close: bool


class RaceGroup(msgspec.Struct, frozen=True):
    """The races of one bucket, and what they were measured on."""

    bucket: str
    device: str
    triton: str
    races: tuple[Race, ...]


def make_race(pick: Pick) -> Race:
    times = [candidate.ms for candidate in pick.candidates if candidate.ms is not None]
    fastest = min(times, default=0.0)
    longest = min(max(times, default=0.0), fastest * LONGEST_BAR)
    bars = [_bar(candidate, index == pick.chosen, fastest, longest) for index, candidate in enumerate(pick.candidates)]
    verdict, close = _verdict(pick)
    return Race(pick, tuple(sorted(bars, key=lambda bar: (bar.ms is None, bar.ms or 0.0))), verdict, close)


def _bar(candidate: Candidate, chosen: bool, fastest: float, longest: float) -> Bar:
    ms = candidate.ms
    return Bar(
        name=candidate.name,
        config=describe_config(candidate),
        ms=ms,
        ratio=ms / fastest if ms is not None and fastest > 0 else None,
        width=min(1.0, ms / longest) if ms is not None and longest > 0 else 0.0,
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
    close = pick.margin <= CLOSE
    said = f"{pick.margin:.1%} ahead of {pick.runner_up}"
    return f"{said}: so close that another build may choose otherwise" if close else said, close
