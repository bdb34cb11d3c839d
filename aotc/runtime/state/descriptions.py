"""How the description of a tensor subclass, as of a quantised parameter, differs from the one of the build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from aotc.errors import BindError, Issue
from aotc.reads.tensors import dtype_name
from aotc.tensors.subclasses import agrees, describe


def check_subclasses(parameters: Mapping[str, tuple[Any, Any]]) -> None:
    """Of a module's `parameters`: by name, the description that is expected, and the tensor. Raises BindError."""
    issues = [
        issue for name, (expected, tensor) in parameters.items() for issue in subclass_issues(name, expected, tensor)
    ]
    if issues:
        raise BindError(
            "the module's parameters are not quantised, or wrapped in a tensor subclass, as those of the build were",
            issues=tuple(issues),
            hint="quantise the module as its manifest's factory does, or build the artifact for this form",
        )


def check_described(where: str, parameters: Mapping[str, tuple[Any, Any]]) -> None:
    """Of a checkpoint's: by name, the description that is expected, and the one found. Raises BindError."""
    if not all(agrees(*both) for both in parameters.values()):
        issues = [issue for name, both in parameters.items() for issue in _differences(name, *both, "the checkpoint's")]
        raise BindError(
            f"the parameters of {where} are not quantised as those of the build were",
            issues=tuple(issues),
            hint="quantise the checkpoint's model as the manifest's factory does, or build the artifact for this form",
        )


def subclass_issues(name: str, expected: Any, tensor: Any) -> list[Issue]:
    """All differences of one parameter; `tensor` may be a plain one, or None."""
    found = describe(tensor)
    if found == expected:
        return []
    if found is None:
        plain = f"a plain {dtype_name(tensor.dtype)} tensor" if isinstance(tensor, Tensor) else "missing"
        kind = str(expected["class"])
        return [Issue(f"built for {kind}, the module's is {plain}", where=name, expected=kind, actual=plain)]
    return list(_differences(name, expected, found, "the module's"))


def _differences(name: str, expected: Any, found: Any, whose: str) -> Iterator[Issue]:
    for label, built, now in _unequal(expected, found):
        text = f"built for {label} {_text(built)}, {whose} is {_text(now)}"
        yield Issue(text, where=name, expected=_text(built), actual=_text(now))


def _unequal(expected: Any, found: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The members of two descriptions that differ, by name; of the context and of inner wrappers their members."""
    for name in found:
        built, now = expected.get(name), found[name]
        if built == now:
            continue
        if isinstance(built, dict) and isinstance(now, dict) and "_type" not in {*built, *now}:
            both = {key: built.get(key) for key in {**built, **now}}, {key: now.get(key) for key in {**built, **now}}
            yield from _unequal(*both, path if name in ("context", "inner") else f"{path}{name}.")
        else:
            yield f"{path}{name}", built, now


def _text(value: Any) -> str:
    """`PerRow(dim=-1)` for {"_type": "PerRow", "_data": {"dim": -1}}."""
    if isinstance(value, dict) and "_type" in value:
        data = value.get("_data")
        if isinstance(data, dict):
            return f"{value['_type']}({', '.join(f'{name}={_text(each)}' for name, each in data.items())})"
        return f"{value['_type']}.{data}" if value["_type"] != "torch.dtype" else str(data)
    return str(value)
