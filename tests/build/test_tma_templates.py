"""Which products have templates of the tensor memory accelerator among their candidates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.kernel import mm
from torch._inductor.select_algorithm import AlgorithmSelectorCache

from aotc.build import tma_templates
from aotc.build.compile import TMA_TEMPLATES, _gpu_candidates
from aotc.build.tma_templates import TF32_TILES, tiles_for_tf32_on_hopper, tma_templates_on_tensor_cores_only

TEMPLATES = ("use_triton_tma_template", "use_triton_blackwell_tma_template")


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
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, precision: str, offered: bool
) -> None:
    for name in TEMPLATES:
        monkeypatch.setattr(mm, name, lambda *_matrices, **_options: True)
    matrix = SimpleNamespace(get_dtype=lambda: dtype)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with tma_templates_on_tensor_cores_only():
            for name in TEMPLATES:
                assert getattr(mm, name)(matrix, matrix, output_layout=None) is offered
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("asked", [True, False])
def test_what_a_manifest_asks_for_is_not_overruled(asked: bool) -> None:
    """Neither whether these templates race nor, if it says no, cuBLASLt's fused bias."""
    usable, select = mm.use_triton_tma_template, AlgorithmSelectorCache.__call__
    with _gpu_candidates({TMA_TEMPLATES: True, "triton.autotune_cublasLt": False} if asked else {}):
        assert (mm.use_triton_tma_template is usable) is asked
        assert (AlgorithmSelectorCache.__call__ is select) is asked


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
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, capability: tuple[int, int], own: bool
) -> None:
    raced: list[object] = []
    monkeypatch.setattr(
        InductorChoices, "get_template_configs", lambda _self, _in, templates, _op: raced.extend(templates)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(tma_templates, "_template", lambda: "aotc's")
    inputs = SimpleNamespace(dtype=lambda: dtype)
    with tiles_for_tf32_on_hopper():
        InductorChoices().get_template_configs(inputs, [mm.mm_template, mm.persistent_tma_mm_template], "mm")
    assert raced == [mm.mm_template, "aotc's" if own else mm.persistent_tma_mm_template]


@pytest.mark.parametrize("tile", TF32_TILES)
def test_a_tile_can_be_written_in_equal_parts_and_fits_in_a_multiprocessor(tile: tma_templates.Tile) -> None:
    """The template halves both products until a part is left; Hopper has 227 KiB of shared memory for a block."""
    assert all(columns % tile.written == 0 for columns in tile.columns)
    loaded = (tile.rows + sum(tile.columns)) * tile.depth * torch.float32.itemsize * tile.stages
    assert loaded * tile.programs <= 227 * 1024
