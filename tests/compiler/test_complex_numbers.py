"""Arguments of operators that no library can pass are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aotc.compiler.codegen.called_operators import calls_checked
from aotc.compiler.explain_failure import explain_failure


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
