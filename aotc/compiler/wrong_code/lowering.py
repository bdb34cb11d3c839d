"""A graph as torch's compiler makes it: decomposed and run in eager, or compiled by Inductor; with options changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from aotc.compiler.codegen.instruction_sets import code_for
from aotc.compiler.codegen.standalone_code import operators_avoided
from aotc.compiler.patches.machinery.apply import patched
from aotc.compiler.patches.machinery.patch import chosen
from aotc.compiler.patches.machinery.registry import PATCHES
from aotc.compiler.wrong_code.subgraphs import Part, results_of
from aotc.compiler.wrong_code.trials import CpuBudget
from aotc.machine.targets import Target

LoweringStep = Literal["decomposed", "lowered"]

_OF_LIBRARIES = ("aot_inductor", "freezing", "cpp_wrapper")
"""Options of AOTInductor alone: a step of its own."""
_NO_CACHES = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "autotune_local_cache": False}


@dataclass(frozen=True)
class CompileOverrides:
    """What is changed in a compilation: options of Inductor, patches of aotc left out, decompositions left out."""

    options: Mapping[str, Any] = field(default_factory=dict)
    off: frozenset[str] = frozenset()
    kept: frozenset[Any] = frozenset()


@dataclass(frozen=True)
class Lowering:
    """Runs graphs through the steps of torch's compiler as the unit's options and patches say. `extremes`: the inputs
    have extreme values, and results are judged accordingly. `crashes`: compiled code may end its process, so that each
    part is tried in a fork. `standalone`: as for a unit with `runtime: standalone`. `budget`: of all tries together."""

    target: Target
    options: Mapping[str, Any]
    off: frozenset[str]
    change: CompileOverrides = CompileOverrides()
    extremes: bool = False
    crashes: bool = False
    standalone: bool = False
    budget: CpuBudget = field(default_factory=CpuBudget)

    def changed(self, change: CompileOverrides) -> Lowering:
        return replace(self, change=change)

    def patches(self) -> list[str]:
        """The names of the patches of torch that are applied while Inductor runs."""
        wanted = chosen(PATCHES, self.target.device, self.options, self.off | self.change.off)
        return [patch.name for patch in wanted if patch.stage == "compile" and not patch.flaws()]

    def run(self, step: LoweringStep, part: Part) -> list[Any]:
        """The results of the part, whose inputs are left as they are. Raises what torch's compiler does."""
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        inner: Callable[..., Any] = _in_eager if step == "decomposed" else compile_fx_inner
        torch._dynamo.reset()
        graph = copy_of_graph(part.graph)

        def compile_and_call(given: list[Any]) -> Any:
            compiled: Any = compile_fx(graph, given, inner_compile=inner, decompositions=self.decompositions())
            torch.manual_seed(0)
            return compiled(*given)

        with self.active(part.graph):
            return results_of(compile_and_call, _copies(part.inputs), part.trained)

    def decomposed(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
        """The graph after decompositions and Inductor's joint passes, and the inputs that it is called with."""
        found: list[tuple[fx.GraphModule, list[Any]]] = []

        def keep(inner: fx.GraphModule, examples: Any, **_: Any) -> Any:
            def run(given: list[Any]) -> Any:
                found.append((inner, [one.clone() if isinstance(one, Tensor) else one for one in given]))
                return inner(*given)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        from torch._inductor.compile_fx import compile_fx

        own = _copies(inputs)
        with torch.no_grad(), self.active(graph):
            compiled: Any = compile_fx(
                copy_of_graph(graph), own, inner_compile=keep, decompositions=self.decompositions()
            )
            compiled(*own)
        return found[-1]

    def active(self, graph: fx.GraphModule) -> ExitStack:
        from torch._inductor import config

        options = {name: value for name, value in self.options.items() if not name.startswith(_OF_LIBRARIES)}
        stack = ExitStack()
        off = self.off | self.change.off
        stack.enter_context(patched("compile", self.target.device, self.options, off, graph.graph))
        stack.enter_context(code_for(self.target))
        if self.standalone:
            stack.enter_context(operators_avoided(self.target.device, frozen=False))  # freezing is a step of libraries
        stack.enter_context(config.patch({**options, **_NO_CACHES, **self.change.options}))
        return stack

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Inductor's, as its options choose them, without those that the change leaves out."""
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
        return {name: function for name, function in table.items() if name not in self.change.kept}


def _in_eager(graph: fx.GraphModule, examples: Any, **_: Any) -> Any:
    def run(given: list[Any]) -> Any:
        return graph(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [value.detach().clone() if isinstance(value, Tensor) else value for value in inputs]


def copy_of_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy, since Inductor's passes change the graph that they are given."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, copied)
