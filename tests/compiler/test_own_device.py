"""The GPU that generated code makes tensors on: the library's, whatever its number was at build."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.virtualized import V

from aotc.compiler.patches import device_of_the_build


@pytest.mark.parametrize(
    ("device", "aot_mode", "written"),
    [
        ("cuda", True, "cached_torch_device_type_cuda, this->device_idx_"),
        ("cuda:1", True, "cached_torch_device_type_cuda, this->device_idx_"),
        ("cuda:1", False, "cached_torch_device_type_cuda, 1"),
        ("cuda:2", True, "cached_torch_device_type_cuda, 2"),  # another GPU, that the model names
        ("cpu", True, "cached_torch_device_type_cpu, 0"),
    ],
)
def test_a_device_in_generated_code(device: str, aot_mode: bool, written: str) -> None:
    wrapper = CppWrapperCpu.__new__(CppWrapperCpu)
    wrapper.used_cached_devices = set()
    graph: Any = SimpleNamespace(aot_mode=aot_mode, device_idxs=[1, 2])
    with device_of_the_build.apply(), V.set_graph_handler(graph):
        assert wrapper.codegen_device(torch.device(device)) == written
