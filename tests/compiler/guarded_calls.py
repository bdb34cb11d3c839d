"""Calls of built indexing_forms models: `python guarded_calls.py forms start|end`, `divisions` or `epilogue`.

A call must raise where eager does, give eager's result where not, and leave the next call alone.

Prints what is wrong, and exits with 1.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import indexing_forms
import torch
from indexing_forms import COLUMNS, DIVISIONS, ROWS, WIDE, form_of
from torch import Tensor
from torch.utils import _pytree as pytree

import aotc

COUNT = 35


def between_guards(tensor: Tensor, at_end: bool) -> Tensor:
    """A copy between two pages of no access: it ends where the one begins, or begins where the other ends."""
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    pages = -(-size // page) * page
    memory = mmap.mmap(-1, pages + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + page + pages):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), page, 0) == 0
    offset = page + (pages - size if at_end else 0)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
    return copy.copy_(tensor)


def wrong_forms(at_end: bool) -> list[Any]:
    module = indexing_forms.forms()
    compiled = aotc.load("forms", module, store="store")
    values = between_guards(torch.randn(COUNT, COLUMNS), at_end)
    tables = {name: between_guards(torch.randn(ROWS, COLUMNS) * 9, at_end) for name in sorted(module.names)}
    kept = {name: table.clone() for name, table in tables.items()}
    indices = {
        name: between_guards(torch.randint(form_of(name)[0], (COUNT, COLUMNS) if name in WIDE else (COUNT,)), at_end)
        for name in sorted(module.names)
    }

    def restore() -> None:
        for name, table in tables.items():
            table.copy_(kept[name])

    wrong: list[Any] = []
    for name in module.names:
        bound, form = form_of(name)
        flat = indices[name].view(-1)
        for bad in (bound, -1, -bound - 1, 2**20, 2**40, -(2**62), -(2**63), 2**63 - 1):
            for place in (0, flat.numel() // 2, flat.numel() - 1):
                good, flat[place] = int(flat[place]), bad
                restore()
                expected = outcome(lambda form=form, name=name: form(kept[name].clone(), indices[name], values))
                given = outcome(lambda name=name: compiled(values, tables, indices)[name])
                flat[place] = good
                wrong += [(name, bad, place, *difference)] if (difference := differing(given, expected)) else []
        restore()
        given = compiled(values, tables, indices)
        restore()
        wrong += [("after", name)] if differing(given, module(values, tables, indices)) else []
    return wrong


def wrong_divisions() -> list[Any]:
    module = indexing_forms.divisions()
    compiled = aotc.load("divisions", module, store="store")
    wrong: list[Any] = []
    for dtype in indexing_forms.DIVIDED:
        name, limits = str(dtype).removeprefix("torch."), torch.iinfo(dtype)
        for dividend, divisor in ((7, 0), (limits.min, -1), (7, limits.max)):
            for place in (0, 50, COUNT * COLUMNS - 1):
                inputs = [
                    {
                        str(each).removeprefix("torch."): torch.full((COUNT, COLUMNS), number, dtype=each)
                        for each in indexing_forms.DIVIDED
                    }
                    for number in (7, 2)
                ]
                good = compiled(*inputs)
                wrong += [(name, "good")] if differing(good, module(*inputs)) else []
                if limits.min == 0 and divisor < 0:
                    continue
                inputs[0][name].view(-1)[place], inputs[1][name].view(-1)[place] = dividend, divisor
                given = outcome(lambda inputs=inputs: compiled(*inputs))
                if divisor != -1:
                    wrong += [] if isinstance(given, Exception) else [(name, dividend, divisor, place, "no error")]
                    continue
                if isinstance(given, Exception):
                    wrong.append((name, dividend, divisor, place, said(given)))
                    continue
                for (form, divide), result in zip(DIVISIONS.items(), given[name], strict=True):
                    if form == "truncated" and divisor == -1:  # eager's own ends the process: it must wrap
                        if result.view(-1)[place] != dividend:
                            wrong.append((name, form, place))
                    elif not torch.equal(result, divide(inputs[0][name], inputs[1][name])):
                        wrong.append((name, form, dividend, divisor, place))
    return wrong


def wrong_epilogues() -> list[Any]:
    module = indexing_forms.epilogue()
    compiled = aotc.load("epilogue", module, store="store")
    wrong: list[Any] = []
    for words, parts in ((ROWS, 1), (2**40, 1), (-1, 1), (3, 0), (3, 2)):
        x = torch.randn(COUNT, 64)
        inputs = torch.randint(ROWS, (COUNT,)), torch.randint(1, 5, (COUNT,))
        inputs[0][17], inputs[1][17] = words, parts
        difference = differing(outcome(partial(compiled, x, *inputs)), outcome(partial(module, x, *inputs)))
        wrong += [(words, parts, *difference)] if difference else []
    return wrong


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (RuntimeError, IndexError, ZeroDivisionError) as error:
        return error


def differing(given: Any, expected: Any) -> tuple[str, ...]:
    if isinstance(given, Exception) or isinstance(expected, Exception):
        same = isinstance(given, Exception) and isinstance(expected, Exception)
        return () if same else (f"eager: {said(expected)}", f"compiled: {said(given)}")
    pairs = zip(pytree.tree_leaves(given), pytree.tree_leaves(expected), strict=True)
    close = all(torch.allclose(one, other, rtol=1e-4, atol=1e-4, equal_nan=True) for one, other in pairs)
    return () if close else ("other values",)


def said(outcome: Any) -> str:
    return str(outcome)[:80] if isinstance(outcome, Exception) else "a result"


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.no_grad():
        what = sys.argv[1]
        found = (
            wrong_forms(sys.argv[2] == "end") if what == "forms"
            else wrong_divisions() if what == "divisions"
            else wrong_epilogues()
        )  # fmt: skip
    for each in found:
        print(*each)
    raise SystemExit(bool(found))
