"""Use templates with the tensor memory accelerator only for matrix products on tensor cores, and only for matrices that
it can load.

Plain float32 products run on the ordinary cores. These templates do not make them faster, and the compiler unrolls
every multiplication of a tile: half a minute for tiles of their sizes, where any other template compiles in four
seconds (torch 2.11, Hopper).

For TF32 on Hopper, the tiles of Inductor's template are made for two-byte elements: most do not fit in shared memory,
and each is written at once, which needs more registers than an epilogue leaves. `TF32_TILES` belong to another
template, `tf32_on_hopper.jinja`: it writes a tile in parts, two programs may share a multiprocessor, and the columns of
a tile may be three quarters of a power of two. 4096 × 768 results are 96 tiles of 128 × 256, which leave 36 of an
H200's 132 multiprocessors idle, and 128 tiles of 128 × 192.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from aotc.compiler.patches.shared.inductor import inductor

HOPPER = 9
"""The major compute capability."""

MAP_ALIGNMENT = 16
"""Bytes: a tensor map's address and its outer stride must be multiples of this (CUDA's driver API, "Tensor Map Object
Management")."""

SOURCE = Path(__file__).with_name("tf32_on_hopper.jinja")


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
def tma_templates_on_tensor_cores_only() -> Iterator[None]:
    """While active, these templates are left out of races for a plain float32 product."""
    with _asked_also(lambda *matrices: _on_tensor_cores(matrices[0].get_dtype())):
        yield


@contextmanager
def valid_tensor_maps_only() -> Iterator[None]:
    """While active, these templates are left out of races for matrices for which they would create invalid tensor maps.

    Inductor checks whether a valid map exists, at the example's sizes; but its templates use the wrong axis for a
    matrix of one row, or for a slice of columns, and do not check where a slice begins (torch 2.11, 2.13).
    """
    with _asked_also(lambda *matrices: all(map(_has_tensor_map, matrices))):
        yield


@contextmanager
def _asked_also(condition: Callable[..., bool]) -> Iterator[None]:
    """While active, Inductor's check whether it can use these templates also requires `condition` of the matrices."""
    mm = inductor("kernel.mm")

    def with_condition(usable: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *matrices, **kwargs: condition(*matrices) and usable(*matrices, **kwargs)

    with ExitStack() as patches:
        for name in ("use_triton_tma_template", "use_triton_blackwell_tma_template"):
            patches.enter_context(mock.patch.object(mm, name, with_condition(getattr(mm, name))))
        yield


def _has_tensor_map(matrix: Any) -> bool:
    """Whether the tensor map that a template creates for a matrix is valid, at every size of a range."""
    from torch._inductor.virtualized import V

    layout, numbers = matrix.get_layout(), V.graph.sizevars
    outer, inner = reversed(layout.stride) if layout.is_transposed() else layout.stride
    aligned = MAP_ALIGNMENT // layout.dtype.itemsize
    return bool(
        numbers.statically_known_equals(inner, 1)
        and numbers.statically_known_multiple_of(outer, aligned)
        and numbers.statically_known_multiple_of(layout.offset, aligned)
    )


def _on_tensor_cores(dtype: torch.dtype) -> bool:
    return dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"


@contextmanager
def tiles_for_tf32_on_hopper() -> Iterator[None]:
    """While active, `TF32_TILES` replace Inductor's own template of this kind in races for float32 matrices."""
    choices, mm = inductor("choices").InductorChoices, inductor("kernel.mm")
    configurations = choices.get_template_configs

    def with_tiles(self: Any, inputs: Any, templates: Any, op: str, *args: Any, **kwargs: Any) -> Any:
        if _float32_on_hopper(inputs.dtype()):
            templates = [_template() if one is mm.persistent_tma_mm_template else one for one in templates]
        return configurations(self, inputs, templates, op, *args, **kwargs)

    with mock.patch.object(choices, "get_template_configs", with_tiles):
        yield


def _float32_on_hopper(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and torch.cuda.get_device_capability()[0] == HOPPER


@functools.cache
def _template() -> Any:
    """The template, registered in Inductor with its configurations."""
    algorithm, heuristics = inductor("select_algorithm"), inductor("template_heuristics.triton")
    template = algorithm.TritonTemplate(name="tf32_on_hopper", grid=_grid(), source=SOURCE.read_text())
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
