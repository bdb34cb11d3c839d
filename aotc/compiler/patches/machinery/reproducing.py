"""What the reproducers of the patches have in common: a torch with some patches off, and its code against eager."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from aotc.compiler.patches.machinery.graph_operators import dtypes_by_operator, operators_recorded
from aotc.compiler.patches.machinery.patch import PatchStage

Function = Callable[..., Any]


class Torch:
    """torch with all patches except those that are `off`. `operators` are those of the graphs that it has captured and
    lowered, with their dtypes."""

    def __init__(self, off: Collection[str]) -> None:
        self.off = off
        self.operators: dict[str, set[str]] = {}

    def patched(self, stage: PatchStage, graph: fx.Graph | None = None) -> Any:
        from aotc.compiler.patches.machinery.apply import patched  # which imports the patches, and they this module

        return patched(stage, "cpu", off=self.off, graph=graph or fx.Graph())

    def exported(self, function: Function, inputs: Sequence[Any], shapes: Any = None, again: bool = False) -> Any:
        form = None if shapes is None else {"inputs": tuple(shapes)}
        with torch.no_grad(), self.patched("export"), self.patched("export again") if again else nullcontext():
            program = torch.export.export(_Module(function), tuple(inputs), dynamic_shapes=form, strict=False)
        for name, dtypes in dtypes_by_operator(program.graph).items():
            self.operators.setdefault(name, set()).update(dtypes)
        return program

    def compiled(self, function: Function, *inputs: Any) -> Function:
        """The function compiled by Inductor, called from Python."""
        module = self.exported(function, inputs).module()
        with torch.no_grad(), self.patched("compile", module.graph), operators_recorded(self.operators):
            compiled: Function = torch._inductor.compile(module, list(inputs))
        return compiled

    def library(self, function: Function, *inputs: Any, shapes: Any = None, **options: Any) -> Function:
        """The function compiled by AOTInductor."""
        from aotc.compiler.toolchain.parallel_compile import compiling_side_by_side

        module = self.exported(function, inputs, shapes).module()
        recording = operators_recorded(self.operators)
        with torch.no_grad(), self.patched("compile", module.graph), compiling_side_by_side(), recording:
            made: Any = torch._inductor.aot_compile(module, tuple(inputs), options={**_FAST, **options})
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(made, 1)
        return lambda *given: runner.run([value for value in given if isinstance(value, Tensor)])


_FAST = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def assert_same(make: Callable[..., Function], function: Function, *inputs: Any, calls: int = 1) -> None:
    """Raises unless the compiled code has eager's results, and leaves the inputs as eager does."""
    compiled = make(function, *_copies(inputs))
    expected, given = _copies(inputs), _copies(inputs)
    with torch.no_grad():
        for _ in range(calls):
            results = [leaves(function(*expected)), leaves(compiled(*given))]
            torch.testing.assert_close(*reversed(results), equal_nan=True)
            torch.testing.assert_close(given, expected, equal_nan=True)


def assert_raises(call: Callable[[], Any], what: Any = (RuntimeError, IndexError)) -> None:
    try:
        call()
    except what:
        return
    raise AssertionError("there is no error")


def leaves(value: Any) -> list[Any]:
    """The tensors of a result."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in inputs]
