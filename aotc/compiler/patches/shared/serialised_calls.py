"""How torch serialises the calls of operators that a library calls by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock


def serialised_within(changed: Callable[[Any], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """While active, torch serialises a call of an operator inside the context `changed(kernel)`."""
    from torch._inductor import ir

    write: Callable[..., Any] = ir.FallbackKernel.export_extern_kernel_node

    def write_changed(kernel: Any) -> Any:
        with changed(kernel):
            return write(kernel)

    return mock.patch.object(ir.FallbackKernel, "export_extern_kernel_node", write_changed)
