"""What operators raise: libraries look at the error code of every C function that they call, in every torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _get_effect
from torch._inductor.codecache import AotCodeCompiler
from torch._library.simple_registry import singleton

from aotc.compiler.patches import operator_errors
from aotc.compiler.patches.operator_errors import with_error_checks

CALL = "aoti_torch_proxy_executor_call_function(proxy_executor, 0, 0, {}, 2, tensors)"
INCLUDE = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("{\n    ", ";\n}", id="in a block of its own"),
        pytest.param("int x;\n// why\n", ";\nint y;", id="after a comment"),
        pytest.param("int x; ", "; int y;", id="among others on a line"),
        pytest.param("if (wanted) ", ";", id="without braces"),
        pytest.param("int x;\n#ifdef WANTED\n", ";\n#endif", id="after a directive"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        CALL,
        "aoti_torch_cpu_scatter_add_out(buf1, buf0, 0L, arg1, arg0)",
        "aoti_torch_cpu_scatter_reduce_two_out(buf, buf, f(a), \")(\", ')')",
        "aoti_torch_cpu_index_put_out(\n    buf, std::array<AtenTensorHandle, 2>{a, b}.cbegin(), 2, c, true)",
    ],
)
def test_every_call_that_drops_its_error_code_is_checked(before: str, call: str, after: str) -> None:
    checked = f"{before}AOTI_TORCH_ERROR_CODE_CHECK({call}){after}"
    assert with_error_checks(before + call + after) == checked
    assert with_error_checks(checked) == checked


@pytest.mark.parametrize(
    "line",
    [
        "int32_t code = aoti_torch_get_dtype(x, &dtype);",
        "AOTI_TORCH_ERROR_CODE_CHECK(\n    aoti_torch_get_dtype(x, &dtype));",
        "AOTITorchError aoti_torch_cpu_mine(AtenTensorHandle, AtenTensorHandle*);",
        'x = 1; aoti_torch_print_tensor_handle(x, "x");',
    ],
)
def test_nothing_else_is_touched(line: str) -> None:
    assert with_error_checks(f"{{\n    {line}\n}}") == f"{{\n    {line}\n}}"


class ManyOperators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(16.0))

    def forward(self, x: Tensor, i: Tensor, row: Tensor) -> Any:
        zeros = torch.zeros(8, 8)
        scattered = (
            zeros.scatter_add(0, i, x),
            zeros.scatter_reduce(0, i, x, "prod"),
            zeros.scatter_reduce(0, i, x, "amax", include_self=False),
            zeros.scatter(0, i, x, reduce="multiply"),
            torch.zeros(8, 8, dtype=torch.bfloat16).scatter_add(0, i, x.bfloat16()),
            zeros.index_put((row,), x, accumulate=True),
            torch.zeros(8, 8, dtype=torch.bool).index_put((row, row), x[0] > 0, accumulate=True),
            zeros.index_reduce(0, row, x, "mean"),
            zeros.masked_scatter(x > 0, x),
        )
        others = (
            torch.linalg.cholesky(x @ x.T + torch.eye(8)),
            *x.sort(stable=True),
            *x.topk(2),
            torch.bincount(row, minlength=8),
            torch.searchsorted(x[0], x[1]),
            nn.functional.grid_sample(x[None, None], x.view(1, 4, 8, 2), align_corners=False),
            torch.fft.rfft(x).abs(),
            x.to(torch.complex64).exp().real,
        )
        return self.table, *scattered, *others


def test_a_generated_wrapper_drops_no_error_code() -> None:
    """Of the functions that torch declares to return an AOTITorchError."""
    found: list[str] = []

    def compiled(cls: type, graph: Any, wrapper: str, *args: Any, **kwargs: Any) -> list[str]:
        found.append(wrapper)
        return []

    index = torch.zeros(8, 8, dtype=torch.int64)
    captured = torch.export.export(ManyOperators().eval(), (torch.rand(8, 8), index, index[0]))
    with (
        torch.no_grad(),
        mock.patch.object(AotCodeCompiler, "compile", classmethod(compiled)),
        operator_errors.apply(),
    ):
        options = {"aot_inductor.package": True}
        torch._inductor.aot_compile(captured.module(), captured.example_inputs[0], options=options)
    called = set(re.findall(r"\baoti_torch_\w+(?=\()", found[0]))
    assert {"aoti_torch_clone", "aoti_torch_cpu_scatter_reduce_two_out", "aoti_torch_index_put_out"} <= called
    assert not dropped(found[0])


def dropped(wrapper: str) -> set[str]:
    """The functions that the source calls without a look at the error code, by the words before each call."""
    declared = "".join(path.read_text() for path in INCLUDE.rglob("*.h"))
    names = set(re.findall(r"AOTITorchError\s+(aoti_torch_\w+)\(", declared))
    calls = re.finditer(r"(?P<before>\S*)\s*\b(?P<name>aoti_torch_\w+)\(", wrapper)
    return {call["name"] for call in calls if call["name"] in names and not call["before"].endswith(("(", "="))}


def test_checks_of_linalg_are_no_dead_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch takes them for it, as 2.11 and 2.12 do."""
    check = "aten::_linalg_check_errors"
    monkeypatch.setattr(singleton.find(check).effect, "_effect", None)
    assert _get_effect(check) is None
    with operator_errors.apply():
        assert _get_effect(check) is _EffectType.ORDERED
    assert _get_effect(check) is None
