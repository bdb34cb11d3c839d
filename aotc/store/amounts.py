"""Ages and sizes as a person writes them: `30d`, `20GiB`."""

from __future__ import annotations

import re

from aotc.errors import StoreError

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
