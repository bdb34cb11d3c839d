"""Amounts: in words, for messages; and ages and sizes as a person writes them, like `30d` and `20GiB`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aotc.errors import StoreError


def counted(count: int, noun: str) -> str:
    """A number of things: `1 bucket`, `2 buckets`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def size_text(count: int) -> str:
    """A number of bytes: `512 B`, `1.5 MiB`."""
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def seconds_text(seconds: float) -> str:
    """A time: `1.50 s`, `12.0 ms`."""
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.1f} ms"


# -- as a person writes them -------------------------------------------------------------------------------------------


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {
    "b": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)},
}


def parse_age(text: str) -> float:
    """Seconds of `90s`, `10m`, `1.5h`, `30d`, `2w`; a bare `0` too. Raises StoreError."""
    return _parse(text, "not an age", {**_SECONDS, **_zero(text)}, "30d, 12h, 10m or 0")


def parse_size(text: str) -> int:
    """Bytes of `500MiB`, `20GiB`, `1.5TB`, `4096B`; a bare `0` too. Raises StoreError."""
    return int(_parse(text, "not a size", {**_BYTES, **_zero(text)}, "20GiB, 500MB, 4096B or 0"))


def _zero(text: str) -> dict[str, int]:
    """0 needs no unit."""
    return {"": 0} if text.strip() == "0" else {}


def _parse(text: str, what: str, units: dict[str, int], examples: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in units:
        raise StoreError(f"{text[:100]!r} is {what}", hint=f"write it like {examples}")
    return float(match[1]) * units[match[2].lower()]
