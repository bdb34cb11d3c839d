"""What Inductor runs on the GPU while it compiles, for a GPU that is absent.

- It calls each Triton kernel once, on random tensors, to have it compiled. Such a call then computes nothing, and no
  value of it is read.
- It computes constants of one value (`torch.full(…) * 2`), to put the value into the code. That is done on the CPU.

Everything else that is launched is an error (`stand_in.launches_ignored`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from aotc.compiler.cross_compile.stand_in import is_loaded, launches_ignored
from aotc.compiler.patches.shared.inductor import inductor
from aotc.compiler.scoped import replaced


@contextmanager
def lowering_without_gpu() -> Iterator[None]:
    """While active in a process with a stand-in for CUDA, Inductor runs nothing on the GPU; other processes are not
    affected."""
    if not is_loaded():
        yield
        return
    wrapper = inductor("codegen.wrapper").PythonWrapperCodegen
    folder = inductor("fx_passes.joint_graph").UniformValueConstantFolder
    call_kernels, deduce = wrapper.generate_and_run_autotune_block, folder._deduce_value

    def ignoring(self: Any, *args: Any, **kwargs: Any) -> Any:
        with launches_ignored():
            return call_kernels(self, *args, **kwargs)

    def on_cpu(self: Any, node: Any) -> Any:
        with _OnCpu():  # type: ignore[no-untyped-call]
            return deduce(self, node)

    with (
        replaced(wrapper, "generate_and_run_autotune_block", ignoring),
        replaced(folder, "_deduce_value", on_cpu),
    ):
        yield


class _OnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, operators take and give tensors on the CPU in the place of those on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        args, kwargs = pytree.tree_map(_on_cpu, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_cuda:
        return value.cpu()
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value
