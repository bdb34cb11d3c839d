"""The libraries of a compiled call, to look into or to tamper with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aotc.runtime.training.training_library import TrainingLibrary


def libraries_of(call: Any) -> Iterator[TrainingLibrary]:
    """Those of a callable that `aotc.load` has given, or of one of its regions."""
    for attached in call._attached:
        for cell in attached.launch.__closure__ or ():
            if isinstance(library := getattr(cell.cell_contents, "__self__", None), TrainingLibrary):
                yield library
