"""Capture a model of DTensors, as `parallelize_module` and transformers' `tp_plan` make them, as code of local tensors.

The parameters of the graph are the local tensors. What forward makes of them are DTensors again, whose operators run as
operators of local tensors and functional collectives. torch.export would record the operators of DTensors, which no
library can hold: so it captures below the dispatch to subclasses, and does not record that a DTensor is made.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from aotc.compiler.scoped import replaced
from aotc.tensors.subclasses import is_dtensor


class _Distributed(nn.Module):
    """A parametrisation: the DTensor of a local tensor; with `plain`, the local tensor itself."""

    plain = False

    def __init__(self, tensor: Any) -> None:
        super().__init__()
        self.form = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    def forward(self, local: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        if self.plain:
            return local
        mesh, placements, shape, stride = self.form
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_parameters(part: nn.Module) -> None:
    """Let a module's own parameters and buffers that are DTensors be computed from their local tensors."""
    from torch.nn.utils.parametrize import register_parametrization

    for table in (part._parameters, part._buffers):
        for key, tensor in list(table.items()):
            if is_dtensor(tensor):
                local = tensor.to_local()  # type: ignore[union-attr]
                is_parameter = table is part._parameters
                table[key] = nn.Parameter(local, requires_grad=False) if is_parameter else local
                register_parametrization(part, key, _Distributed(tensor), unsafe=True)


def export_program(module: nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> Any:
    """torch.export's program; of a module with `local_parameters`, one of local tensors."""
    if not any(isinstance(part, _Distributed) for part in module.modules()):
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    import torch._export.wrappers as wrappers
    from torch.export._trace import _export

    with (
        replaced(wrappers, "_maybe_find_pre_dispatch_tf_mode_for_export", lambda: None),
        _local_layers_of_transformers(),
    ):
        return _export(module, args, kwargs, dynamic_shapes, strict=False, pre_dispatch=False)


@contextmanager
def _local_layers_of_transformers() -> Iterator[None]:
    """While active, the layers that transformers runs on local tensors find them: it looks for DTensors among the
    parameters of a module, where there are none now."""
    name = "_use_local_dtensor_params"
    users = [
        module
        for key, module in sys.modules.items()
        if key.startswith("transformers.distributed.") and hasattr(module, name)
    ]
    with ExitStack() as stack:
        for module in users:
            stack.enter_context(replaced(module, name, _plain))
        yield


@contextmanager
def _plain(module: nn.Module) -> Iterator[None]:
    parts = [part for part in module.modules() if isinstance(part, _Distributed)]
    for part in parts:
        part.plain = True
    try:
        yield
    finally:
        for part in parts:
            part.plain = False
