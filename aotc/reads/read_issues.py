"""Why what a capture read is not what this module and process have: each difference, with both values."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from aotc.digest import canonical_json
from aotc.errors import Issue
from aotc.reads.attributes import ORDER
from aotc.reads.outside import ABSENT, ENVIRONMENT, read_here
from aotc.records import Reads

AttributeDifference = tuple[str, str, tuple[str, ...], str, str]
"""The submodule's path, the attribute, the members of it that lead there, and both values."""

_HOOKS_HINT = (
    "compiled code runs the hooks of the build and no others: remove the hook before the load, or rebuild with it"
)
_CACHE_HINT = "write `use_cache: false` among the manifest's inputs and build again: then no configuration decides it"
ATTRIBUTES_HINT = (
    "Python attributes are part of the compiled code: construct the module with the `kwargs` of its manifest, or "
    "rebuild the model"
)


def found_differences(
    built: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> list[AttributeDifference]:
    """Where attributes differ, by submodule."""
    return [
        (path, name, members, _shown(one), _shown(other))
        for path in sorted(built.keys() | now.keys())
        for name in sorted(built.get(path, {}).keys() | now.get(path, {}).keys())
        for members, one, other in _differences(
            built.get(path, {}).get(name, _ABSENT), now.get(path, {}).get(name, _ABSENT)
        )
        if name != ORDER or (_ABSENT not in (one, other) and sorted(one) == sorted(other))  # else parts differ
    ]


def read_issues(module: nn.Module, names: Collection[str], recorded: Reads) -> list[Issue]:
    """Of the attributes called `names` that are compared only because a capture read them, and of what it read outside
    the module."""
    here = read_here(module, names, recorded)
    of_module = found_differences(recorded.attributes, here.attributes)
    outside = changed_names(recorded.outside, here.outside)
    return [*map(attribute_issue, of_module), *(_outside_issue(*each) for each in outside)]


def changed_names(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The names whose values differ, with both; those that cannot be found here are left out."""
    for name in sorted(recorded.keys() & here.keys()):
        if canonical_json(recorded[name]) != canonical_json(here[name]):  # True is not 1
            yield name, recorded[name], here[name]


def _outside_issue(name: str, built: Any, here: Any) -> Issue:
    if name.startswith(ENVIRONMENT):
        set_at_build, now = built is not None, os.environ.get(name[1:])
        built, here = "another value" if set_at_build else "not set", "not set" if now is None else repr(now)
        what = f"the environment variable {name[1:]}, which forward reads, was {built} at the build, and is {here} here"
        return Issue(what, where=name, expected=built, actual=here, hint="set it as the build had it, or rebuild")
    built, here = (_shown(_ABSENT if value == ABSENT else value) for value in (built, here))
    return Issue(
        f"forward reads it: built with {built}, here it is {here}",
        where=name,
        expected=built,
        actual=here,
        hint="values that forward reads are part of the compiled code: set it as the build had it, or rebuild",
    )


def attribute_issue(difference: AttributeDifference) -> Issue:
    path, name, members, built, here = difference
    is_cache = "use_cache" in (name.rpartition(".")[2], *members)
    return Issue(
        f"built with {built}, here it is {here}",
        where=".".join(filter(None, (path, name, *members))),
        expected=built,
        actual=here,
        hint=_HOOKS_HINT if name == "forward hooks" else _CACHE_HINT if is_cache else ATTRIBUTES_HINT,
    )


_ABSENT = object()


def _differences(one: Any, other: Any, members: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Where two values differ: the members of the dicts that lead there, and both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            yield from _differences(one.get(name, _ABSENT), other.get(name, _ABSENT), (*members, name))
    elif one is not other and _exactly(one) != _exactly(other):
        yield members, one, other


def _exactly(value: Any) -> Any:
    """As text: True is not 1."""
    return value if value is _ABSENT else canonical_json(value)


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)[:60]
