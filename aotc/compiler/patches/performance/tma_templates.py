"""Templates that load by the tensor memory accelerator, as candidates of matrix products on tensor cores only, and of
matrices that it can load.

In plain float32 the ordinary cores multiply, whose speed these templates do not raise, and the compiler writes out
every multiplication of a tile: for tiles of their sizes half a minute of it, where any other template takes four
seconds (torch 2.11, Hopper).

Of TF32 on Hopper, Inductor's template has tiles made for two-byte elements, of which most do not fit in shared memory,
and each is written at once, from more registers than what follows a product leaves. `TF32_TILES` are of another one,
`tf32_on_hopper.jinja`: it writes a tile in parts, two programs may share a multiprocessor, and a tile may have three
quarters of a power of two columns. 4096 × 768 results are 96 tiles of 128 × 256, which leave 36 of an H200's 132
multiprocessors idle, and 128 of 128 × 192.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from aotc.compiler.patches.inductor import inductor

HOPPER = 9
"""The major compute capability."""

MAP_ALIGNMENT = 16
"""Bytes, of which a tensor map's address and its outer stride are multiples (CUDA's driver API, "Tensor Map Object
Management")."""

SOURCE = Path(__file__).with_name("tf32_on_hopper.jinja")


class Tile(NamedTuple):
    """One configuration: the tile's rows and columns, which are those of two products, the second of which may have
    none; elements multiplied at a time; loads in flight; warps; the columns that are written at a time; how many
    programs share a multiprocessor; and whether the loop over a program's tiles is flattened into the one within.
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
"""The fastest of 222, and of 180 with three quarters, on an H200: alone, and with what follows a product in them."""


@contextmanager
def tma_templates_on_tensor_cores_only() -> Iterator[None]:
    """Leave these templates out of races between implementations of a plain float32 product."""
    with _asked_also(lambda *matrices: _on_tensor_cores(matrices[0].get_dtype())):
        yield


@contextmanager
def valid_tensor_maps_only() -> Iterator[None]:
    """Leave these templates out of races for matrices of which they would make invalid tensor maps.

    Inductor asks whether there is a valid one, at the example's sizes; but its templates take a matrix of one row, or a
    slice of columns, by the wrong axis, and do not look where a slice begins (torch 2.11, 2.13).
    """
    with _asked_also(lambda *matrices: all(map(_has_tensor_map, matrices))):
        yield


@contextmanager
def _asked_also(condition: Callable[..., bool]) -> Iterator[None]:
    """Where Inductor asks whether it can use these templates for some matrices, let it be that the condition holds."""
    mm = inductor("kernel.mm")

    def with_condition(usable: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *matrices, **kwargs: condition(*matrices) and usable(*matrices, **kwargs)

    with ExitStack() as patches:
        for name in ("use_triton_tma_template", "use_triton_blackwell_tma_template"):
            patches.enter_context(mock.patch.object(mm, name, with_condition(getattr(mm, name))))
        yield


def _has_tensor_map(matrix: Any) -> bool:
    """Whether the tensor map that a template makes of a matrix is a valid one, at every size of a range."""
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
    """Race `TF32_TILES` wherever Inductor's own template of this kind would race for float32 matrices, in its place."""
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
    """The template, made known to Inductor with its configurations."""
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
    """Inductor's class of such a template's configurations, which gives `TF32_TILES`."""

    class WithTF32Tiles(inherited):  # type: ignore[misc]
        def _get_template_configs_impl(self, kernel_inputs: Any, op_name: str, **kwargs: Any) -> Iterator[Any]:
            if getattr(inductor("config"), "force_same_precision", False):  # torch 2.11 and 2.12 have it
                return  # then a product may not be of TF32 after all, and these would round its operands
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
