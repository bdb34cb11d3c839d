"""The C++ compiles of a unit: the wrapper in the background, the link after it, its failure where somebody sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from torch._inductor.cpp_builder import CppBuilder

from aotc.build.cpp import compiling_side_by_side

WRAPPER, KERNEL, LIBRARY = "c1.wrapper.o", "c2.kernel.o", "c1.wrapper.so"

Compile = Callable[[str], None]


class Builder(CppBuilder):
    """Builds nothing: `compile` stands for the C++ compiler."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_target_file_path(self) -> str:
        return self.target


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Compile], None]]:
    yield lambda compile: monkeypatch.setattr(CppBuilder, "build", lambda builder: compile(builder.target))


def test_kernels_compile_beside_the_wrapper_and_the_link_waits_for_both(
    compile_with: Callable[[Compile], None],
) -> None:
    kernels_begun, done = threading.Event(), []

    def compile(target: str) -> None:
        if target == KERNEL:
            kernels_begun.set()
        if target == WRAPPER:
            assert kernels_begun.wait(60), "the kernels wait for the wrapper"
        done.append(target)

    compile_with(compile)
    with compiling_side_by_side():
        for target in (WRAPPER, KERNEL, LIBRARY):
            Builder(target).build()
    assert sorted(done[:2]) == sorted([WRAPPER, KERNEL]) and done[2] == LIBRARY


def test_a_wrapper_that_does_not_compile_is_the_link_s_error(compile_with: Callable[[Compile], None]) -> None:
    linked = []

    def compile(target: str) -> None:
        if target == WRAPPER:
            raise RuntimeError("is too big to optimize")
        linked.extend([target] if target == LIBRARY else [])

    compile_with(compile)
    with compiling_side_by_side():
        Builder(WRAPPER).build()
        Builder(KERNEL).build()
        with pytest.raises(RuntimeError, match="too big"):
            Builder(LIBRARY).build()
    assert not linked
