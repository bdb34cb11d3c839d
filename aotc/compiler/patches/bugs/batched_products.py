"""Batched products whose result is read again: `y = x @ x.mT; return y, y.sin()`.

Inductor's template of a batched product stores a matrix of two dims, and adds the batch's index for the loops that it
fuses behind the product. For loops of its own (the copy of a result that others read) it did not: the build failed.
torch 2.14 does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def batches_are_indexed() -> Iterator[None]:
    """While active, all loops within the template get the batch's index."""
    from torch._inductor.codegen.cpp_bmm_template import CppBmmTemplate

    options_of: Any = CppBmmTemplate.get_options

    def with_batch(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        options: dict[str, Any] = options_of(self, *args, **kwargs)
        (of_batch,) = self.get_default_reindexers([None])
        options["reindexers"] = [reindexer or of_batch for reindexer in options["reindexers"]]
        return options

    with mock.patch.object(CppBmmTemplate, "get_options", with_batch):
        yield
