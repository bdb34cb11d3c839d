"""What a build's smoke run finds in compiled code that runs."""

from __future__ import annotations

from pathlib import Path

import yaml
from processes import run_aotc

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, y):
        return x + 1, torch.ldexp(x, y)
"""


def test_an_output_of_another_dtype_than_export_s_fails_the_build(tmp_path: Path) -> None:
    """torch's compiler takes ldexp's result to be of its first operand's dtype; eager promotes."""
    (tmp_path / "scaled_model.py").write_text(MODEL)
    inputs = {"x": {"shape": [4], "dtype": "bfloat16"}, "y": {"shape": [4]}}
    model = {"factory": "scaled_model.py:Model", "mode": "default", "inputs": inputs}
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"scaled": model}}))
    ran = run_aotc("build", tmp_path / "manifest.yaml", "--store", tmp_path / "store", cwd=tmp_path)
    assert ran.returncode == 1
    assert "output 1: float32 [4] in the model, bfloat16 [4] in the compiled code" in ran.stdout + ran.stderr
