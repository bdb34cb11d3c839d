"""Powers of an int with a tensor of ints as exponents: `2 ** x`.

torch's operator takes the base as a number. A library passes every number as a float, so the result has floats, where
the surrounding code expects ints. A base that is a tensor keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def powers_of_ints_are_ints() -> Iterator[None]:
    """While active, the base of such a power is passed as a tensor of the exponents' dtype."""
    from torch._inductor import lowering

    def power(base: int, exponents: Any) -> Any:
        form = {"dtype": exponents.get_dtype(), "device": exponents.get_device()}
        return lowering.fallback_pow_tensor_tensor(lowering.full([], base, **form), exponents)

    with mock.patch.object(lowering, "fallback_pow_scalar", power):
        yield
