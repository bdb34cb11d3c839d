"""[AOTInductor] An operator with an integer argument that the model leaves out cannot be called.

Expected: the default, as of `index_add`'s factor. Seen: the library gives it, the written schema does not, and every
call fails, as integers are counted when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.inductor import serialised_within

PATCH = Patch(
    __name__,
    severity="build",
    torch=">=2.11,<2.15",
    targets=("torch._inductor.ir:FallbackKernel.export_extern_kernel_node()",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, integers with a default are serialised like the others."""

    def with_defaults(kernel: Any) -> AbstractContextManager[Any]:
        arguments_of = kernel.unflatten_args

        def all_arguments(*given: Any) -> tuple[Any, dict[str, Any]]:
            args, kwargs = arguments_of(*given)
            names = kernel.ordered_kwargs_for_cpp_kernel
            return args, {**{name: kernel.get_kwargs_value(name, **kwargs) for name in names}, **kwargs}

        return mock.patch.object(kernel, "unflatten_args", all_arguments)

    with serialised_within(with_defaults):
        yield


def reproduce(patches: Torch) -> None:
    def function(x: Tensor, rows: Tensor, more: Tensor) -> Tensor:
        return x.index_add(0, rows, more)

    inputs = torch.zeros(4, 3).bfloat16(), torch.tensor([1, 2]), torch.ones(2, 3).bfloat16()
    assert_same(patches.library, function, *inputs)
