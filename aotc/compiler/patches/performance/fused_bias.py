"""cuBLASLt's product with the bias added inside, as a candidate of autotuning.

Inductor (torch 2.11) offers it to `torch.compile`, as `bias_addmm`, and not to ahead-of-time builds, since that Python
function has no C++ counterpart: a linear layer that goes to cuBLAS copies the bias into every row of the result first.
But `at::addmm_out` itself, given the bias as the row that it is, calls cuBLASLt. Later torches give it so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def fused_bias_offered() -> Iterator[None]:
    """Let cuBLASLt's fused bias race, too, wherever implementations of `addmm` do and cuBLAS is one of them."""
    from torch._inductor import config
    from torch._inductor.kernel import mm
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    select: Any = AlgorithmSelectorCache.__call__
    offered: Any = mm.aten_bias_addmm

    def with_fused_bias(self: Any, name: str, choices: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        plain = next((choice for choice in choices if getattr(choice, "choice", None) is mm.aten_addmm), None)
        races = config.max_autotune or config.max_autotune_gemm
        if races and plain is not None and _is_repeated_row(plain.input_nodes[0]):
            fused = offered.bind(plain.input_nodes, plain.layout, **plain.kwargs)
            choices = [*choices, fused]
        return select(self, name, choices, *args, **kwargs)

    with (
        mock.patch.object(AlgorithmSelectorCache, "__call__", with_fused_bias),
        mock.patch.object(offered, "kernel_creator", _addmm_with_row),
    ):
        yield


def _is_repeated_row(bias: Any) -> bool:
    strides = bias.maybe_get_stride()  # what is not computed yet has none
    return strides is not None and len(strides) == 2 and strides[0] == 0


def _addmm_with_row(bias: Any, left: Any, right: Any, *, alpha: Any = 1, beta: Any = 1) -> Any:
    """The node of `addmm` with one row of the expanded bias: `[rows, inner]` by `[inner, columns]`."""
    import torch
    from torch._inductor import ir

    storage, layout = ir.as_storage_and_layout(bias)
    row = ir.FixedLayout(layout.device, layout.dtype, layout.size[1:], layout.stride[1:], layout.offset)
    size = [left.get_size()[0], right.get_size()[1]]
    return ir.ExternKernelOut(
        layout=ir.FixedLayout(left.get_device(), left.get_dtype(), size),
        inputs=[ir.ReinterpretView(data=storage, layout=row), left, right],
        python_kernel_name="extern_kernels.addmm",
        cpp_kernel_name="at::addmm_out",
        op_overload=torch.ops.aten.addmm.out,
        kwargs={"alpha": alpha, "beta": beta},
    )
