"""`runtime: standalone`: operators are avoided, and those that are left are refused, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from in_process import run_here
from small_artifact import small_artifact
from torch import Tensor, nn
from torch.nn import functional as F

import aotc
from aotc.compiler.codegen.library_imports import OperatorCalls
from aotc.compiler.codegen.standalone_code import (
    MOST_SCANNED,
    MOST_SORTED,
    _decompositions,
    check_runs_standalone,
    check_standalone,
)
from aotc.compiler.wrong_code.lowering import Lowering
from aotc.errors import BuildError
from aotc.machine.targets import parse_target
from aotc.records import LibraryImports, Parallel
from aotc.standalone.misfits import misfits
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference

ATEN = torch.ops.aten


def imports_of(store: Path, model: str) -> LibraryImports:
    opened = Store.open(store)
    artifact = read_artifact(opened, read_bundle(opened, parse_reference(model)).artifacts[0])
    assert misfits(artifact) == ()
    (variant,) = artifact.variants
    assert variant.imports is not None
    return variant.imports


# -- operators are avoided --------------------------------------------------------------------------------------------


@pytest.fixture
def shapes(zoo: Any) -> Any:
    import shape_models

    return shape_models


def test_recurrent_layers_scans_sorts_and_pools_become_code_of_their_own(zoo_store: Path, shapes: Any) -> None:
    """Products with live weights alone are left to the runtime."""
    found = imports_of(zoo_store, "generated").operators
    assert found.keys() <= {f"aoti_torch_cpu_{name}_out" for name in ("mm", "addmm", "bmm")}
    compare(zoo_store, "generated", shapes.Generated(), torch.randn(2, 5, 6), torch.randint(0, 9, (2, 5)))


def test_products_of_frozen_weights_become_code_and_convolutions_are_the_runtimes(zoo_store: Path, shapes: Any) -> None:
    assert imports_of(zoo_store, "generated-frozen").operators == {"aoti_torch_cpu_convolution": ("float32",)}
    compare(zoo_store, "generated-frozen", shapes.Classifier(), torch.randn(2, 3, 8, 8))


def compare(store: Path, model: str, module: nn.Module, *inputs: Tensor) -> None:
    module.eval()
    compiled = aotc.load(f"{store}#{model}", module)
    with torch.no_grad():
        for got, expected in zip(compiled(*inputs), module(*inputs), strict=True):
            torch.testing.assert_close(got, expected)


KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool]
SHAPES = [((7,), 0), ((3, 5, 4), 1), ((2, 9), -1), ((4, 1), 1), ((2, 0), 1)]


def drawn(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Equal elements, and among floats NaN, -0 and infinities."""
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype.is_floating_point and x.numel() > 4:
        x.view(-1)[:5] = torch.tensor([-0.0, float("nan"), float("-inf"), float("inf"), float("nan")])
    return x


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_generated_sorts_are_those_of_torch(
    dtype: torch.dtype, descending: bool, shape: tuple[int, ...], dim: int
) -> None:
    x, rules = drawn(dtype, shape), _decompositions("cpu")
    options = {"dim": dim, "descending": descending}
    got, expected = rules[ATEN.sort.stable](x, stable=True, **options), torch.sort(x, stable=True, **options)
    torch.testing.assert_close(got, tuple(expected), rtol=0, atol=0, equal_nan=True)
    if x.shape[dim] > 0 and dtype != torch.bool:  # eager has no topk of bools
        got, expected = rules[ATEN.topk.default](x, 1, dim, descending), torch.topk(x, 1, dim, descending)
        torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "size"), [((2, 3, 40, 38), (3, 7)), ((3, 9, 8, 7), (2, 3, 7)), ((3, 20, 20), (2, 2))]
)
def test_generated_pools_are_those_of_torch(shape: tuple[int, ...], size: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x.view(-1)[5] = float("inf")
    pools = {2: (ATEN._adaptive_avg_pool2d.default, F.adaptive_avg_pool2d)}
    pools[3] = ATEN._adaptive_avg_pool3d.default, F.adaptive_avg_pool3d
    rule, eager = pools[len(size)]
    torch.testing.assert_close(_decompositions("cpu")[rule](x, size), eager(x, size))
    assert _decompositions("cpu")[pools[2][0]](torch.ones(1, 5, 5), (2, 2)) is NotImplemented


@pytest.mark.parametrize("truths", [[True, True], [True, False], [False, False], []])
def test_whether_all_and_any_are_true_is_code_of_its_own(truths: list[bool]) -> None:
    """SigLIP2 asks for it."""
    given, rules = torch.tensor(truths, dtype=torch.bool), _decompositions("cpu")
    for operator in (ATEN._is_all_true.default, ATEN._is_any_true.default):
        assert torch.equal(rules[operator](given), operator(given))


def test_long_axes_are_not_scanned_by_code_whose_work_is_the_square() -> None:
    rules = _decompositions("cpu")
    assert rules[ATEN.cumsum.default](torch.ones(MOST_SCANNED + 1), 0) is NotImplemented
    assert rules[ATEN.sort.default](torch.ones(MOST_SORTED + 1)) is NotImplemented
    assert rules[ATEN.topk.default](torch.ones(MOST_SORTED + 1), 2) is NotImplemented
    assert torch.equal(rules[ATEN.cumsum.default](torch.ones(3), 0), torch.tensor([1.0, 2, 3]))


CONVOLUTIONS = [
    {},
    {"stride": 2, "padding": 3},
    {"dilation": 2, "groups": 2},
    {"stride": 2, "output_padding": 1, "transposed": True},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_a_convolution_along_one_axis_is_one_in_two_on_a_gpu(options: dict[str, Any]) -> None:
    x, weight, bias = torch.randn(2, 4, 19), torch.randn(4, 4 // options.get("groups", 1), 5), torch.randn(4)
    lists = [[options.get(name, least)] for name, least in (("stride", 1), ("padding", 0), ("dilation", 1))]
    given = [*lists, options.get("transposed", False), [options.get("output_padding", 0)], options.get("groups", 1)]
    found = _decompositions("cuda")[ATEN.convolution.default](x, weight, bias, *given)
    torch.testing.assert_close(found, ATEN.convolution(x, weight, bias, *given))


def test_other_convolutions_are_left_as_they_are_on_a_gpu() -> None:
    rule = _decompositions("cuda")[ATEN.convolution.default]
    of_one_axis, of_two = [[1], [0], [1], False, [0]], [[1, 1], [0, 0], [1, 1], False, [0, 0]]
    assert rule(torch.ones(1, 4, 9), torch.ones(4, 1, 3), None, *of_one_axis, 4) is NotImplemented  # depthwise
    assert rule(torch.ones(1, 4, 9, 9), torch.ones(4, 4, 3, 3), None, *of_two, 1) is NotImplemented


def test_what_is_wrong_is_looked_for_in_the_same_graph() -> None:
    graph = torch.fx.symbolic_trace(nn.Identity())
    for standalone in (False, True):
        lowering = Lowering(parse_target("cpu:x86-64-v3"), {}, frozenset(), standalone=standalone)
        with lowering.active(graph):
            assert (ATEN.topk.default in lowering.decompositions()) == standalone


# -- those that are left ----------------------------------------------------------------------------------------------

LEFT = """
import torch
from torch import nn


class Left(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(2, 2, 3).bfloat16()

    def forward(self, x):
        y = self.convolution(x.bfloat16()).float()
        z = torch.fft.rfft(y).abs()
        return z + torch.linalg.svdvals(x).sum()
"""

LEFT_CALLS = (
    (12, "aten::convolution of bfloat16"),
    (13, "aten::_fft_r2c"),
    (13, "aten::abs"),
    (14, "aten::_linalg_svd"),
)


def test_a_build_refuses_all_operators_at_once_with_the_models_lines(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(LEFT)
    model = {"factory": "left.py:Left", "inputs": {"x": {"shape": [2, 8]}}, "runtime": "standalone"}
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(yaml.safe_dump({"version": 1, "models": {"left": model}}))
    result = run_here("build", manifest, "--store", tmp_path / "store")
    shown = result.stdout + result.stderr
    assert result.returncode == 1
    for line, operator in LEFT_CALLS:
        assert f"  - left.py:{line} in forward: {operator}\n" in shown, shown
    assert (
        "calls what the standalone runtime lacks: 4 operators\n" in shown
    )  # also the absolute value of complex numbers
    assert "write `runtime: any`" in shown and "numpy.fft" in shown and "`dtype: float32`" in shown


CONVOLUTION = "aoti_torch_cpu_convolution"
HINTS = [
    ("aoti_torch_cpu__fft_c2c", "aten::_fft_c2c", "numpy.fft"),
    ("acme::twice", "acme::twice", "write it with operators of torch"),
    ("aten::lstm.input", "aten::lstm.input", "fixed buckets"),
    ("aoti_torch_cpu_randint_low_out", "", "take them as an input"),
    ("aoti_torch_cpu_sort_stable", "aten::sort.stable", str(MOST_SORTED)),
    ("_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb", "", "x86-64-v3"),
    (CONVOLUTION, "aten::convolution", "`dtype: float32`"),
    ("aoti_torch_cuda_convolution", "aten::convolution", "not for both in one"),
    ("aoti_torch_cuda_mm_out", "aten::mm.out", "float32, float16 and bfloat16"),
]


@pytest.mark.parametrize(("name", "operator", "hint"), HINTS)
def test_each_operator_comes_with_a_way_out(name: str, operator: str, hint: str) -> None:
    calls = {
        name: OperatorCalls(operator, {"bfloat16"}, {"model.py:3 in forward": None, "model.py:5 in forward": None})
    }
    functions = () if "::" in name else (name,)
    with pytest.raises(BuildError) as caught:
        check_standalone(LibraryImports(functions, {name: ("bfloat16",)}), calls if operator else {})
    (issue,) = caught.value.issues
    assert hint in issue.hint
    assert issue.where == ("model.py:3 in forward" if operator else "")
    assert ("1 more line" in issue.message) == bool(operator)


def test_what_the_loader_without_torch_refuses_is_refused_by_the_build() -> None:
    with pytest.raises(BuildError) as caught:
        check_runs_standalone(small_artifact(parallel=Parallel("tp", 2)))
    (issue,) = caught.value.issues
    assert "one of several ranks" in issue.message
    assert "`runtime: any`" in caught.value.hint
    check_runs_standalone(small_artifact())


def test_functions_of_cpp_are_named_without_their_mangling() -> None:
    with pytest.raises(BuildError, match="at::native::cpublas::brgemm"):
        check_standalone(LibraryImports(("_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb",)), {})
