"""Complex tensors, and numbers beside them, are those of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aotc.compiler.codegen.called_operators import calls_checked
from aotc.compiler.explain_failure import explain_failure

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, z, x):
        differences = z - z.flip(0), x - z, torch.sub(z, x, alpha=3), z - 2, 1j - z, x - x.flip(0)
        quotients = z / 2, z / 2j, x / 2j, 2 / z, z.sum() / 3, x / x.shape[0]
        chosen = torch.where(x > 0, z, 0), z.masked_fill(x > 0, 1j), z != 1j, z == 2, x != 2
        filled = torch.full_like(z, 2j), torch.full((2,), 1j), torch.zeros(3, dtype=z.dtype) + z, z.clone().fill_(3)
        return differences, quotients, chosen, filled, torch.full((2,), 1.5), torch.scalar_tensor(2)
"""


def test_complex_tensors_and_numbers_beside_them_are_those_of_eager(compile_model: Any) -> None:
    inputs = {"z": {"shape": ["n", 3], "dtype": "complex64"}, "x": {"shape": ["n", 3]}}
    compiled, module = compile_model(MODEL, inputs=inputs, buckets=[{"n": {"range": [2, 8], "tune_at": 4}}])
    for n in (2, 4, 5):
        z, x = torch.randn(n, 3, dtype=torch.complex64), torch.randn(n, 3)
        z[0, 0], z[1, 1] = 1j, 2
        torch.testing.assert_close(compiled(z, x), module(z, x))


@pytest.mark.parametrize(
    ("call", "told", "hint"),
    [
        (
            lambda z: z**2j,
            "with the complex number 2j, which a compiled library cannot pass",
            "give the operator a tensor",
        ),
        (
            lambda z: z.sum().squeeze(()),
            "with an empty list, which a compiled library cannot pass",
            "leave the argument out",
        ),
    ],
    ids=["a complex number", "an empty list"],
)
@pytest.mark.skipif(torch.__version__ >= "2.15", reason="these are torch's limits up to 2.14")
def test_what_no_library_can_pass_to_an_operator_is_refused_with_its_line(call: Any, told: str, hint: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, z: torch.Tensor) -> Any:
            return call(z)

    example = (torch.randn(3, 4, dtype=torch.complex64),)
    graph = torch.export.export(Model(), example).module()
    with calls_checked(), pytest.raises(Exception, match="which a compiled library cannot pass") as caught:
        torch._inductor.aot_compile(graph, example, options={})
    error = explain_failure(caught.value, "compile")
    assert told in error.message and error.hint.startswith(hint)
    assert error.source.startswith(f"{__name__.rpartition('.')[2]}.py:")
