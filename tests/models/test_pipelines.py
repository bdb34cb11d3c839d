"""A pipeline of diffusers by `aotc.attach`. CI's first torch runs it by the tutorial in `examples/diffusion`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, run_python

pytest.importorskip("diffusers")
pytestmark = pytest.mark.every_torch(alone=True)

EXAMPLE = ROOT / "examples" / "diffusion"
SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
import denoise
denoise.STORE = sys.argv[2]
call = denoise.PROMPT | denoise.POOLED | {"output_type": "latent", "height": 128}
denoise.compare(denoise.flux, {"transformer": "flux"}, call | {"width": 128}, call | {"width": 192})
"""


def test_a_transformer_by_its_blocks_gives_eagers_images(shared_folder: Path, built: Any) -> None:
    store = built(shared_folder, "diffusion-store", EXAMPLE / "manifest.yaml", ("flux",))
    assert "of transformer, as eager" in run_python(SERVE, EXAMPLE, store)
