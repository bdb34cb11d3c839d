"""Calls that are padded, that write, and that give views, in a process without torch: against eager, and against the
errors of the loader with torch."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from calls_without_torch import Part, leaves_of, parts_made, whose_memory
from processes import ZOO, finish, start
from test_standalone import module_of

import aotc
from aotc.errors import MissError

HERE = Path(__file__).parent
Call = tuple[tuple[Any, ...], dict[str, Any]]
Case = tuple[str, Callable[[], torch.nn.Module], list[Call]]


@functools.cache
def models(file: str) -> Any:
    return module_of(ZOO / file, f"{file.partition('.')[0]}_without_torch")


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(3)
    module = next(
        getattr(models(file), name) for file in ("models.py", "shape_models.py") if hasattr(models(file), name)
    )
    return module().eval()  # type: ignore[no-any-return]


def of(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def pooled(batch: int, seq: int) -> Call:
    return of(torch.randint(0, 32, (batch, seq)), torch.ones(batch, seq, dtype=torch.bool))


def rows(count: int, *, turned: bool = False) -> Call:
    return of(*(torch.randn(6, count).t() if turned else torch.randn(count, 6) for _ in range(2)))


def semantics(**more: Any) -> Call:
    return of(batch={"x": torch.randn(2, 4), "flags": torch.tensor([True, False])}, state=torch.arange(3), **more)


def cached(position: int) -> Call:
    return of(torch.randn(1, 4), torch.tensor(position))


torch.manual_seed(2)
MIXED = torch.randn(8, 6)
CASES: dict[str, Case] = {
    "pooled": (
        "pooled",
        lambda: made("Pooled"),
        [pooled(4, 16), pooled(2, 5), pooled(1, 1), pooled(0, 5), pooled(4, 15)],
    ),
    "stepped": (
        "stepped",
        lambda: made("Pooled"),
        [pooled(4, 8), pooled(4, 13), pooled(3, 17), pooled(1, 32), pooled(2, 3)],
    ),
    "grey": ("grey", lambda: made("Grey"), [of(torch.randn(n, 1, 8, 8)) for n in (0, 1, 3, 4, 6, 8)]),
    "ranged": ("ranged", lambda: made("Block"), [of(torch.randn(1, n, 32)) for n in (1, 77, 512)]),
    "accumulating": (
        "accumulating",
        lambda: made("Accumulating"),
        [
            *(rows(n, turned=turned) for n in (0, 1, 3, 4) for turned in (False, True)),
            of(Part(MIXED, (4, 6), (12, 1)), Part(MIXED, (4, 6), (12, 1), 6)),  # the rows of one, between the other's
        ],
    ),
    "semantics": ("semantics", lambda: made("Semantics"), [semantics(), semantics(), semantics(flip=False)]),
    "cache": ("cache", lambda: made("KeyValueCache"), [cached(position) for position in (0, 1, 2, 1)]),
    "history": ("history", lambda: made("History"), [of(*(torch.randn(4) for _ in range(3))) for _ in range(3)]),
    "assigned": ("assigned", lambda: made("Assigned"), [of(torch.randn(4)) for _ in range(3)]),
}
"""The model of the zoo, what makes it, and calls, in turn."""

SAME = torch.ones(8, 6)
WHOLE, BEHIND = Part(SAME, (4, 6), (6, 1)), Part(SAME, (4, 6), (6, 1), 24)
MISSES: dict[str, Case] = {
    "pooled": ("pooled", lambda: made("Pooled"), [pooled(5, 3), pooled(2, 17), pooled(9, 99)]),
    "stepped": ("stepped", lambda: made("Pooled"), [pooled(4, 33), pooled(5, 8)]),
    "grey": (
        "grey",
        lambda: made("Grey"),
        [of(torch.randn(9, 1, 8, 8)), of(torch.randn(3, 2, 8, 8)), of(torch.randn(3))],
    ),
    "ranged": ("ranged", lambda: made("Block"), [of(torch.randn(1, 0, 32)), of(torch.randn(1, 600, 32).double())]),
    "accumulating": (
        "accumulating",
        lambda: made("Accumulating"),
        [
            of(WHOLE, WHOLE),
            of(Part(SAME, (3, 6), (6, 1)), Part(SAME, (3, 6), (6, 1), 6)),
            of(Part(SAME, (4, 6), (0, 1)), BEHIND),
            of(Part(SAME, (4, 6), (12, 1)), Part(SAME, (4, 6), (12, 1), 5)),
            of(WHOLE, Part(SAME.int(), (4, 6), (6, 1))),
            rows(5),
        ],
    ),
    "semantics": (
        "semantics",
        lambda: made("Semantics"),
        [semantics(scale=3.0), semantics(flip=0), of({}, torch.arange(3))],
    ),
}
"""Calls that no bucket takes, of the same."""


WHOLES: dict[int, numpy.ndarray] = {}
"""One array for each whole tensor, by its id."""


def in_torch(call: Call) -> Call:
    return parts_made(call, lambda part: part.whole.as_strided(part.shape, part.stride, part.offset))  # type: ignore[no-any-return]


def in_numpy(value: Any) -> Any:
    if isinstance(value, Part):
        return value._replace(whole=WHOLES.setdefault(id(value.whole), value.whole.numpy()))
    if isinstance(value, torch.Tensor):
        return value.view(torch.uint16).numpy() if value.dtype is torch.bfloat16 else value.numpy()
    if isinstance(value, dict):
        return {key: in_numpy(item) for key, item in value.items()}
    return type(value)(map(in_numpy, value)) if isinstance(value, list | tuple) else value


@pytest.fixture(scope="module")
def told(zoo_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of the calls of `CASES` and `MISSES`, of all in one process."""
    folder = tmp_path_factory.mktemp("calls")
    asked = {}
    for kind, cases in (("runs", CASES), ("misses", MISSES)):
        for name, (model, make, calls) in cases.items():
            weights = in_numpy(dict(make().state_dict()))
            asked[f"{kind} {name}"] = f"{zoo_store}#{model}", weights, [in_numpy(list(call)) for call in calls]
    (folder / "asked.pickle").write_bytes(pickle.dumps(asked))
    ran = finish(start(HERE / "calls_without_torch.py", folder))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    loaded: dict[str, Any] = pickle.loads((folder / "told.pickle").read_bytes())
    assert loaded["imported"] == [] and "_cpu.abi3.so" in loaded["mapped"]
    assert not [name for name in loaded["mapped"] if "torch" in name or "c10" in name]
    return loaded


