"""Checkpoints of a module whose parameters keep their values in other tensors, as torchao's quantised ones do.

A mapping holds such parameters as they are (`module.state_dict()`), or flattened. A safetensors file holds them as
torchao flattens them: `a.weight` as `a._weight_qdata` and `a._weight_scale`, with the rest in the file's header.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from aotc.records import names_of
from aotc.runtime.state.descriptions import check_described
from aotc.tensors.subclasses import inner_name, paths_in

if TYPE_CHECKING:
    from aotc.checkpoints.checkpoint_forms import TensorHeader
    from aotc.records import StateSpec
    from aotc.runtime.checkpoints.checkpoint_files import Checkpoint


def described_in(header: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The descriptions of quantised parameters in a safetensors file's metadata, as torchao writes it."""
    for name, text in header.items():
        try:
            found = msgspec.json.decode(text, type=_Described)
        except (ValueError, RecursionError):
            continue  # of another writer
        yield name, {"class": found.type, "context": found.data, "tensors": sorted(found.names)}


class _Described(msgspec.Struct):
    type: str = msgspec.field(name="_type")
    data: dict[str, Any] = msgspec.field(name="_data")
    names: list[str] = msgspec.field(name="_tensor_data_names")


class Renamed:
    """A checkpoint by the names of `specs`. Raises BindError where its parameters are not as `specs` describe them."""

    def __init__(self, checkpoint: Checkpoint, specs: Sequence[StateSpec]) -> None:
        self.where, self.owned, self.subclasses = checkpoint.where, checkpoint.owned, checkpoint.subclasses
        self._checkpoint = checkpoint
        expected = {
            name.removesuffix(f".{path}"): spec.subclass
            for spec in specs
            if spec.subclass is not None
            for name in names_of(spec)
            for path in paths_in(spec.subclass)
            if name.endswith(f".{path}")
        }
        found = {name: (expected[name], each) for name, each in self.subclasses.items() if name in expected}
        check_described(checkpoint.where, found)
        ours = {
            flattened(parameter, path): inner_name(parameter, path)
            for parameter, subclass in expected.items()
            for path in paths_in(subclass)
        }
        self._name_there = {ours.get(name, name): name for name in checkpoint.forms}
        self.forms: dict[str, TensorHeader] = {
            name: checkpoint.forms[there] for name, there in self._name_there.items()
        }

    def read(self, name: str) -> Tensor:
        return self._checkpoint.read(self._name_there[name])


def flattened(parameter: str, path: str) -> str:
    """The name that torchao gives to a tensor within a parameter: `a._weight_qdata` of `a.weight`."""
    owner, _, key = parameter.rpartition(".")
    return inner_name(owner, f"_{key}_{path.replace('.', '_')}")
