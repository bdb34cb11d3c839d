"""For each patch a small function that fails if torch has the bug: by an error, or by a crash of its process.

Each has the name of its patch, and is called with a torch that has all other patches, and this one or not. Patches for
GPUs and performance patches have none: see the tests, and tests/benchmarks/patches.py.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import subprocess
import tempfile
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from aotc.compiler.patches.machinery.apply import patched
from aotc.compiler.patches.machinery.patch import Stage
from aotc.errors import BuildError

Function = Callable[..., Any]


class Torch:
    """torch with all patches except those that are `off`."""

    def __init__(self, off: Collection[str]) -> None:
        self.off = off

    def patched(self, stage: Stage, graph: fx.Graph | None = None) -> Any:
        return patched(stage, "cpu", off=self.off, graph=graph or fx.Graph())

    def exported(self, function: Function, inputs: Sequence[Any], shapes: Any = None, again: bool = False) -> Any:
        form = None if shapes is None else {"inputs": tuple(shapes)}
        with torch.no_grad(), self.patched("export"), self.patched("export again") if again else nullcontext():
            return torch.export.export(_Module(function), tuple(inputs), dynamic_shapes=form, strict=False)

    def compiled(self, function: Function, *inputs: Any) -> Function:
        """The function compiled by Inductor, called from Python."""
        module = self.exported(function, inputs).module()
        with torch.no_grad(), self.patched("compile", module.graph):
            compiled: Function = torch._inductor.compile(module, list(inputs))
        return compiled

    def library(self, function: Function, *inputs: Any, shapes: Any = None, **options: Any) -> Function:
        """The function compiled by AOTInductor."""
        module = self.exported(function, inputs, shapes).module()
        with torch.no_grad(), self.patched("compile", module.graph):
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


def _same(make: Callable[..., Function], function: Function, *inputs: Any, calls: int = 1) -> None:
    """Raises unless the compiled code has eager's results, and leaves the inputs as eager does."""
    compiled = make(function, *_copies(inputs))
    expected, given = _copies(inputs), _copies(inputs)
    with torch.no_grad():
        for _ in range(calls):
            results = [_leaves(function(*expected)), _leaves(compiled(*given))]
            torch.testing.assert_close(*reversed(results), equal_nan=True)
            torch.testing.assert_close(given, expected)


def _leaves(value: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def reproduce(name: str, off: Collection[str]) -> None:
    """Run a patch's reproducer; raises where torch has the bug, or does not return."""
    globals()[name](Torch(off))


def can_be_reproduced(name: str) -> bool:
    return name in globals()


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in inputs]


def _raises(call: Callable[[], Any], what: Any = (RuntimeError, IndexError)) -> None:
    try:
        call()
    except what:
        return
    raise AssertionError("there is no error")


# -- torch.export -----------------------------------------------------------------------------------------------------


