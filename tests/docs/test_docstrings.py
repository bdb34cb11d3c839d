"""The public API's docstrings: each has an example, and the examples run."""

from __future__ import annotations

import copy
import doctest
import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import aotc
from aotc.runtime.stats import BucketStats, Stats
from examples.models import transformer_block

CALLED = [aotc.load, aotc.prepare, aotc.attach, aotc.record, aotc.compile, aotc.fetch, aotc.Compiled]
METHODS = ["explain", "update_weights", "refresh", "stats", "buckets"]
ERRORS = [aotc.AotcError, aotc.ReferenceFormatError, aotc.NotFoundError, aotc.BindError, aotc.MissError]
SHOWN: list[Any] = [*CALLED, *(getattr(aotc.Compiled, name) for name in METHODS), *ERRORS]


def name_of(shown: Any) -> str:
    return str(shown.fget.__qualname__ if isinstance(shown, property) else shown.__qualname__)


@pytest.mark.parametrize("shown", SHOWN, ids=name_of)
def test_an_example_gives_what_it_says(
    shown: Any, quickstart_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(quickstart_store, tmp_path / "aotc-store")
    monkeypatch.chdir(tmp_path)
    module = transformer_block(width=256, heads=4).eval().requires_grad_(False)
    known = {"aotc": aotc, "torch": torch, "copy": copy, "Path": Path, "module": module}
    known["compiled"] = aotc.load("aotc-store#quickstart", module)
    text = inspect.getdoc(shown) or ""
    test = doctest.DocTestParser().get_doctest(text, known, name_of(shown), None, None)
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=flags).run(test, out=said.append)
    assert result.attempted and not result.failed, "".join(said)


def test_all_that_is_public_is_described() -> None:
    public = [getattr(aotc, name) for name in aotc.__all__ if name != "__version__"]
    methods = [value for name, value in vars(aotc.Compiled).items() if not name.startswith("_") and callable(value)]
    methods = [method for method in methods if not method.__name__.startswith("_")]  # those that refuse a hook
    for shown in (*public, *methods, Stats, BucketStats, Stats.counters):
        assert inspect.getdoc(shown), shown
    assert {method.__name__ for method in methods} <= {*METHODS}
