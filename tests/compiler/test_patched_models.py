"""What the patches of torch are for: each part of a model, compiled in one unit with the others, is eager's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import patched_models
import pytest
import torch
import yaml
from in_process import build_here
from patched_models import PARTS
from torch import Tensor
from torch.utils._pytree import tree_leaves

import aotc

Inputs = dict[str, Tensor]
SPECIAL = (0.0, -0.0, 0.1, 0.3, 0.9, 1.0, -1.0, 3.0, 5.0, -7.0, 49.0, 1e6, float("inf"), -float("inf"), float("nan"))
PAIRS = torch.tensor([*itertools.product(SPECIAL, SPECIAL)], dtype=torch.float64)


class Compiled:
    """The parts' compiled code; `inputs` are some that every part takes."""

    def __init__(self, store: Path) -> None:
        self.module = patched_models.Model().eval()
        self.compiled = aotc.load("patched", self.module, store=store)
        self.inputs = {name: next(CALLS[name]()) for name in PARTS}

    def call(self, name: str, inputs: Inputs) -> Any:
        others = {other: {key: value.clone() for key, value in given.items()} for other, given in self.inputs.items()}
        given = {other: dict(sorted(values.items())) for other, values in sorted({**others, name: inputs}.items())}
        with torch.no_grad():  # in the manifest's order: of a model with a loop, the build does not try others
            return self.compiled(given)[name]

    def part(self, name: str) -> Any:
        return self.module.parts[name]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("patched")
    (folder / "patched_models.py").write_text(Path(patched_models.__file__).read_text())
    (folder / "patched.yaml").write_text(yaml.safe_dump(patched_models.manifest(), sort_keys=False))
    report = build_here(folder / "patched.yaml", folder / "store", jobs=1)
    assert not report.failed, [outcome.error for outcome in report.failed]
    return Compiled(folder / "store")


def rows(*sizes: int, width: int) -> Callable[[], Iterator[Inputs]]:
    return lambda: ({"x": torch.randn(size, width)} for size in sizes)


def repeated(**shapes: Sequence[int]) -> Callable[[], Iterator[Inputs]]:
    return lambda: ({name: torch.randn(*shape) for name, shape in shapes.items()} for _ in range(3))


def quotients(dtype: torch.dtype) -> Iterator[Inputs]:
    """Of what no power of two divides, by infinity, by zero, and by numbers."""
    x, y = PAIRS.to(dtype).T.contiguous()
    for count in (len(PAIRS), 7):
        yield {"x": x[-count:], "y": y[-count:], "n": torch.arange(1, count + 1)}


def complex_numbers() -> Iterator[Inputs]:
    for n in (2, 4, 5):
        z = torch.randn(n, 3, dtype=torch.complex64)
        z[0, 0], z[1, 1] = 1j, 2
        yield {"z": z, "x": torch.randn(n, 3)}


