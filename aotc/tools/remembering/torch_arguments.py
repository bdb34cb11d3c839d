"""The arguments of torch.compile that `aotc.compile` takes for a line that stood there, or refuses with what to do."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from aotc.errors import BindError, Issue

_INDUCTOR = 'None or "inductor": the code is Inductor\'s'
_OPTIONS = "None: mode= chooses Inductor's options; what else a build can be told stands in a manifest"
_HINTS = {
    "backend": "leave it out; another backend has no code that could be kept",
    "options": "leave it out, and give mode=; `aotc init --from-store` writes the manifest of what was built",
    "name": "leave it out; explain().name is the module's name in the store",
    "recompile_limit": "leave it out; builds= bounds the builds, and a size that varies becomes a range",
    "isolate_recompiles": "leave it out; each module has forms and builds of its own",
    "shapes_spec": 'write ranges={"seq": (1, 2048)}, by the names that explain() and the log tell',
}


def check_torch_arguments(
    function: Callable[..., Any],
    backend: object,
    options: object,
    dynamic: object,
    fullgraph: object,
    others: Mapping[str, object],
) -> None:
    """Raises BindError, which is a TypeError, for all that cannot be taken: each with its value and what to do."""
    known = [name for name in inspect.signature(function).parameters if name != "others"]
    issues = [_refused(name, value, known) for name, value in others.items()]
    if backend not in (None, "inductor"):
        issues.append(_issue("backend", backend, _INDUCTOR, _HINTS["backend"]))
    if options:
        issues.append(_issue("options", options, _OPTIONS, _HINTS["options"]))
    if dynamic not in (None, True, False):
        issues.append(_issue("dynamic", dynamic, "None, True or False", ""))
    if fullgraph not in (True, False):
        issues.append(_issue("fullgraph", fullgraph, "True or False", ""))
    if issues:
        raise BindError("aotc.compile was called with what it does not take", issues=tuple(issues))


def _issue(name: str, value: object, expected: str, hint: str) -> Issue:
    actual = repr(value)[:80]
    return Issue(f"{name} is {actual}, and may be {expected}", expected=expected, actual=actual, hint=hint)


def _refused(name: str, value: object, known: list[str]) -> Issue:
    if hint := _HINTS.get(name):
        return Issue(f"{name}={repr(value)[:80]} is torch.compile's alone", actual=repr(value)[:80], hint=hint)
    near = difflib.get_close_matches(name, known, 1)
    hint = f"write {near[0]}=" if near else f"it takes {', '.join(known[1:])}"
    return Issue(f"{name} is not an argument of aotc.compile", actual=repr(value)[:80], hint=hint)
