"""Short descriptions of a call's arguments, for errors and logs."""

from __future__ import annotations

import itertools
import sys
from typing import Any

SHOWN_NAMES = 8
"""Names of a mapping that a message shows."""
SHOWN_TEXT = 60
"""Characters of a text that a message shows."""


def describe(value: Any) -> str:
    """A value in a few words, for an error. Only numbers and texts are shown: other arguments are a user's data, and
    their `repr` is a user's code."""
    kind = type(value)
    if isinstance(value, dict):
        first, count = itertools.islice(dict.keys(value), SHOWN_NAMES), dict.__len__(value)
        names = [name[:SHOWN_TEXT] if type(name) is str else describe(name) for name in first]
        more = f" and {count - SHOWN_NAMES} more" if count > SHOWN_NAMES else ""
        return f"a {kind.__name__} of {', '.join(names) or 'nothing'}{more}"
    if kind is str:
        return f"str {value[:SHOWN_TEXT]!r}" + ("…" if len(value) > SHOWN_TEXT else "")
    if kind in (bool, float, complex) or (kind is int and value.bit_length() <= 64):
        return f"{kind.__name__} {value!r}"
    return describe_form(value)


def describe_form(value: Any) -> str:
    """Forms of arguments without any value, for a log: its readers may not be allowed to see a user's data."""
    if value is None:
        return "None"
    kind = type(value).__name__
    if isinstance(value, _array_classes()):
        return f"{kind} of {str(value.dtype).removeprefix('torch.')} and shape {list(value.shape)}"
    if isinstance(value, dict):
        return f"a {kind} of {dict.__len__(value)}"
    if isinstance(value, list | tuple):
        return f"a {kind} of {list.__len__(value) if isinstance(value, list) else tuple.__len__(value)}"
    return kind


def _array_classes() -> tuple[type[Any], ...]:
    """Array classes of the imported libraries: their attributes are not user code."""
    found = (
        getattr(sys.modules.get(name), kind, None)
        for name, kind in (("torch", "Tensor"), ("numpy", "ndarray"), ("aotc.core._cpu", "Tensor"))
    )
    return tuple(each for each in found if isinstance(each, type))
