"""When Inductor may use its templates with the tensor memory accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from aotc.compiler.patches.shared.inductor import inductor

TMA_TEMPLATES = "triton.enable_persistent_tma_matmul"
"""An option of Inductor; if the user sets it, aotc changes nothing about these templates."""


@contextmanager
def also_required(condition: Callable[..., bool]) -> Iterator[None]:
    """While active, Inductor's check whether it can use these templates also requires `condition` of the matrices."""
    mm = inductor("kernel.mm")

    def with_condition(usable: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *matrices, **kwargs: condition(*matrices) and usable(*matrices, **kwargs)

    with ExitStack() as patches:
        for name in ("use_triton_tma_template", "use_triton_blackwell_tma_template"):
            patches.enter_context(mock.patch.object(mm, name, with_condition(getattr(mm, name))))
        yield
