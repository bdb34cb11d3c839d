"""What a library takes from torch's, for its record, and the lines of the model that call each operator."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from aotc.compiler.capture.replaced_functions import torchs_name
from aotc.compiler.explain_failure import line_named
from aotc.compiler.scoped import replaced
from aotc.machine.elf import unversioned_symbols
from aotc.provenance import both_operators
from aotc.reads.tensors import dtype_name
from aotc.records import LibraryImports


class OperatorCalls(NamedTuple):
    """Of all calls of an operator: its name in torch where it has one, the dtypes of the tensors, and the lines of the
    model that they come from."""

    operator: str
    dtypes: set[str]
    lines: dict[str, None]


@contextmanager
def operators_called(called: dict[str, OperatorCalls]) -> Iterator[None]:
    """While active, add to `called` each operator that Inductor writes a call of, under its function of the C shim and
    under its name."""
    from torch._inductor.scheduler import Scheduler

    write: Any = Scheduler.codegen_extern_call

    def recorded(self: Any, scheduler_node: Any) -> Any:
        result = write(self, scheduler_node)
        kernel = scheduler_node.node
        operator = _operator(kernel)
        for name in filter(None, (operator, _function(kernel))):
            calls = called.setdefault(name, OperatorCalls(operator, set(), {}))
            calls.dtypes.update(_dtypes(kernel))
            if line := _line(kernel):
                calls.lines[line] = None
        return result

    with replaced(Scheduler, "codegen_extern_call", recorded):
        yield


def _operator(kernel: Any) -> str:
    operator = getattr(kernel, "op_overload", None)
    if not isinstance(operator, torch._ops.OpOverload):
        return ""
    name: Any = operator.name
    return torchs_name(name())


def _function(kernel: Any) -> str:
    """Its function of the C shim; "" where it has none."""
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    name, device = getattr(kernel, "cpp_kernel_name", None) or "", kernel.get_device()
    if device is None or not (name.startswith("aoti_torch_") or "::" in name):
        return ""
    function: str = CppWrapperCpu.get_c_shim_func_name(name, device.type)
    return function


def _dtypes(kernel: Any) -> Iterator[str]:
    from torch._inductor import ir

    outputs = getattr(kernel, "outputs", None) or [kernel]
    for each in pytree.tree_leaves([list(kernel.inputs), outputs], is_leaf=lambda part: isinstance(part, ir.IRNode)):
        dtype = each.maybe_get_dtype() if isinstance(each, ir.IRNode) else None
        if dtype is not None:
            yield dtype_name(dtype)


def _line(kernel: Any) -> str:
    """The line of the node that it was lowered from; else that of one that is fused into it."""
    nodes = [node for node in (kernel.get_origin_node(), *(kernel.origins or ())) if node is not None]
    return next(filter(None, (line_named(node.meta.get("stack_trace") or "") for node in nodes)), "")


def imports_of(library: Path, called: Mapping[str, OperatorCalls]) -> LibraryImports:
    """What a library takes from torch's, by its symbols and by the list of the operators that it calls by name."""
    functions, listed = unversioned_symbols(library), library.with_suffix(".json")
    nodes = json.loads(listed.read_bytes())["nodes"] if listed.exists() else []
    names = [*(name for name in functions if name in called), *(node["node"]["target"] for node in nodes)]
    dtypes = {name: tuple(sorted(called[name].dtypes)) if name in called else () for name in sorted({*names})}
    return LibraryImports(tuple(sorted(functions)), dtypes)


def both_imports(one: LibraryImports | None, other: LibraryImports | None) -> LibraryImports | None:
    """Of two libraries of one unit; None unless both are known."""
    if one is None or other is None:
        return None
    operators = both_operators(one.operators, other.operators) or {}
    return LibraryImports(tuple(sorted({*one.functions, *other.functions})), operators)
