"""Tiles for TF32 on Hopper, by another template with the tensor memory accelerator.

The tiles of Inductor's template are made for two-byte elements: most do not fit in shared memory, and each is written
at once, which needs more registers than an epilogue leaves. `TF32_TILES` belong to `tf32_tiles.jinja`: it writes a tile
in parts, two programs may share a multiprocessor, and the columns of a tile may be three quarters of a power of two.
4096 × 768 results are 96 tiles of 128 × 256, which leave 36 of an H200's 132 multiprocessors idle, and 128 tiles of 128
× 192.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.shared.inductor import TF32_ON_HOPPER, TMA_TEMPLATES, inductor, racing

PATCH = Patch(
    __name__,
    kind="performance",
    device="cuda",
    wanted=lambda options: TMA_TEMPLATES not in options,
    targets=(
        "torch._inductor.choices:InductorChoices.get_template_configs(kernel_inputs, templates, op_name)",
        "torch._inductor.kernel.mm:persistent_tma_mm_template",
    ),
)

HOPPER = 9
"""The major compute capability."""

SOURCE = Path(__file__).with_suffix(".jinja")


class Tile(NamedTuple):
    """One configuration: the tile's rows; its columns, as those of two products, the second of which may have none;
    elements multiplied at a time; loads in flight; warps; columns written at a time; the number of programs that share
    a multiprocessor; whether the loop over a program's tiles is flattened into the inner one.
    """

    rows: int
    columns: tuple[int, int]
    depth: int
    stages: int
    warps: int
    written: int
    programs: int = 1
    flattened: bool = False


TF32_TILES = (
    Tile(128, (128, 0), 32, stages=3, warps=4, written=64, programs=2),
    Tile(128, (128, 0), 32, stages=5, warps=8, written=64, flattened=True),
    Tile(128, (256, 0), 32, stages=4, warps=8, written=64, flattened=True),
    Tile(128, (256, 0), 32, stages=4, warps=8, written=64),
    Tile(256, (128, 0), 32, stages=4, warps=8, written=32, flattened=True),
    Tile(64, (128, 64), 32, stages=3, warps=4, written=32, programs=2),
    Tile(128, (128, 64), 32, stages=4, warps=4, written=64),
    Tile(128, (128, 64), 32, stages=3, warps=8, written=64),
    Tile(128, (64, 32), 32, stages=3, warps=4, written=32, programs=2),
)
"""The fastest of 222, and of 180 with three quarters, on an H200: alone, and with a fused epilogue."""


@contextmanager
def apply() -> Iterator[None]:
    """While active, `TF32_TILES` replace Inductor's own template of this kind in races for float32 matrices."""
    mm = inductor("kernel.mm")

    def tiles_in_place(inputs: Any, templates: list[Any]) -> list[Any]:
        if not _float32_on_hopper(inputs.dtype()):
            return templates
        return [_template() if one is mm.persistent_tma_mm_template else one for one in templates]

    with racing(tiles_in_place):
        yield


def _float32_on_hopper(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and torch.cuda.get_device_capability()[0] == HOPPER


@functools.cache
def _template() -> Any:
    """The template, registered in Inductor with its configurations."""
    algorithm, heuristics = inductor("select_algorithm"), inductor("template_heuristics.triton")
    template = algorithm.TritonTemplate(name=TF32_ON_HOPPER, grid=_grid(), source=SOURCE.read_text())
    register = inductor("template_heuristics.registry").register_template_heuristic
    plain = heuristics.CUDAMMTemplateConfigHeuristic
    register(template.uid, "cuda", op_name="mm")(_with_tf32_tiles(plain))
    adding = heuristics.CUDAAddMMTemplateConfigHeuristic
    register(template.uid, "cuda", op_name="addmm")(_with_tf32_tiles(adding))
    return template


def _grid() -> Any:
    @inductor("select_algorithm").SymbolicGridFn  # type: ignore[untyped-decorator]
    def grid(rows: Any, columns: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> Any:
        across = cdiv(columns, meta["BLOCK_N"] + meta["MORE_N"])
        return min(meta["PROGRAMS"], cdiv(rows, meta["BLOCK_M"]) * across), 1, 1

    return grid


def _with_tf32_tiles(inherited: Any) -> type[Any]:
    """A subclass of Inductor's configurations of such a template, which yields `TF32_TILES`."""

    class WithTF32Tiles(inherited):  # type: ignore[misc]
        def _get_template_configs_impl(self, kernel_inputs: Any, op_name: str, **kwargs: Any) -> Iterator[Any]:
            if getattr(inductor("config"), "force_same_precision", False):  # torch 2.11 and 2.12 have it
                return  # then a product must not use TF32, and these tiles would round its operands
            left, right = kernel_inputs.mat1mat2()
            processors = inductor("utils").get_num_sms()
            for tile in TF32_TILES:
                columns, more = tile.columns
                yield {
                    "BLOCK_M": tile.rows,
                    "BLOCK_N": columns,
                    "MORE_N": more,
                    "BLOCK_K": tile.depth,
                    "WRITTEN_N": tile.written,
                    "GROUP_M": 8,
                    "ACC_TYPE": "tl.float32",
                    "FLATTEN": tile.flattened,
                    "A_ROW_MAJOR": not left.layout.is_transposed(),
                    "B_ROW_MAJOR": not right.layout.is_transposed(),
                    "PROGRAMS": processors * tile.programs,
                    "num_stages": tile.stages,
                    "num_warps": tile.warps,
                }

    return WithTF32Tiles