CALLS: dict[str, Callable[[], Iterator[Inputs]]] = {
    "assigned": rows(2, 4, 7, width=3),
    "masks": rows(2, 4, 7, width=3),
    "powers": lambda: (
        # Also by negative ones, and where the result is too large for its dtype, or for a float.
        {"x": torch.tensor(values)}
        for values in ([-70, -1, 0, 1, 2, 31, 62, 63, 64, 100], [5, 6])
    ),
    "quotients_float32": lambda: quotients(torch.float32),
    "quotients_float64": lambda: quotients(torch.float64),
    "complex": complex_numbers,
    "added": lambda: iter(
        [
            {
                "hidden": torch.randn(6, 8).bfloat16(),
                "experts": torch.randn(6, 8).bfloat16(),
                "tokens": torch.tensor([0, 5, 3, 3, 1, 0]),
            }
        ]
    ),
    "views": rows(8, 11, 16, width=5),
    "diagonals_4": rows(3, 5, 6, 7, 12, width=6),
    "diagonals_9": rows(3, 5, 6, 7, 12, width=6),
    "pool": lambda: ({"input": torch.randn(1, 2, height, 6)} for height in (4, 5, 11, 12, 20)),
    "joined": lambda: ({"x": torch.randn(n, 5), "index": torch.tensor([3, 0, 3])} for n in (4, 7)),
    "beside_nothing": lambda: (
        {
            "x": torch.randn(n, 5, 4, 8),
            "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        }
        for n in (2, 5)
    ),
    "rows_read": lambda: (
        {"x": torch.randn(4, 6), "index": torch.tensor(order)} for order in ([3, 1, 0, 2], [1, 2, 3, 0], [3, 2, 1, 0])
    ),
    "ordered": repeated(x=(4, 5)),
    "shifted": repeated(x=(2, 2)),
    "kept": lambda: (
        {"x": torch.full((1, 3), float(step)), "at": torch.tensor([step]), "memory": torch.ones(4, 3)}
        for step in (1, 3, 2)
    ),
    "scanned": lambda: (
        {"x": torch.randn(rows, 3), "y": torch.randn(more, 3)} for rows, more in ((3, 5), (2, 2), (6, 4))
    ),
    "repeats": lambda: iter([{"x": torch.randn(3, 4), "counts": torch.tensor([2, 2, 2])}]),
    "ranged_repeats": lambda: iter([{"x": torch.randn(3, 4), "counts": torch.tensor([2, 2, 2])}]),
}
EXACT = {"powers", "quotients_float32", "quotients_float64", "masks", "added"}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_gives_what_eager_gives_and_writes_what_eager_writes(patched: Compiled, name: str) -> None:
    """In values, strides, the inputs and the buffers."""
    eager, exactly = copy.deepcopy(patched.part(name)), {"rtol": 0, "atol": 0} if name in EXACT else {}
    for inputs in CALLS[name]():
        given = {key: value.clone() for key, value in inputs.items()}
        with torch.no_grad():
            expected = eager(**inputs)
        results = patched.call(name, given)
        torch.testing.assert_close(results, expected, equal_nan=True, **exactly)
        torch.testing.assert_close(given, inputs, equal_nan=True)
        torch.testing.assert_close(dict(patched.part(name).named_buffers()), dict(eager.named_buffers()))
        if name == "beside_nothing":  # its parts lie as in eager
            assert [each.stride() for each in results] == [each.stride() for each in expected]


def test_a_result_stays_as_it_is_though_a_buffer_or_an_input_became_equal_to_it(patched: Compiled) -> None:
    eager = copy.deepcopy(patched.part("kept"))
    memories = (torch.ones(4, 3), torch.ones(4, 3))
    results: list[list[Any]] = [[], []]
    for step in (1, 3, 2):
        x, at = torch.full((1, 3), float(step)), torch.tensor([step])
        results[0].append(patched.call("kept", {"x": x, "at": at, "memory": memories[0]}))
        with torch.no_grad():
            results[1].append(eager(x, at, memories[1]))
    torch.testing.assert_close(*results)
    for found in results:
        for tensor in tree_leaves(found):
            tensor.add_(100)  # the caller may write to a result: to its views, and to nothing else
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*memories)
    torch.testing.assert_close(dict(patched.part("kept").named_buffers()), dict(eager.named_buffers()))


def test_a_view_that_does_not_begin_where_its_memory_does_is_a_miss(patched: Compiled) -> None:
    with pytest.raises(aotc.MissError, match=r"from the beginning of its storage.*which is 5 elements behind"):
        patched.call("views", {"x": torch.randn(9, 5)[1:]})


@pytest.mark.parametrize("name", ["repeats", "ranged_repeats"])
def test_repeat_interleave_counts_that_do_not_add_up_are_an_error(patched: Compiled, name: str) -> None:
    """(Eager itself writes beyond its result for some negative counts.)"""
    x, eager = torch.randn(3, 4), copy.deepcopy(patched.part(name))
    for counted in ([2, 2, 2], [0, 6, 0], [1, 1, 4]):
        for wrong in ([1, 1, 2], [1, 1, 6], [7, -1, 0], [-1, 0, 7]):
            with pytest.raises(aotc.LibraryError):
                patched.call(name, {"x": x, "counts": torch.tensor(wrong)})
        right = torch.tensor(counted)
        torch.testing.assert_close(patched.call(name, {"x": x, "counts": right}), eager(x, right))
