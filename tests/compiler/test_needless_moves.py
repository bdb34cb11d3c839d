"""`part.to(dtype)` within forward: skipped where it changes nothing, as in routers of mixtures of experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotc.compiler.fix_buckets import why_not_captured
from aotc.manifest import ModelSpec

MODEL = """
import torch
from torch import nn


class Routed(nn.Module):
    def __init__(self, dtype="float32"):
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.dtype = getattr(torch, dtype)

    def forward(self, x):
        self.router = self.router.to(self.dtype).to("cpu")
        return self.router(x.to(self.dtype)).float()
"""


@pytest.mark.parametrize(("dtype", "is_captured"), [("float32", True), ("bfloat16", False)])
def test_a_part_that_has_the_dtype_already_is_not_moved(tmp_path: Path, dtype: str, is_captured: bool) -> None:
    (tmp_path / "routed.py").write_text(MODEL)
    spec = ModelSpec(
        name="routed",
        factory="routed.py:Routed",
        kwargs={"dtype": dtype},
        inputs={"x": {"shape": ["n", 4]}},
        buckets=({"n": 3},),
    )
    refused = why_not_captured(spec, tmp_path, {"n": 3})
    if is_captured:
        assert refused is None
    else:
        assert refused is not None and "do it once, in the factory" in refused.hint
