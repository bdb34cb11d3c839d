"""What a service runs, as scripts for fresh processes."""

from __future__ import annotations

MODEL = """
import sys
import torch, aotc
from examples.models import transformer_block
module = transformer_block(width=256, heads=4).eval()
"""
"""The module of manifests/quickstart.yaml."""

LOAD = f"""{MODEL}
compiled = aotc.load(sys.argv[1], module)
x = torch.randn(4, 128, 256)
with torch.no_grad():
    assert torch.allclose(compiled(x), module(x), atol=1e-4)
compilers = ("torch._dynamo", "torch._inductor", "triton", "sympy", "aotc.compiler", "aotc.manifest", "yaml", "rich")
print([name for name in sys.modules if name.startswith(compilers)], sys.argv[2] in sys.modules)
"""
"""Load a reference, compute, and print which compilers were imported, and whether a module was."""
