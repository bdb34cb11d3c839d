"""Which products have templates of the tensor memory accelerator among their candidates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor.kernel import mm
from torch._inductor.select_algorithm import AlgorithmSelectorCache

from aotc.build.compile import TMA_TEMPLATES, _gpu_candidates
from aotc.build.tma_templates import tma_templates_on_tensor_cores_only

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
