"""Every tile that aotc adds to races of TF32 products gives their results, whatever the sizes and layouts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aotc.compiler.patches import tf32_tiles
from aotc.compiler.patches.tf32_tiles import HOPPER, TF32_TILES

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("own_environment")]


@pytest.fixture(autouse=True)
def tf32() -> Iterator[None]:
    if torch.cuda.get_device_capability()[0] != HOPPER:
        pytest.skip("the template is for Hopper")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def products(x: Tensor, rows: Tensor, columns: Tensor, across: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Of both layouts on both sides, with something merged into the first."""
    return F.gelu(x @ rows.T + bias), x @ columns, across.T @ columns


@pytest.mark.parametrize("tile", range(len(TF32_TILES)))
def test_a_tile_gives_the_products(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.kernel import mm
    from torch._inductor.template_heuristics.registry import override_template_heuristics
    from torch._inductor.utils import fresh_cache, run_and_get_code

    monkeypatch.setattr(tf32_tiles, "TF32_TILES", (TF32_TILES[tile],))
    generator = torch.Generator(device="cuda").manual_seed(tile)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda", generator=generator)

    # No size is a multiple of a tile's, and there are more tiles than programs.
    depth, count, width = 100, 3972, 1316
    inputs = random(count, depth), random(width, depth), random(depth, width), random(depth, count), random(width)
    plain = [(mm.mm_template.uid, op) for op in ("mm", "addmm")]
    options = {
        "max_autotune": True,
        "max_autotune_gemm_backends": "TRITON",
        "triton.enable_persistent_tma_matmul": True,
    }
    with tf32_tiles.apply(), override_template_heuristics("cuda", plain), fresh_cache():
        torch._dynamo.reset()
        found, code = run_and_get_code(torch.compile(products, options=options), *inputs)
    assert "".join(code).count("WRITTEN_N : tl.constexpr") == 3
    exact = products(*(one.double() for one in inputs))
    for result, eager, expected in zip(found, products(*inputs), exact, strict=True):
        assert (result - expected).abs().max() <= 2 * (eager - expected).abs().max()


MAP = "tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [ %rd5 + 0 ], 0x7;"


def test_only_the_maps_of_a_kernel_that_asks_round() -> None:
    from aotc.compiler.patches.shared.rounded_tf32 import _ASKED, with_rounding_maps

    others = "mov.u32 %r1, 0x7;\n" + MAP.replace("elemtype", "swizzle_mode") + "\n" + MAP.replace("0x7", "0x6")
    assert with_rounding_maps(f"{others}\n{MAP}") == f"{others}\n{MAP}"
    rounding = with_rounding_maps(f"{_ASKED}\n{others}\n{MAP}\n{MAP}")
    assert rounding == f"{_ASKED}\n{others}\n" + "\n".join([MAP.replace("0x7", "0xb")] * 2)


def test_a_kernel_that_asks_and_has_no_such_maps_is_an_error() -> None:
    from aotc.compiler.patches.shared.rounded_tf32 import _ASKED, with_rounding_maps

    with pytest.raises(RuntimeError, match="tensor maps"):
        with_rounding_maps(f"{_ASKED}\n{MAP.replace('elemtype', 'element_type')}")


def test_a_hook_of_somebody_elses_is_called_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing, it says what it adds to a kernel's key."""
    from triton import knobs

    from aotc.compiler.patches.shared import rounded_tf32

    def theirs(*arguments: object) -> tuple[str, str] | None:
        return None if arguments else ("their key", "their digest")

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", theirs)
    rounded_tf32._change_ptx()
    hook = knobs.runtime.add_stages_inspection_hook
    assert hook() == ("their key", "their digest")
    stages = {"ptx": lambda source, _metadata: f"{rounded_tf32._ASKED}\n{source}"}
    hook(None, stages, None, None, None)
    assert stages["ptx"](MAP, {}).endswith("0xb;")
