"""Powers of an int by ints of a tensor: `2 ** x`.

torch's operator takes the base as a number. A library hands it one as a float, as it does with every number, and the
result is of floats, where the code around it takes it for ints. A base that is a tensor stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def powers_of_ints_are_ints() -> Iterator[None]:
    """Within, torch's operator for such a power is given the base as a tensor of the exponents' dtype."""
    from torch._inductor import lowering

    def power(base: int, exponents: Any) -> Any:
        form = {"dtype": exponents.get_dtype(), "device": exponents.get_device()}
        return lowering.fallback_pow_tensor_tensor(lowering.full([], base, **form), exponents)

    with mock.patch.object(lowering, "fallback_pow_scalar", power):
        yield
