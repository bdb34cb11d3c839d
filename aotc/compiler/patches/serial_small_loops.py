"""Loops with little work run on the calling thread, however many threads there are.

With a known number of threads, Inductor makes a loop parallel only if each thread gets at least `cpp.min_chunk_size`
iterations. With `cpp.dynamic_threads`, the number is known only in a service, and every loop, even of 64 elements,
begins and ends a team of threads: milliseconds on a busy machine. Here the same rule is applied at run time: a parallel
region starts its team only if one of its loops has work for all threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced

PATCH = Patch(
    __name__,
    kind="performance",
    targets=(
        "torch._inductor.codegen.cpp:CppKernel.codegen_loops_impl(loop_nest, code, worksharing)",
        "torch._inductor.codegen.cpp:WorkSharing.parallel(threads)",
    ),
)

_PARALLEL = "#pragma omp parallel"


@contextmanager
def apply() -> Iterator[None]:
    """While active, OpenMP regions in C++ kernels for an unknown number of threads get an `if` clause."""
    import sympy  # type: ignore[import-untyped]
    from torch._inductor import config
    from torch._inductor.codegen import cpp_utils
    from torch._inductor.codegen.cpp import CppKernel, OuterLoopFusedKernel, WorkSharing
    from torch._inductor.utils import sympy_product

    cexpr_index: Any = cpp_utils.cexpr_index
    codegen_loops: Any = CppKernel.codegen_loops_impl
    parallel: Any = WorkSharing.parallel

    def noting_work(self: Any, loop_nest: Any, code: Any, worksharing: Any) -> None:
        nests = loop_nest.kernel.inner if isinstance(loop_nest.kernel, OuterLoopFusedKernel) else [loop_nest]
        worksharing.work = [sympy_product(nest.get_kernel().ranges) for nest in nests]
        codegen_loops(self, loop_nest, code, worksharing)

    def conditional(self: Any, threads: Any) -> None:
        opens = not (self.in_parallel and threads == self.num_threads)
        parallel(self, threads)
        if not config.cpp.dynamic_threads:
            return
        lines = self.code._lines
        if opens:
            self.works = []
            self.pragma = max(at for at, line in enumerate(lines) if str(line).strip().startswith(_PARALLEL))
        self.works += self.work
        known = [work for work in self.works if isinstance(work, sympy.Integer)]
        works = [*([max(known)] if known else []), *dict.fromkeys(work for work in self.works if work not in known)]
        least = f"{config.cpp.min_chunk_size}L * omp_get_max_threads()"
        wanted = " || ".join(f"{cexpr_index(work)} >= {least}" for work in works)
        indent = str(lines[self.pragma]).partition("#")[0]
        lines[self.pragma] = f"{indent}{_PARALLEL} if({wanted})"

    with (
        replaced(CppKernel, "codegen_loops_impl", noting_work),
        replaced(WorkSharing, "parallel", conditional),
    ):
        yield
