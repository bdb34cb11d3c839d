"""A checkpoint of the whole model, of which each rank maps its part: of each DTensor, what its placement says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from aotc.checkpoints.checkpoint_forms import TensorHeader
from aotc.records import StateSpec, names_of
from aotc.runtime.checkpoints.checkpoint_files import Checkpoint
from aotc.tensors.subclasses import paths_in

_SHARD = re.compile(r"S(?:hard)?\((?:dim=)?(?P<dim>\d+)\)")
_REPLICATE = re.compile(r"R(?:eplicate\(\))?")


class _Part(NamedTuple):
    """A rank's part of a tensor of the checkpoint: `length` from `start` on, along `dim`; all of it without one."""

    name: str
    dim: int | None = None
    start: int = 0
    length: int = 0


class Sliced:
    """A checkpoint by the names and the forms of one rank. Tensors that are not split stand as they are.

    A part is a view of the mapped file, of which no other page is read.
    """

    def __init__(self, checkpoint: Checkpoint, specs: Sequence[StateSpec], rank: int, size: int) -> None:
        self.where, self.owned, self.subclasses = checkpoint.where, checkpoint.owned, checkpoint.subclasses
        self._checkpoint = checkpoint
        self._parts = {name: part for spec in specs for name, part in _parts(spec, checkpoint.forms, rank, size)}
        split = {part.name for part in self._parts.values()}
        self.forms: dict[str, TensorHeader] = {
            name: form for name, form in checkpoint.forms.items() if name not in split
        }
        for name, part in self._parts.items():
            form = checkpoint.forms[part.name]
            shape = [part.length if axis == part.dim else count for axis, count in enumerate(form.shape)]
            self.forms[name] = TensorHeader(form.dtype, tuple(shape))

    def read(self, name: str) -> Tensor:
        if (part := self._parts.get(name)) is None:
            return self._checkpoint.read(name)
        tensor = self._checkpoint.read(part.name)
        return tensor if part.dim is None else tensor.narrow(part.dim, part.start, part.length)


def _parts(spec: StateSpec, forms: Mapping[str, TensorHeader], rank: int, size: int) -> Iterator[tuple[str, _Part]]:
    """By each name of a tensor within a DTensor: the part of the parameter that the checkpoint holds whole."""
    placement = _placement(spec.subclass)
    if placement is None:
        return
    for name in names_of(spec):
        for path in paths_in(spec.subclass):
            whole = name.removesuffix(f".{path}")
            if whole == name or whole not in forms or list(forms[whole].shape) != spec.subclass.get("shape"):
                continue
            if _REPLICATE.fullmatch(placement):
                yield name, _Part(whole)
            elif (found := _SHARD.fullmatch(placement)) and int(found["dim"]) < len(forms[whole].shape):
                count = forms[whole].shape[int(found["dim"])]
                each = -(-count // size)  # as torch.chunk
                start = min(rank * each, count)
                yield name, _Part(whole, int(found["dim"]), start, min(each, count - start))


def _placement(subclass: Any) -> str | None:
    """How the one mesh dim splits a DTensor; None for what is not a DTensor on one dim."""
    if not isinstance(subclass, dict) or subclass.get("class") != "DTensor":
        return None
    placements = subclass["context"][0] if isinstance(subclass.get("context"), list) else None
    return str(placements[0]) if isinstance(placements, list) and len(placements) == 1 else None
