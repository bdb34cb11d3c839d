"""A matrix product with a transposed weight on a CPU may run in oneDNN: as a candidate of races.

ATen gives float32 products to MKL, which takes slower code on CPUs that are not Intel's: on an AMD EPYC with AVX2,
128 × 768 by 768 × 3072 in one thread takes oneDNN 9.6 ms and MKL 14.2. Inductor's own C++ template is for frozen
weights alone. oneDNN takes a weight as the module holds it, so live weights stay live.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.shared.inductor import inductor

PATCH = Patch(
    __name__,
    kind="performance",
    device="cpu",
    targets=(
        "torch._inductor.choices:InductorChoices.get_template_configs(kernel_inputs, templates, op_name)",
        "torch._inductor.mkldnn_ir:LinearUnary.create(x, w, B, attr, scalars, algorithm)",
    ),
)

NAME = "onednn_linear"

LEAST = 1 << 22
"""Multiplications, about 0.1 ms of a core: races of less are decided by noise."""


@contextmanager
def apply() -> Iterator[None]:
    """While active, oneDNN's linear layer races where ATen's product does."""
    from torch._inductor.virtualized import V

    class ChoicesWithOneDnn(type(V.choices)):  # type: ignore[misc]
        def get_template_configs(self, inputs: Any, templates: list[Any], *args: Any, **kwargs: Any) -> Any:
            choices = super().get_template_configs(inputs, templates, *args, **kwargs)
            if _races(inputs) and any(one.name in ("mm", "addmm") for one in templates) and _is_linear(inputs):
                choices.append(_candidate().bind(inputs.nodes(), choices[0].layout))
            return choices

    with V.set_choices_handler(ChoicesWithOneDnn()):
        yield


def _races(inputs: Any) -> bool:
    """Whether there is a race, and enough to multiply that its result is not noise."""
    config = inductor("config")
    return bool(config.max_autotune or config.max_autotune_gemm) and math.prod(inputs.mnk_hinted()) >= LEAST


def _is_linear(inputs: Any) -> bool:
    """Whether the product is that of a linear layer in float32: a weight that is read transposed, and perhaps a bias of
    one dimension."""
    nodes = inputs.nodes()
    *biases, _, weight = nodes
    equal = inductor("virtualized").V.graph.sizevars.statically_known_equals
    depth, columns = weight.get_size()
    stride = weight.get_stride()
    return (
        all(node.get_dtype() == torch.float32 and node.get_device().type == "cpu" for node in nodes)
        and bool(equal(stride[0], 1) and equal(stride[1], depth))
        and all(len(bias.get_size()) == 1 and equal(bias.get_size()[0], columns) for bias in biases)
        and all(inputs.get_scalar(name) == 1 for name in ("alpha", "beta") if biases)
    )


def _linear(*operands: torch.Tensor) -> torch.Tensor:
    *bias, rows, weight = operands
    row = bias[0].reshape(-1, bias[0].shape[-1])[0] if bias else None  # a race expands it
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight.t(), row, "none", [], "")
    return product


def _created(*operands: Any) -> Any:
    *bias, rows, weight = operands
    transposed = inductor("lowering").permute(inductor("ir").TensorBox(weight), [1, 0])
    return inductor("mkldnn_ir").LinearUnary.create(rows, transposed, bias[0] if bias else None, "none", [], "")


@functools.cache
def _candidate() -> Any:
    choice = inductor("select_algorithm").ExternKernelChoice
    return choice(_linear, name=NAME, has_out_variant=False, kernel_creator=_created)
