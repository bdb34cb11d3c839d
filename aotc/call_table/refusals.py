"""Rows of the call table that a call does not keep, in words: each with both values and a hint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aotc.errors import Issue
from aotc.records import TensorLeaf


class Shaped(Protocol):
    """A tensor, whatever made it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def equal_constant(value: Any, expected: Any) -> bool:
    if type(value) is float and type(expected) is float:
        return value.hex() == expected.hex()  # tells -0.0 from 0.0
    return type(value) is type(expected) and bool(value == expected)


def expected_issue(label: str, expected: str, actual: str, leaf: TensorLeaf, hint: str) -> Issue:
    """A row whose value is another one."""
    return Issue(f"{label} {expected} is expected, {actual} came", leaf.path, expected, actual, hint)


def constant_hint(built: Any, came: Any, *, is_tensor: bool) -> str:
    if built is None and is_tensor:
        return "it was left out at build: name it in the manifest's `inputs`"
    if built is None and isinstance(came, dict | list | tuple):
        empty = f"pass None, as {came!r} is another argument; or " if not came else ""
        return f"{empty}name it with what it holds in the manifest's `inputs`, and build again"
    return "a Python argument is part of the compiled code: give each value a model of its own"


def shape_issue(leaf: TensorLeaf, tensor: Shaped, hint: str = "") -> Issue:
    expected, actual = f"[{', '.join(map(str, leaf.shape))}]", str(list(tensor.shape))
    return Issue(f"shape {expected} is expected, {actual} came", leaf.path, expected, actual, hint)


def shape_hint(leaf: TensorLeaf, tensor: Shaped) -> str:
    """What to change in the manifest for an input in which a size varies that is written there as a number."""
    sizes = zip(leaf.shape, tensor.shape, strict=False)
    fixed = [str(size) for size, here in sizes if isinstance(size, int) and size != here]
    if not fixed:
        return ""
    return (
        f"the manifest fixes {' and '.join(dict.fromkeys(fixed))} in `shape:`: where a size varies, write a dim there, "
        "give its sizes in the buckets, and build again"
    )


def shared_memory_issue(owner: str, path: str) -> Issue:
    return Issue(
        f"shares memory with {owner}, which the model writes to", where=path, hint="pass a clone of one of them"
    )


def weight_memory_issue(name: str, path: str) -> Issue:
    words = f"is written to by the model, and shares memory with the module's `{name}`"
    return Issue(words, where=path, hint="pass a clone")


def overlapping_elements_issue(strides: Sequence[int], path: str) -> Issue:
    words = f"the model writes to it, and elements lie at one place: its strides are {list(strides)}"
    return Issue(words, where=path, hint="pass a clone")
