"""The interface of an open compiled library. Imported for types alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Library(Protocol):
    """A compiled library, ready to run.

    counts: how many tensors it takes and gives; None where it does not tell.
    """

    @property
    def counts(self) -> tuple[int, int] | None: ...

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Run on exactly the arguments that the record names, in its order; gives the library's outputs."""
        ...
