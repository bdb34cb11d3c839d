"""[inductor] An index out of bounds ends the process.

Inductor's C++ kernels check each index from a tensor with a throw, which ends the process inside OpenMP's loops, and
access memory with the unchecked index.

Inductor leaves out checks that it has proved, from bounds that ignore integer overflows: `x.abs()` may be negative, and
so may `x * x`. It also drops the checks in a matrix product's epilogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.shared.generated_code import NOTED, any_of_mask, count_of, mask_of, reproduce_index_error
from aotc.compiler.patches.shared.operators import INDEXING

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0014",
    operators=INDEXING,
    upstream="pytorch#195402",
    targets=(
        "torch._inductor.codegen.common:CSEProxy.indirect_indexing(var, size, check, wrap_neg)",
        "torch._inductor.codegen.common:CSEProxy.load(name, index)",
        "torch._inductor.codegen.common:CSEProxy.store(name, index, value, mode)",
        "torch._inductor.codegen.cpp:CppKernel.check_bounds(expr, size, lower, upper)",
        "torch._inductor.codegen.cpp:CppKernel.device_assert_async(cond, msg)",
        "torch._inductor.index_propagation:IndexPropagation.indirect_indexing(index, size, check, wrap_neg)",
        "torch._inductor.codegen.cpp:CppScheduling.can_fuse_vertical(node1, node2)",
    ),
)

_CHECKING = ("indirect_indexing", "check_bounds", "device_assert_async", "floordiv", "truncdiv", "mod", "remainder")
"""Operations of a loop that can find an error."""


@contextmanager
def apply() -> Iterator[None]:
    """While active, an index out of bounds in generated C++ kernels raises an error of the call and accesses no memory.

    Each such index becomes a value that *is* within bounds (0 where it was not), and this value addresses memory: in
    any form of kernel, loads and stores depend on the check. After an error, stores by an index are skipped. All checks
    are made, and an operation that checks a value is not fused as an epilogue.
    """
    from torch._inductor.codegen.common import CSEProxy
    from torch._inductor.codegen.cpp import CppKernel, CppScheduling
    from torch._inductor.index_propagation import IndexPropagation

    changes: dict[Any, dict[str, Any]] = {
        CSEProxy: {"indirect_indexing": _checked, "load": _guarded_load, "store": _guarded_store},
        CppKernel: {"check_bounds": _noted_bounds, "device_assert_async": _noted_assertion},
        IndexPropagation: {"indirect_indexing": _as_a_value},
        CppScheduling: {"can_fuse_vertical": _no_epilogue_that_checks},
    }
    with ExitStack() as stack:
        for owner, methods in changes.items():
            for name, changed in methods.items():
                stack.enter_context(replaced(owner, name, changed(getattr(owner, name))))
        yield


def _checked(original: Any) -> Any:
    """CSEProxy.indirect_indexing whose symbol is a value within bounds."""
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.utils import generate_assert
    from torch._inductor.virtualized import V
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges

    def indirect_indexing(self: Any, var: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> Any:
        kernel: Any = self.kernel
        if not (isinstance(kernel, CppKernel) and generate_assert(check)):
            return original(self, var, size, check, wrap_neg)
        values: Any = kernel.cse
        index = values.varname_map[original(self, var, size, False, wrap_neg).name]
        bound = kernel.sexpr(kernel.rename_indexing(size))
        arguments = f"static_cast<int64_t>({bound})"
        message = f'{NOTED}, "index out of bounds: 0 <= index < {size}"'
        if index.is_vec:
            call = f"checked_indices({index}, {arguments}, {count_of(kernel)}, {mask_of(kernel)}, {message})"
        else:
            call = f"checked_index({index}, {arguments}, {any_of_mask(kernel)}, {message})"
        last = size - 1 if isinstance(size, int) or getattr(size, "is_number", False) else int_oo
        bounds = ValueRanges(0, last) if last >= 0 else ValueRanges.unknown_int()
        checked = values.generate(kernel.compute, f"aotc::{call}", bounds=bounds, dtype=index.dtype, shape=index.shape)
        checked.update_on_args("checked_index", (index,), {})
        if not V.graph.sizevars.statically_known_gt(size, 0):
            checked.aotc_of_nothing_perhaps = True
        return self.parent_handler.indirect_indexing(checked, size, False)

    return indirect_indexing


def _guarded_load(original: Any) -> Any:
    """CSEProxy.load that reads nothing after an error if the tensor may be empty.

    Of any other tensor, element 0 may be read."""
    from torch._inductor.codegen.cpp import CppKernel

    def load(self: Any, name: str, index: Any) -> Any:
        if not (isinstance(self.kernel, CppKernel) and any(_of_nothing_perhaps(self.kernel, index))):
            return original(self, name, index)
        memory: Any = self.kernel.args.input
        with mock.patch.object(self.kernel.args, "input", lambda name: f"(aotc::Guarded{{{memory(name)}, {NOTED}}})"):
            return original(self, name, index)

    return load


def _of_nothing_perhaps(kernel: Any, index: Any) -> Iterator[bool]:
    for symbol in index.free_symbols:
        yield hasattr(kernel.cse.varname_map.get(symbol.name), "aotc_of_nothing_perhaps")


def _guarded_store(original: Any) -> Any:
    """CSEProxy.store that skips stores by an index after an error."""
    from torch._inductor.codegen.common import DeferredLine
    from torch._inductor.codegen.cpp import CppKernel
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    def store(self: Any, name: str, index: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = self.kernel
        if not (isinstance(kernel, CppKernel) and any(symbol_is_type(each, SymT.TMP) for each in index.free_symbols)):
            return original(self, name, index, *args, **kwargs)
        known = {*kernel.cse._cache}
        kernel.stores.writeline(DeferredLine(name, f"if (C10_LIKELY(!{NOTED}.noted())) {{"))
        original(self, name, index, *args, **kwargs)
        kernel.stores.writeline(DeferredLine(name, "}"))
        for inside in kernel.cse._cache.keys() - known:  # a load would reuse them, but precedes the stores
            del kernel.cse._cache[inside]
        return None

    return store


def _noted_bounds(original: Any) -> Any:
    """CppKernel.check_bounds that records an error instead of throwing."""

    def check_bounds(self: Any, *args: Any, **kwargs: Any) -> None:
        asserted = self.indirect_assert

        def assertion(*given: Any, **more: Any) -> str:
            condition = str(asserted(*given, **more)).removeprefix(f"{self.assert_function}(")
            condition, message = condition.removesuffix(")").rsplit(', "', 1)
            return f'if (C10_UNLIKELY(!({condition}))) {NOTED}.note("{message})'

        with mock.patch.object(self, "indirect_assert", assertion):
            original(self, *args, **kwargs)

    return check_bounds


def _noted_assertion(original: Any) -> Any:
    """CppKernel.device_assert_async that records an error instead of throwing."""

    def device_assert_async(self: Any, cond: Any, msg: str) -> None:
        holds = f"aotc::all_hold({cond}, {count_of(self) if cond.is_vec else 1}, {mask_of(self)})"
        self.compute.writeline(f'if (C10_UNLIKELY(!{holds})) {NOTED}.note("{msg}");')

    return device_assert_async


def _as_a_value(original: Any) -> Any:
    """IndexPropagation.indirect_indexing that turns an index whose bounds cannot be proved into a value.

    An expression of sizes and loop variables would address memory without its check."""
    from torch._inductor.utils import generate_assert
    from torch._inductor.virtualized import V

    def indirect_indexing(self: Any, index: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> Any:
        import sympy  # type: ignore[import-untyped]

        if getattr(index, "is_symbolic", False) and generate_assert(check) and V.graph.device_types <= {"cpu"}:
            expression = sympy.sympify(index.value.expr)
            lower = self.statically_true(expression >= 0) or (wrap_neg and self.statically_true(-size <= expression))
            if not (lower and self.statically_true(expression < size)):
                return self.fallback("indirect_indexing", (index, size, check, wrap_neg), {}).value
        return original(self, index, size, check, wrap_neg)

    return indirect_indexing


def _no_epilogue_that_checks(original: Any) -> Any:
    """CppScheduling.can_fuse_vertical that does not fuse operations with checks into templates."""

    def can_fuse_vertical(self: Any, node1: Any, node2: Any) -> bool:
        if node1.is_template() and any(_checks(node) for node in node2.get_nodes()):
            return False
        return bool(original(self, node1, node2))

    return can_fuse_vertical


def _checks(node: Any) -> bool:
    from torch._inductor.scheduler import SchedulerNode

    return isinstance(node, SchedulerNode) and any(node._body.has_op(name) for name in _CHECKING)


reproduce = reproduce_index_error
