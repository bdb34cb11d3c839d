"""[inductor] With CPU autotuning, a batched product that is read again does not build.

Expected: eager's result. Seen: `AssertionError` of `len(index) == len(stride)`: `CppGemmTemplate.get_options` gives the
template's own epilogues no reindexer, and those of `CppBmmTemplate` have a dim more than its tiles. torch 2.14 gives
them `get_default_reindexers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="build",
    torch=">=2.11,<2.14",
    device="cpu",
    targets=("torch._inductor.codegen.cpp_bmm_template:CppBmmTemplate.get_options(kernel, ...)",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, all loops within the template get the batch's index."""
    from torch._inductor.codegen.cpp_bmm_template import CppBmmTemplate

    options_of: Any = CppBmmTemplate.get_options

    def with_batch(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        options: dict[str, Any] = options_of(self, *args, **kwargs)
        (of_batch,) = self.get_default_reindexers([None])
        options["reindexers"] = [reindexer or of_batch for reindexer in options["reindexers"]]
        return options

    with replaced(CppBmmTemplate, "get_options", with_batch):
        yield


def reproduce(patches: Torch) -> None:
    def function(x: Tensor) -> list[Tensor]:
        y = x @ x.mT
        return [y, y.sin()]

    library = partial(patches.library, max_autotune=True, max_autotune_gemm_backends="CPP")
    assert_same(library, function, torch.rand(2, 12, 16))
