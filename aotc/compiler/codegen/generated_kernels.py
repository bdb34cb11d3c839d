"""The kernels that Inductor generated for a unit, for its report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aotc.compiler.scoped import replaced
from aotc.provenance import Kernel


@contextmanager
def kernels_recorded(kernels: dict[str, tuple[str, str]]) -> Iterator[None]:
    """While active, collect every kernel that Inductor defines: name → (source, comment with the fused operators).

    Inductor defines Triton kernels with such a comment; for C++ kernels the comment is made here in the same way.
    """
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.utils import get_kernel_metadata
    from torch._inductor.virtualized import V

    define: Any = PythonWrapperCodegen.define_kernel
    define_cpp: Any = CppScheduling.define_kernel

    def recorded(self: Any, kernel_name: str, kernel_body: str, metadata: str | None = None, *a: Any, **k: Any) -> Any:
        kernels[kernel_name] = (kernel_body, metadata or "")
        return define(self, kernel_name, kernel_body, metadata, *a, **k)

    def recorded_cpp(self: Any, src_code: str, nodes: Any, *a: Any, **k: Any) -> Any:
        name = define_cpp(self, src_code, nodes, *a, **k)
        source, comment = kernels.get(name, (src_code, ""))
        kernels[name] = (source, comment or get_kernel_metadata(nodes, V.graph.wrapper_code)[0])
        return name

    with (
        replaced(PythonWrapperCodegen, "define_kernel", recorded),
        replaced(CppScheduling, "define_kernel", recorded_cpp),
    ):
        yield


_ORIGINAL = re.compile(r"Original ATen: \[(?P<names>[^\]]*)\]")
_EXTERN = re.compile(r"\baoti_torch_(?:cpu|cuda)_(?P<name>\w+)\(")
_BODY = re.compile(r"run_impl\(", re.MULTILINE)
_HOUSEKEEPING = ("empty_strided", "zero_", "device_type")


def kernels_of(defined: Mapping[str, tuple[str, str]], wrapper: str) -> Iterator[Kernel]:
    """The generated kernels with their operators, then torch's operators, each with its number of calls per run."""
    calls = Counter(name.removeprefix("call_") for name in re.findall(r"\b(\w+)\(", _run_body(wrapper)))
    for name, (source, comment) in sorted(defined.items()):
        operators = [
            operator.strip().removeprefix("aten.")
            for match in _ORIGINAL.finditer(comment)
            for operator in match["names"].split(",")
            if operator.strip()
        ]
        kind = "triton" if "@triton.jit" in source else "cpp"  # a user's own kernel has a name of its own
        yield Kernel(name, kind, calls.get(name, 1), tuple(dict.fromkeys(operators)), source)
    for name, count in sorted(Counter(_EXTERN.findall(_run_body(wrapper))).items()):
        operator = name.removesuffix("_out").strip("_")
        if not name.startswith(_HOUSEKEEPING):
            yield Kernel(name, "extern", count, (operator,))


def _run_body(wrapper: str) -> str:
    """The part of the wrapper that runs at each call: definitions of kernels come before it."""
    starts = [match.start() for match in _BODY.finditer(wrapper)]
    return wrapper[starts[-1] :] if starts else wrapper
