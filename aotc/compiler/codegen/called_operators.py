"""Operators that a library calls by name, through torch: what torch cannot pass to them is refused with its line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aotc.compiler.explain_failure import line_named
from aotc.compiler.scoped import replaced
from aotc.errors import BuildError

_EMPTY = (
    "leave the argument out, or name the sizes or dims: with an empty list most operators give back what they are given"
)
_COMPLEX = (
    "give the operator a tensor of that number, as `torch.full_like(x, 1j)`, or compute with real and imaginary parts "
    "(torch.view_as_real)"
)


@contextmanager
def calls_checked() -> Iterator[None]:
    """While active, a call of an operator with an argument that a library cannot pass to it raises BuildError.

    An empty list of integers arrives as None, and the call fails when it is run. Some operators take a complex number,
    and Inductor fails when it writes the call.
    """
    from torch._inductor import ir

    write: Callable[..., Any] = ir.FallbackKernel.codegen
    export: Callable[..., Any] = ir.FallbackKernel.export_extern_kernel_node

    def exported(kernel: Any) -> Any:
        if any(isinstance(value, list | tuple) and not value for value in _integer_lists(kernel)):
            raise _refused(kernel, "an empty list", _EMPTY)
        return export(kernel)

    def written(kernel: Any, *arguments: Any) -> Any:
        try:
            return write(kernel, *arguments)
        except BuildError:
            raise
        except Exception as error:
            numbers = [value for _, value in _arguments(kernel) if isinstance(value, complex)]
            if not numbers:
                raise
            raise _refused(kernel, f"the complex number {numbers[0]}", _COMPLEX) from error

    with (
        replaced(ir.FallbackKernel, "codegen", written),
        replaced(ir.FallbackKernel, "export_extern_kernel_node", exported),
    ):
        yield


def _integer_lists(kernel: Any) -> Iterator[Any]:
    """The arguments of a call for which the operator's schema has a list of integers, and not None too."""
    for argument, value in _arguments(kernel):
        kind = argument.real_type
        if isinstance(kind, torch.ListType) and isinstance(kind.getElementType(), torch.IntType | torch.SymIntType):
            yield value


def _arguments(kernel: Any) -> list[tuple[Any, Any]]:
    """Each argument of a call, with its place in the operator's schema; none for an operator without one."""
    if not isinstance(kernel.op_overload, torch._ops.OpOverload):
        return []
    schema = kernel.op_overload._schema.arguments
    args, kwargs = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
    by_name = {argument.name: argument for argument in schema}
    given = {**kernel.kwargs, **kwargs}
    return [*zip(schema, args, strict=False), *((by_name[name], given[name]) for name in given if name in by_name)]


def _refused(kernel: Any, what: str, hint: str) -> BuildError:
    origins = [kernel.get_origin_node(), *(kernel.origins or ())]
    stacks = [node.meta.get("stack_trace") or "" for node in origins if node is not None]
    lines = [line for stack in stacks if (line := line_named(stack))]
    return BuildError(
        f"the model calls {kernel.op_overload} with {what}, which a compiled library cannot pass to it",
        hint=hint,
        stage="compile",
        source=lines[0] if lines else "",
    )
