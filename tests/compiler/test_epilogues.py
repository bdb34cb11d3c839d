"""What a template shares with its neighbour, however many dimensions each counts its elements in."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
from torch._inductor.dependencies import MemoryDep, ReadWrites
from torch._inductor.scheduler import Scheduler
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from aotc.compiler.patches.performance.epilogues import neighbours_of_any_shape_offered

ELEMENTS = 2 * 3 * 8


def dep(name: str, *sizes: int, strides: tuple[int, ...] = ()) -> MemoryDep:
    """The elements of a buffer with these sizes, loop by loop; contiguous unless strides are given."""
    strides = strides or tuple(int(sympy.prod(sizes[number + 1 :])) for number in range(len(sizes)))
    loops = sympy.symbols(f"c:{len(sizes)}")
    index = sympy.Add(*(stride * loop for stride, loop in zip(strides, loops, strict=True)))
    return MemoryDep(name, index, tuple(loops), tuple(map(sympy.Integer, sizes)))


def node(reads: list[MemoryDep], writes: list[MemoryDep], *, template: bool = False) -> Any:
    accesses = ReadWrites(OrderedSet(reads), OrderedSet(writes), OrderedSet())
    return SimpleNamespace(read_writes=accesses, is_template=lambda: template)


PRODUCT = node([], [dep("product", 6, 8)], template=True)
BATCHED = node([dep("product", 2, 3, 8), dep("bias", 2, 3, 8, strides=(0, 0, 1))], [dep("activation", 2, 3, 8)])
TRANSPOSED = node([dep("product", 2, 8, 3, strides=(24, 1, 8))], [dep("activation", 2, 8, 3)])
PLAIN = node([dep("product", 6, 8)], [dep("activation", 6, 8)])


def score_of_equal_loops(
    self: Any, node1: Any, node2: Any, count_bytes: bool = True, return_is_mix_order_reduction: bool = False
) -> Any:
    """As in torch 2.11."""
    first, second = (OrderedSet(node.read_writes.reads_and_writes()) for node in (node1, node2))
    shared = sum(self.dep_size_hint(dep, count_bytes) for dep in first & second)
    return (shared, False) if return_is_mix_order_reduction else shared


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    sizes = {"product": ELEMENTS, "activation": ELEMENTS, "bias": 8}
    monkeypatch.setattr(Scheduler, "dep_size_hint", lambda self, dep, count_bytes=True: sizes[dep.name])
    monkeypatch.setattr(Scheduler, "score_fusion_memory", score_of_equal_loops)
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        yield Scheduler.__new__(Scheduler)


def test_a_product_shares_its_elements_with_a_neighbour_of_more_dimensions(scheduler: Scheduler) -> None:
    assert scheduler.score_fusion_memory(PRODUCT, BATCHED) == 0
    with neighbours_of_any_shape_offered():
        assert scheduler.score_fusion_memory(PRODUCT, BATCHED) == ELEMENTS
        assert scheduler.score_fusion_memory(BATCHED, PRODUCT) == ELEMENTS
        with_kind = scheduler.score_fusion_memory(PRODUCT, BATCHED, return_is_mix_order_reduction=True)
        assert with_kind == (ELEMENTS, False)
    assert scheduler.score_fusion_memory(PRODUCT, BATCHED) == 0


def test_another_order_of_elements_is_still_not_shared(scheduler: Scheduler) -> None:
    with neighbours_of_any_shape_offered():
        assert scheduler.score_fusion_memory(PRODUCT, TRANSPOSED) == 0


def test_kernels_that_inductor_compares_itself_are_left_to_it(scheduler: Scheduler) -> None:
    with neighbours_of_any_shape_offered():
        assert scheduler.score_fusion_memory(PRODUCT, PLAIN) == ELEMENTS
        assert scheduler.score_fusion_memory(PLAIN, BATCHED) == 0
