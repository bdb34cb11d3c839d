"""Which products have templates of the tensor memory accelerator among their candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from sympy import Expr, symbols
from torch._inductor import config, utils
from torch._inductor.choices import InductorChoices
from torch._inductor.ir import FixedLayout
from torch._inductor.kernel import mm
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V

from aotc.compiler.codegen.inductor_options import inductor_options
from aotc.compiler.patches import invalid_tensor_maps, no_tma_templates_of_float32, sizes_of_tensor_maps, tf32_tiles
from aotc.compiler.patches.machinery.apply import patched
from aotc.compiler.patches.shared.inductor import TF32_ON_HOPPER, TMA_TEMPLATES
from aotc.compiler.patches.tf32_tiles import TF32_TILES
from aotc.machine.targets import parse_target
from aotc.manifest import ModelSpec

Raced = Callable[..., list[object]]


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> Raced:
    """The templates of a product's race, of Inductor's two."""
    monkeypatch.setattr(
        InductorChoices, "get_template_configs", lambda self, kernel_inputs, templates, op_name: templates
    )

    def of(*matrices: SimpleNamespace) -> list[object]:
        inputs = SimpleNamespace(dtype=matrices[0].get_dtype, mat1mat2=lambda: matrices)
        return V.choices.get_template_configs(inputs, [mm.mm_template, mm.persistent_tma_mm_template], "mm")

    return of


def matrix_of(
    dtype: torch.dtype, size: Sequence[Expr | int], stride: Sequence[Expr | int], offset: int = 0
) -> SimpleNamespace:
    """What a template is asked about, as far as it matters here."""
    layout = FixedLayout(torch.device("cpu"), dtype, list(size), list(stride), offset)
    return SimpleNamespace(get_dtype=lambda: dtype, get_layout=lambda: layout)


@pytest.mark.parametrize(
    ("dtype", "precision", "offered"),
    [
        (torch.float32, "highest", False),
        (torch.float32, "high", True),
        (torch.bfloat16, "highest", True),
        (torch.float16, "highest", True),
    ],
)
def test_templates_that_load_by_tma_race_where_tensor_cores_multiply(
    raced: Raced, dtype: torch.dtype, precision: str, offered: bool
) -> None:
    matrix = matrix_of(dtype, (256, 64), (64, 1))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with no_tma_templates_of_float32.apply():
            assert (mm.persistent_tma_mm_template in raced(matrix, matrix)) is offered
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("asked", [True, False])
def test_what_a_manifest_asks_for_is_not_overruled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raced: Raced, asked: bool
) -> None:
    """Whether these templates race; but none races that is wrong, aotc's own included."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tf32_tiles, "_template", lambda: SimpleNamespace(name=TF32_ON_HOPPER))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    options = {TMA_TEMPLATES: True} if asked else {}
    good, row = (matrix_of(torch.float32, (rows, 64), (64, 1)) for rows in (256, 1))
    with (
        patched("compile", "cuda", options, graph=torch.fx.Graph()),
        V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())),
    ):
        assert (mm.persistent_tma_mm_template in raced(good, good)) is asked
        assert raced(good, row) == raced(row, good) == [mm.mm_template]