def dropout_copies(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        F.dropout(x, 0.5, False).add_(1)
        return x * 2

    _same(patches.compiled, function, torch.ones(4))


def rows_set_by_tensors(patches: Torch) -> None:
    def function(x: Tensor, at: Tensor, row: Tensor) -> Tensor:
        x = x.clone()
        x[at] = row
        return x

    inputs = torch.zeros(4, 3), torch.tensor(2), torch.ones(3)
    assert torch.equal(patches.exported(function, inputs).module()(*inputs), function(*inputs))


def pooled_sizes(patches: Torch) -> None:
    shapes = [{2: torch.export.Dim("height", min=8, max=64)}]
    exported = patches.exported(lambda x: F.max_pool2d(x, 3, 2), [torch.randn(1, 1, 9, 8)], shapes)
    for height in (8, 63, 64):
        x = torch.randn(1, 1, height, 8)
        assert torch.equal(exported.module()(x), F.max_pool2d(x, 3, 2))


def rounded_sizes(patches: Torch) -> None:
    shapes = [{0: torch.export.Dim("rows", min=2, max=100)}]
    exported = patches.exported(lambda x: x[:1] + round(x.shape[0], -1), [torch.zeros(17)], shapes)
    assert exported.module()(torch.zeros(34)).item() == round(34, -1)


def floor_divided_sizes(patches: Torch) -> None:
    shapes = [{0: torch.export.Dim("rows", min=2, max=100)}]
    try:
        exported = patches.exported(lambda x: x[:1] + x.shape[0] // 0.1, [torch.zeros(17)], shapes)
    except BuildError:
        return  # refused, which is not a wrong result
    assert exported.module()(torch.zeros(3)).item() == 3 // 0.1


def failing_advice(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        return x[:1] if x.numel() >= 50 else x

    shapes = [{0: torch.export.Dim("rows", min=2, max=100)}]
    _raises(lambda: patches.exported(function, [torch.zeros(8, 24)], shapes), torch._dynamo.exc.UserError)


def undecided_conditions(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        size = x.shape[0]
        return x + 1 if size * (8 + size - size % 8) > 1 else x - 1

    shapes = [{0: torch.export.Dim("rows", min=2, max=100)}]
    patches.exported(function, [torch.zeros(17)], shapes, again=True)


# -- ranges of sizes --------------------------------------------------------------------------------------------------


def sizes_taken_for_fixed(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        return x.diagonal() * 2

    shapes = [{0: torch.export.Dim("rows", min=3, max=12)}]
    compiled = patches.library(function, torch.randn(4, 6), shapes=shapes)
    x = torch.randn(9, 6)
    torch.testing.assert_close(compiled(x)[0], function(x))


def convolutions_of_a_range(patches: Torch) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    make_context: Any = StatelessSymbolicContext
    context = make_context([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])
    images = mode.from_tensor(torch.randn(16, 4, 8, 8), symbolic_context=context)
    weight = mode.from_tensor(torch.randn(4, 4, 3, 3))
    select: Any = torch._C
    with patches.patched("compile"), mode:
        select._select_conv_backend(images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [0])
    assert not environment.guards, "the range of the batch is narrower than it was"


def adaptive_pools_of_a_range(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 3)

    shapes = [{2: torch.export.Dim("height", min=4, max=32)}]
    compiled = patches.library(function, torch.randn(1, 1, 9, 8), shapes=shapes)
    x = torch.randn(1, 1, 31, 8)
    torch.testing.assert_close(compiled(x)[0], function(x))


def negative_remainders(patches: Torch) -> None:
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing

    rows, columns = sympy.symbols("rows columns", integer=True, positive=True)
    at = sympy.Symbol("at", integer=True, nonnegative=True)
    with patches.patched("compile"):
        index = ModularIndexing(FloorDiv(2 * rows * columns - 1 - at, 2), 1, rows * columns)

    def in_cpp(term: Any) -> int:
        """Where the sign of a remainder is that of its left side."""
        if not term.args:
            return {rows: 4, columns: 5, at: 1}[term] if term.is_Symbol else int(term)
        parts = [in_cpp(part) for part in term.args]
        if term.func is ModularIndexing:
            return int(math.fmod(parts[0] // parts[1], parts[2]))
        return parts[0] // parts[1] if term.func is FloorDiv else (sum if term.is_Add else math.prod)(parts)

    assert in_cpp(index) == (2 * 20 - 1 - 1) // 2


def decimal_rounding(patches: Torch) -> None:
    import sympy
    from torch.utils._sympy.functions import IntTrueDiv, RoundDecimal
    from torch.utils._sympy.printers import CppPrinter

    size = sympy.Symbol("size", integer=True)
    with patches.patched("compile"):
        text = CppPrinter().doprint(RoundDecimal(IntTrueDiv(size, 40), 2))
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "rounded.cpp"), Path(folder, "rounded.so")
        code = f'extern "C" double rounded(int64_t size) {{ return {text}; }}\n'
        source.write_text(f"#include <cmath>\n#include <cstdint>\n{code}")
        subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
        function = ctypes.CDLL(str(library)).rounded
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_int64]
        assert [function(n) for n in range(100)] == [round(n / 40, 2) for n in range(100)]


# -- memory that is written to ----------------------------------------------------------------------------------------


def copies_of_written_tensors(patches: Torch) -> None:
    def function(current: Tensor, previous: Tensor, x: Tensor) -> Tensor:
        previous.copy_(current)
        current.copy_(x)
        return x * 2

    _same(patches.compiled, function, *torch.randn(3, 4))


def reads_written_over(patches: Torch) -> None:
    def function(total: Tensor, x: Tensor, index: Tensor) -> list[Tensor]:
        first, second = x.cos(), x.relu()
        first[index[:3]] = first[1:].clone()
        changed = total.select_scatter(x[0], 0, 1)
        total.copy_(x * 2)
        return [first, second.index_copy(0, index[:3], second[1:]), changed]

    _same(patches.compiled, function, torch.zeros(4, 6), torch.randn(4, 6), torch.tensor([3, 1, 0, 2]))


def results_made_in_inputs(patches: Torch) -> None:
    def function(memory: Tensor, x: Tensor) -> Tensor:
        changed = memory.slice_scatter(x, 0, 1, 2)
        memory.copy_(changed)
        return changed

    compiled, memory = patches.compiled(function, torch.zeros(4, 3), torch.ones(1, 3)), torch.zeros(4, 3)
    with torch.no_grad():
        result = _leaves(compiled(memory, torch.ones(1, 3)))[0]
    result.add_(100)
    assert memory.sum() == 3, "what the caller writes to a result is in the input"


def order_of_reordered_loops(patches: Torch) -> None:
    def function(last: Tensor, x: Tensor) -> Tensor:
        before = last * 1
        last[0] = x
        before[:, 2:] *= 2
        return before

    _same(patches.compiled, function, torch.arange(100.0).view(5, 4, 5), torch.randn(4, 5))


def fusion_of_reads_and_writes(patches: Torch) -> None:
    def function(last: Tensor, x: Tensor) -> Tensor:
        last.diagonal().fill_(3)
        last[1:] = last[:-1].clone()
        last[0] = -2
        return x * 2

    _same(patches.compiled, function, torch.arange(64.0).view(4, 16), torch.randn(2))


def written_parts_of_concatenations(patches: Torch) -> None:
    def function(x: Tensor, index: Tensor) -> list[Tensor]:
        first = x * 2
        rows = torch.cat([first, x])
        first[index] = 7
        return [rows, first]

    _same(patches.compiled, function, torch.randn(4, 5), torch.tensor([3, 0, 3]))


def single_parts_of_concatenations(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        return torch.cat([y, y[..., :0]], -1).view(-1, 5, 8) + 1

    _same(patches.compiled, function, torch.randn(2, 5, 4, 8))


def aligned_int8_operands(patches: Torch) -> None:
    def function(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, weight.to(x.dtype)) * scale

    memory = torch.ones(1 + 4 * 64, dtype=torch.bfloat16)
    x, scale = memory[1:].view(1, 4, 64), torch.ones(64, dtype=torch.bfloat16)
    weight = torch.ones(64, 64, dtype=torch.int8)
    result = patches.compiled(function, x, weight, scale)(x, weight, scale)
    assert result.eq(64).all()


def memory_of_operands(patches: Torch) -> None:
    def function(x: Tensor) -> list[Tensor]:
        first = x @ x.mT
        chosen = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a * 2, (first,))
        first[first > 0] = 0.5
        return [chosen, first]

    _same(patches.compiled, function, torch.rand(4, 4))


memory_of_operands_of_switch = memory_of_operands


def layout_of_operands(patches: Torch) -> None:
    def function(x: Tensor) -> list[Tensor]:
        part, wide = x.sin(), x.tanh()
        chosen = [
            torch.cond(x.sum() > 0, lambda a: (a.sum(0), a * 2), lambda a: (a.amax(0), a + 1), (given,))
            for given in (part, wide[1:])
        ]
        return [*itertools.chain(*chosen), torch.cat([part, part * 2], -1), torch.cat([wide, x], -1)]

    _same(patches.compiled, function, torch.rand(5, 11))


def layout_of_operands_of_switch(patches: Torch) -> None:
    try:
        from torch._higher_order_ops.switch import switch  # type: ignore[import-not-found]
    except ImportError:  # there is none yet
        return

    def function(x: Tensor, at: Tensor) -> list[Tensor]:
        part = x.sin()
        chosen = switch(at, [lambda a: (a.sum(0), a * 2), lambda a: (a.amax(0), a + 1)], (part,))
        return [*chosen, torch.cat([part, part * 2], -1)]

    _same(patches.compiled, function, torch.rand(5, 11), torch.tensor(1))


def loops_without_iterations(patches: Torch) -> None:
    from torch._higher_order_ops import while_loop

    def function(x: Tensor) -> Any:
        loop: Any = while_loop
        return loop(lambda a: a.sum() > 100, lambda a: (a / 2,), (x,))

    x = torch.ones(4)
    (result,) = patches.library(function, x)(x)
    result.add_(100)
    assert x.sum() == 4, "what the caller writes to a result is in the input"


def views_of_views(patches: Torch) -> None:
    _same(patches.compiled, lambda x: x[1:].as_strided((3, 2), (5, 1)) + 1, torch.randn(8, 5))


def empty_constants(patches: Torch) -> None:
    weights = torch.arange(5.0).view(5, 1) + 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Buffer(weights)

        def forward(self, x: Tensor) -> Any:
            return x * 2, self.weights.sum() * 2, self.weights[:, 1:]

    model = Model()
    compiled = patches.library(model, torch.ones(8), freezing=True)
    torch.testing.assert_close(compiled(torch.ones(8))[1], weights.sum() * 2)


# -- numbers ----------------------------------------------------------------------------------------------------------


def assigned_numbers(patches: Torch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Buffer(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y[0, 0] = self.one
            return y

    model, x = Model(), torch.randn(3, 3)
    torch.testing.assert_close(patches.library(model, x, freezing=True)(x)[0], model(x))


def known_bools(patches: Torch) -> None:
    def function(x: Tensor) -> Tensor:
        ones = ~torch.zeros(x.shape[0], 3).to(torch.bool)
        return torch.where(ones == True, x, -x)  # noqa: E712

    shapes = [{0: torch.export.Dim("rows", min=2, max=8)}]
    x = torch.randn(4, 3)
    torch.testing.assert_close(patches.library(function, x, shapes=shapes)(x)[0], function(x))


def checked_values(patches: Torch) -> None:
    check: Any = torch._check

    def function(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[0] = x[1]
        check((y >= 0).all().item())
        return y + 1

    _same(patches.library, function, torch.rand(2, 8))


def indices_of_batches(patches: Torch) -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = x @ x.mT
        return [y, y.sin()]

    library = partial(patches.library, max_autotune=True, max_autotune_gemm_backends="CPP")
    _same(library, function, torch.rand(2, 12, 16))


def powers_of_ints(patches: Torch) -> None:
    _same(patches.library, lambda x: 2**x, torch.tensor([0, 1, 5, 62]))


def rounded_quotients(patches: Torch) -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [torch.div(x, y, rounding_mode="floor"), torch.remainder(x, y)]

    _same(patches.compiled, function, torch.tensor([1.0, 7.5, 5.0]), torch.tensor([0.1, 0.3, math.inf]))


def complex_numbers(patches: Torch) -> None:
    z = torch.complex(torch.randn(3), torch.randn(3))
    _same(patches.library, lambda z: [z / 2, z != 1j, z - z.conj().resolve_conj()], z)


# -- errors -----------------------------------------------------------------------------------------------------------


def index_errors(patches: Torch) -> None:
    table, index = torch.randn(100), torch.arange(100_000) % 100
    compiled = patches.compiled(lambda table, index: table[index] * 2, table, index)
    torch.testing.assert_close(_leaves(compiled(table, index))[0], table[index] * 2)
    index[77_777] = 100
    _raises(lambda: compiled(table, index))


def negative_indices(patches: Torch) -> None:
    x, index = torch.randn(4, 3), torch.tensor([0, 1])
    compiled = patches.compiled(lambda x, index: x.index_select(0, index) * 2, x, index)
    _raises(lambda: compiled(x, torch.tensor([0, -1])))


def counts_of_rows(patches: Torch) -> None:
    x, counts = torch.randn(3, 2), torch.tensor([1, 2, 3])
    compiled = patches.compiled(lambda x, counts: x.repeat_interleave(counts, 0, output_size=6) * 2, x, counts)
    _raises(lambda: compiled(x, torch.tensor([1, 2, 2])))


def integer_divisors(patches: Torch) -> None:
    x, y = torch.arange(100_000), torch.ones(100_000, dtype=torch.int64)
    compiled = patches.compiled(lambda x, y: torch.div(x, y, rounding_mode="trunc") * 2, x, y)
    y[77_777] = 0
    _raises(lambda: compiled(x, y))


noted_errors = index_errors


def operator_errors(patches: Torch) -> None:
    x, index = torch.randn(8, 8), torch.zeros(8, 8, dtype=torch.int64)
    compiled = patches.library(lambda x, index: torch.zeros(8, 8).scatter_add(0, index, x), x, index)
    index[7, 7] = 8
    _raises(lambda: compiled(x, index))


# -- what replaces operators, and what they are given -----------------------------------------------------------------


def attention_patterns(patches: Torch) -> None:
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / 2.0).softmax(1) @ v  # over another axis than attention's

    inputs = [torch.randn(4, 4, 4, 4) for _ in range(3)]
    graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    with torch.no_grad(), patches.patched("compile"):
        joint_graph_passes(graph, torch.device("cpu"))
    torch.testing.assert_close(graph(*inputs), function(*inputs))


def folded_constants(patches: Torch) -> None:
    from torch._inductor import freezing
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    layer = nn.ConvTranspose2d(4, 4, 3).eval().requires_grad_(False)
    factor, x = nn.Parameter(torch.rand(4, 1, 1), requires_grad=False), torch.randn(2, 4, 4, 4)
    graph = make_fx(lambda x: layer(x) * factor, decomposition_table=select_decomp_table(), tracing_mode="real")(x)
    with torch.no_grad(), patches.patched("compile"):
        expected = layer(x) * factor
        passes: Any = freezing
        passes.freezing_passes(graph, [x])
        torch.testing.assert_close(graph(x), expected)


def operator_enums(patches: Torch) -> None:
    make_library: Any = torch.library.Library
    library = make_library("aotc_enums", "DEF")
    library.define("which(Tensor x, ScalarType dtype) -> Tensor")
    library.impl("which", lambda x, dtype: x + (dtype == torch.float32), "CPU")
    library.impl("which", lambda x, dtype: torch.empty_like(x), "Meta")
    _same(patches.library, lambda x: torch.ops.aotc_enums.which(x, torch.float32), torch.zeros(2))


def operator_defaults(patches: Torch) -> None:
    def function(x: Tensor, rows: Tensor, more: Tensor) -> Tensor:
        return x.index_add(0, rows, more)

    inputs = torch.zeros(4, 3).bfloat16(), torch.tensor([1, 2]), torch.ones(2, 3).bfloat16()
    _same(patches.library, function, *inputs)


def grouped_products(patches: Torch) -> None:
    tokens, weights = torch.randn(12, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16()
    ends = torch.tensor([2, 8, 12], dtype=torch.int32)
    _same(patches.library, lambda t, w, e: torch._grouped_mm(t * 2, w, offs=e) + 1, tokens, weights, ends)
