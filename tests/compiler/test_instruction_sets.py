"""Code is for the target's CPU, whatever CPU builds it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import torch

from aotc.compiler.codegen.instruction_sets import code_for
from aotc.machine.targets import parse_target


class Model(torch.nn.Module):
    """Vectorised loops of floats and of bfloat16, a reduction, and functions of SLEEF."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.exp() * x.sin()).sum(-1), (y * 3 + 1).tanh()


def test_a_library_for_v3_has_no_register_of_avx_512(tmp_path: Path) -> None:
    x, y = torch.randn(32, 256), torch.randn(32, 256).bfloat16()
    program = torch.export.export(Model(), (x, y))
    options = {
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.precompile_headers": False,
        "aot_inductor.output_path": str(tmp_path / "model.so"),
    }
    with torch.no_grad(), code_for(parse_target("cpu:x86-64-v3")):
        path = torch._inductor.aot_compile(program.module(), (x, y), options=options)
    shown = subprocess.run(["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True)
    registers = set(re.findall(r"%([xyz]mm|k)[0-9]", shown.stdout))
    assert "ymm" in registers
    assert not {"zmm", "k"} & registers  # neither its vectors nor its masks