@pytest.mark.parametrize(
    ("dtype", "capability", "own"),
    [
        (torch.float32, (9, 0), True),
        (torch.float32, (10, 0), False),
        (torch.bfloat16, (9, 0), False),
        (torch.float16, (9, 0), False),
    ],
)
def test_float32_products_on_hopper_race_aotcs_tiles_in_the_place_of_inductors(
    monkeypatch: pytest.MonkeyPatch, raced: Raced, dtype: torch.dtype, capability: tuple[int, int], own: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(tf32_tiles, "_template", lambda: "aotc's")
    matrix = matrix_of(dtype, (256, 64), (64, 1))
    with tf32_tiles.apply():
        assert raced(matrix, matrix) == [mm.mm_template, "aotc's" if own else mm.persistent_tma_mm_template]


def test_every_tile_is_a_configuration_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inductor of this torch asks for them."""
    monkeypatch.setattr(utils, "get_num_sms", lambda: 132)
    plain, transposed = (SimpleNamespace(is_transposed=lambda value=value: value) for value in (False, True))
    matrices = SimpleNamespace(layout=plain), SimpleNamespace(layout=transposed)
    heuristic = tf32_tiles._with_tf32_tiles(object)()
    found = list(heuristic._get_template_configs_impl(SimpleNamespace(mat1mat2=lambda: matrices), "mm"))
    assert [one["PROGRAMS"] for one in found] == [132 * tile.programs for tile in TF32_TILES]
    assert {(one["A_ROW_MAJOR"], one["B_ROW_MAJOR"]) for one in found} == {(True, False)}


@pytest.mark.parametrize("tile", TF32_TILES)
def test_a_tile_can_be_written_in_equal_parts_and_fits_in_a_multiprocessor(tile: tf32_tiles.Tile) -> None:
    """The template halves both products until a part is left; Hopper has 227 KiB of shared memory for a block."""
    assert all(columns % tile.written == 0 for columns in tile.columns)
    loaded = (tile.rows + sum(tile.columns)) * tile.depth * torch.float32.itemsize * tile.stages
    assert loaded * tile.programs <= 227 * 1024


SEQ = symbols("seq", integer=True, positive=True)


@pytest.mark.parametrize(
    ("size", "stride", "offset", "valid"),
    [
        ((256, 64), (64, 1), 0, True),
        ((64, 256), (1, 64), 0, True),  # transposed
        ((SEQ, 64), (64, 1), 0, True),
        ((256, 64), (1024, 1), 64, True),  # some columns of a wider matrix
        ((1, 64), (64, 1), 0, False),  # taken for a transposed one
        ((1024, 256), (1, 1024), 0, True),
        ((256, 256), (1, 1024), 0, False),  # some columns, transposed: not taken for it
        ((256, 64), (66, 1), 0, False),
        ((256, 64), (64, 1), 1, False),
        ((256, SEQ), (SEQ, 1), 0, False),
    ],
)
def test_templates_that_load_by_tma_race_where_their_tensor_maps_are_valid(
    raced: Raced, size: Sequence[Expr | int], stride: Sequence[Expr | int], offset: int, valid: bool
) -> None:
    good, asked = matrix_of(torch.bfloat16, (64, 64), (64, 1)), matrix_of(torch.bfloat16, size, stride, offset)
    with invalid_tensor_maps.apply(), V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        assert (mm.persistent_tma_mm_template in raced(good, asked)) is valid
        assert (mm.persistent_tma_mm_template in raced(asked, good)) is valid


@pytest.mark.skipif(not sizes_of_tensor_maps.PATCH.is_for("cuda"), reason="needs torch 2.12")
def test_whether_tensor_maps_can_be_made_is_asked_without_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        utils, "can_use_tma", lambda *_matrices, add_guards=False, **_layout: asked.append(add_guards) or True
    )
    matrix = SimpleNamespace(get_size=lambda: (256, 64))
    with config.patch({TMA_TEMPLATES: True, "triton.enable_template_tma_store": False}):
        assert utils.use_triton_tma_template(matrix, output_layout=None, add_guards=True)
        with sizes_of_tensor_maps.apply():
            assert utils.use_triton_tma_template(matrix, output_layout=None, add_guards=True)
    assert asked == [True, False]


@pytest.mark.parametrize(("precision", "templates"), [("highest", 4), ("high", 8), ("medium", 8)])
def test_more_templates_race_in_fusions_where_tf32_is_allowed(precision: str, templates: int) -> None:
    spec = ModelSpec("m", "m:m", inputs={}, buckets=({},), float32_matmul_precision=precision)
    options = inductor_options(spec, parse_target("cuda:sm_90"))
    assert options["max_epilogue_benchmarked_choices"] == templates
    own = msgspec.structs.replace(spec, options={"max_epilogue_benchmarked_choices": 1})
    assert inductor_options(own, parse_target("cuda:sm_90"))["max_epilogue_benchmarked_choices"] == 1
