"""What differs between the kernels of two variants of one bucket."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from aotc.digest import sha256_bytes
from aotc.provenance import Kernel

KernelStatus = Literal["added", "removed", "changed", "renamed"]


class KernelDifference(msgspec.Struct, frozen=True, omit_defaults=True):
    """A kernel that only one side has, or that differs. `renamed`: the same source under another name.

    `source_a`, `source_b`: digests of the sources, in which the kernel's own name does not count; empty without one.
    `source_diff`: a unified diff from A's source to B's.
    """

    status: KernelStatus
    kind: str
    name_a: str = ""
    name_b: str = ""
    calls_a: int = 0
    calls_b: int = 0
    operators_a: tuple[str, ...] = ()
    operators_b: tuple[str, ...] = ()
    source_a: str = ""
    source_b: str = ""
    source_diff: str = ""


def source_digest(kernel: Kernel) -> str:
    """The digest of a kernel's source, its own name left out; empty for an operator of torch, which has no source."""
    return sha256_bytes(kernel.source.replace(kernel.name, "KERNEL").encode()) if kernel.source else ""


def compare_kernels(a: tuple[Kernel, ...], b: tuple[Kernel, ...]) -> tuple[KernelDifference, ...]:
    """Kernels are paired by name and source, then by source, then by name; what is left was removed or added."""
    rest_a, rest_b = list(a), list(b)
    pairs: list[tuple[Kernel, Kernel]] = []
    for same in (lambda k: (k.name, source_digest(k)), lambda k: source_digest(k) or None, lambda k: k.name):
        pairs += _take_pairs(rest_a, rest_b, same)
    found = [_kernel_difference(*pair) for pair in pairs if pair[0] != pair[1]]
    found += [_kernel_difference(kernel, None) for kernel in rest_a]
    found += [_kernel_difference(None, kernel) for kernel in rest_b]
    return tuple(sorted(found, key=lambda difference: (difference.name_a or difference.name_b, difference.name_b)))


def _take_pairs(
    a: list[Kernel], b: list[Kernel], identity: Callable[[Kernel], object]
) -> Iterator[tuple[Kernel, Kernel]]:
    """Pairs with equal identities (None is equal to nothing), taken out of both lists."""
    for kernel in list(a):
        mine = identity(kernel)
        partner = next((other for other in b if mine is not None and identity(other) == mine), None)
        if partner is not None:
            a.remove(kernel)
            b.remove(partner)
            yield kernel, partner


def _kernel_difference(a: Kernel | None, b: Kernel | None) -> KernelDifference:
    nothing = Kernel("", "", 0)
    one, other = a or nothing, b or nothing
    status: KernelStatus = "changed"
    if a is None:
        status = "added"
    elif b is None:
        status = "removed"
    elif a.name != b.name:
        status = "renamed"
    return KernelDifference(
        status=status,
        kind=one.kind or other.kind,
        name_a=one.name,
        name_b=other.name,
        calls_a=one.calls,
        calls_b=other.calls,
        operators_a=one.operators,
        operators_b=other.operators,
        source_a=source_digest(one),
        source_b=source_digest(other),
        source_diff=_source_diff(one, other) if status == "changed" else "",
    )


def _source_diff(a: Kernel, b: Kernel) -> str:
    lines = difflib.unified_diff(a.source.splitlines(), b.source.splitlines(), "A", "B", lineterm="", n=2)
    return "\n".join(lines)
