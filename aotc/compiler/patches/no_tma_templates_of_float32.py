"""Templates with the tensor memory accelerator race only for matrix products on tensor cores.

Plain float32 products run on the ordinary cores. These templates do not make them faster, and the compiler unrolls
every multiplication of a tile: half a minute for tiles of their sizes, where any other template compiles in four
seconds (torch 2.11, Hopper).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.shared.inductor import TMA_TEMPLATES, tma_templates_require

PATCH = Patch(
    __name__,
    kind="performance",
    device="cuda",
    wanted=lambda options: TMA_TEMPLATES not in options,
    targets=("torch._inductor.choices:InductorChoices.get_template_configs(kernel_inputs, templates, op_name)",),
)


def apply() -> AbstractContextManager[None]:
    """While active, these templates are left out of races for a plain float32 product."""
    return tma_templates_require(lambda *matrices: _on_tensor_cores(matrices[0].get_dtype()))


def _on_tensor_cores(dtype: torch.dtype) -> bool:
    return dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
