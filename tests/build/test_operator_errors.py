"""What operators raise: libraries look at the error codes of those that they call by name, in every torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch._higher_order_ops.effects import _EffectType, _get_effect
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
from torch._library.simple_registry import singleton

from aotc.build.inductor.operator_errors import operator_errors_are_raised

CALL = "aoti_torch_proxy_executor_call_function(proxy_executor, 0, 0, {}, 2, tensors)"


def written(wrapper: type[CppWrapperCpu], *lines: str) -> list[str]:
    found: list[str] = []
    for line in lines:
        wrapper.writeline(SimpleNamespace(lines=found), line)
    return found


def test_an_error_code_is_looked_at_once() -> None:
    """As torch 2.11 and 2.12 write the call, and as later ones do."""
    checked = f"AOTI_TORCH_ERROR_CODE_CHECK({CALL});"
    with operator_errors_are_raised():
        for wrapper in (CppWrapperCpu, CppWrapperGpu):
            assert written(wrapper, f"{CALL};", checked, "int x;") == [checked, checked, "int x;"]
    assert written(CppWrapperCpu, f"{CALL};") == [f"{CALL};"]


def test_checks_of_linalg_are_no_dead_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch takes them for it, as 2.11 and 2.12 do."""
    check = "aten::_linalg_check_errors"
    monkeypatch.setattr(singleton.find(check).effect, "_effect", None)
    assert _get_effect(check) is None
    with operator_errors_are_raised():
        assert _get_effect(check) is _EffectType.ORDERED
    assert _get_effect(check) is None