def check_equal(came: Any, expected: Any) -> None:
    """Structures, values and dtypes."""
    assert type(came) is type(expected)
    for one, other in zip(leaves_of(came), leaves_of(expected), strict=True):
        if isinstance(other, numpy.ndarray):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert numpy.allclose(one, other, atol=2e-5, equal_nan=True)
        else:
            assert type(one) is type(other) and one == other


@pytest.mark.parametrize("name", CASES)
def test_results_writes_and_memory_are_those_of_eager(told: dict[str, Any], name: str) -> None:
    """Over several calls: what one leaves in a buffer, the next one finds."""
    _, make, calls = CASES[name]
    module = make()
    for (args, kwargs), came in zip(map(in_torch, calls), told[f"runs {name}"], strict=True):
        args, kwargs = copy.deepcopy(args), copy.deepcopy(kwargs)
        with torch.no_grad():
            result = module(*args, **kwargs)
        given, parts = leaves_of([args, kwargs]), leaves_of(result)
        check_equal(came["result"], in_numpy(result))
        check_equal(came["given"], in_numpy(given))
        assert came["is"] == [next((at for at, each in enumerate(given) if each is part), None) for part in parts]
        arrays = in_numpy(given)
        assert came["memory"] == [whose_memory(part, arrays) for part in in_numpy(parts)]
        assert came["ran"] == [came["bucket"]]


@pytest.mark.parametrize("name", CASES)
def test_the_same_bucket_runs_with_the_same_pads_as_with_torch(
    told: dict[str, Any], zoo_store: Path, zoo: Any, name: str
) -> None:
    model, make, calls = CASES[name]
    compiled = aotc.load(f"{zoo_store}#{model}", weights=make().state_dict())
    for (args, kwargs), came in zip(map(in_torch, calls), told[f"runs {name}"], strict=True):
        explained = compiled.explain(*args, **kwargs)
        assert (came["kind"], came["bucket"], came["pads"]) == (explained.kind, explained.bucket, explained.pads)
        assert came["padded"] == bool(explained.pads)


@pytest.mark.parametrize("name", MISSES)
def test_a_miss_says_what_it_says_with_torch(told: dict[str, Any], zoo_store: Path, zoo: Any, name: str) -> None:
    model, make, calls = MISSES[name]
    compiled = aotc.load(f"{zoo_store}#{model}", weights=make().state_dict())
    for (args, kwargs), came in zip(map(in_torch, calls), told[f"misses {name}"], strict=True):
        with pytest.raises(MissError) as caught, torch.no_grad():
            compiled(*args, **kwargs)
        assert came["kind"] == "miss"
        assert came["error"] == [(issue.where, issue.message) for issue in caught.value.issues]
        assert came["misses"] == 1
