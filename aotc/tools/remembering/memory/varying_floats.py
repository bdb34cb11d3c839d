"""Floats that vary, in calls or as attributes: each value is a constant of code of its own, so only a few get code."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from aotc.reads.module_identity import IdentityFacts
from aotc.tools.recording.seen_calls import SeenTensor

MOST_FLOATS = 3
"""Values of one float for which code is built, as of a guidance that is on or off; one with more varies."""

FloatsByPath = Mapping[str, float]
"""Floats by their paths, as `scales[0]`."""


def floats_in(value: Any, path: str = "") -> dict[str, float]:
    """The floats that are within the arguments of a call, or within an attribute, by their paths."""
    if type(value) is float:
        return {path: value}
    if isinstance(value, Mapping):
        inner = ((f"{path}.{name}" if path else name, item) for name, item in value.items())
    elif isinstance(value, list | tuple) and not isinstance(value, SeenTensor):
        inner = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    else:
        return {}
    return {name: found for part, item in inner for name, found in floats_in(item, part).items()}


def varying_argument(call: FloatsByPath, kinds: Sequence[FloatsByPath]) -> str:
    """The path of a float of a call that has another value in each of so many kinds, or none: its default; else ""."""
    for path, value in call.items():
        values = {floats.get(path) for floats in kinds}
        if value not in values and len(values) >= MOST_FLOATS:
            return path
    return ""


def has_varying(kinds: Sequence[FloatsByPath]) -> bool:
    """Whether any float had as many values as may be."""
    return any(len({floats.get(path) for floats in kinds}) >= MOST_FLOATS for path in set[str]().union(*kinds))


def varying_attribute(now: IdentityFacts, before: Iterable[IdentityFacts]) -> str:
    """The path of a float among a module's attributes that had as many values before as may be, and has another one
    now; else ""."""
    former = list(before)
    for name, text in now.items():
        if name.startswith("attribute ") and any(facts.get(name, text) != text for facts in former):
            others = [_floats_of_fact(facts.get(name, "null")) for facts in former]
            for path, value in _floats_of_fact(text).items():
                values = {floats[path] for floats in others if path in floats}
                if value not in values and len(values) >= MOST_FLOATS:
                    return f"{name.removeprefix('attribute ')}{path}"
    return ""


def _floats_of_fact(text: str) -> FloatsByPath:
    with suppress(ValueError):  # the digest of a long value
        return floats_in(json.loads(text))
    return {}


def argument_varies(path: str) -> str:
    """That no further code is built for a float of a call, in words."""
    return f"`{path}` is a float that varies: no code is built for further values of it. Pass it as a tensor"


def attribute_varies(path: str) -> str:
    """The same of an attribute."""
    return (
        f"`{path}` is a float that varies in the module: no code is built for further values of it. "
        "Keep it in a buffer, or pass it to forward as a tensor"
    )
