"""The tensors of a model, from safetensors files or arrays, as its compiled code takes them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from aotc.checkpoints.checkpoint_forms import TensorHeader, check_forms
from aotc.checkpoints.mapped_file import TensorEntry, tensors_in
from aotc.checkpoints.safetensors_files import CONVERTED, SafetensorsFiles
from aotc.errors import BindError, CorruptError, Issue
from aotc.records import Artifact, File, StateSpec, names_of
from aotc.standalone.array_views import NoTensor, tensor_of
from aotc.standalone.cpu_environment import open_cpu
from aotc.tensors.strides import strides_in

StandaloneWeights = str | os.PathLike[str] | Mapping[str, Any]
"""A safetensors file, a shard index (`*.safetensors.index.json`), a folder that holds either, or names and arrays."""


class _Source(Protocol):
    where: str

    @property
    def forms(self) -> Mapping[str, TensorHeader]: ...

    def read(self, name: str) -> Any: ...


class _Files(SafetensorsFiles):
    """Of mapped files: tensors are views of them, private to this process."""

    def read(self, name: str) -> Any:
        file = self.file_of[name]
        try:
            return _placed(file.memory, file.begin, file.tensors[name], name)
        except ValueError as error:
            raise BindError(f"{self.where} cannot be read as safetensors: {error}", hint=CONVERTED) from error


class _Arrays:
    """The caller's own arrays, used where they lie, which the caller must not change meanwhile."""

    where = "the mapping"

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._tensors: dict[str, Any] = {}
        issues = []
        for name, value in arrays.items():
            try:
                self._tensors[name] = tensor_of(value, str(name), lambda value: f"a {type(value).__name__}")
            except NoTensor as error:
                issues.append(error.issue)
        if issues:
            raise BindError("the mapping's values are not all arrays in the CPU's memory", issues=tuple(issues))
        self.forms = {name: TensorHeader(each.dtype, each.shape) for name, each in self._tensors.items()}

    def read(self, name: str) -> Any:
        return self._tensors[name]


def _placed(memory: Any, begin: int, entry: TensorEntry, name: str) -> Any:
    """A tensor of a safetensors file. Raises ValueError."""
    first, end = entry.data_offsets
    core = open_cpu()
    strides = strides_in("contiguous", entry.shape)
    tensor = core.placed(memory, begin + first, entry.dtype, entry.shape, strides)
    if (expected := math.prod(entry.shape) * tensor.itemsize) != end - first:
        raise ValueError(f"`{name}` has {end - first} bytes; {entry.dtype} {list(entry.shape)} has {expected}")
    return tensor


def _open(weights: StandaloneWeights) -> _Source:
    if isinstance(weights, Mapping):
        return _Arrays(weights)
    if isinstance(weights, str | os.PathLike):
        return _Files(Path(weights))
    raise BindError(
        f"weights is {type(weights).__name__}",
        hint="give a safetensors file, a shard index, a folder that holds either, or a mapping of names to arrays",
    )


def written_names(artifact: Artifact) -> frozenset[str]:
    """The names of the module's tensors that the model writes to."""
    return frozenset(name for variant in artifact.variants for name in variant.mutated_state)


def state_tensors(artifact: Artifact, weights: StandaloneWeights | None, read: Callable[[File], bytes]) -> list[Any]:
    """The tensors in the order of `artifact.state`; `read` gives the bytes of a file of the artifact.

    Raises BindError, with every mismatch at once, and CorruptError.
    """
    if artifact.weights == "frozen":
        if weights is not None:
            raise BindError(
                f"the artifact of `{artifact.model}` holds frozen weights, and takes no others",
                hint="load it without `weights`, or build it with `weights: live`",
            )
        return []
    kept = dict(_constants(artifact, read))
    expected = [spec for spec in artifact.state if spec.persistent or spec.name not in kept]
    if weights is None and expected:
        raise BindError(
            f"`{artifact.model}` takes {len(expected)} tensors, and no weights were given",
            hint="give them: aotc.standalone.load(REF, weights=…), a safetensors file, its folder or a mapping",
        )
    source = _open(weights or {})
    known = {*artifact.unused, *(name for spec in artifact.state for name in names_of(spec))}
    check_forms(source, expected, known)
    found = {spec.name: _read(source, spec) for spec in expected}
    written = written_names(artifact) if isinstance(weights, Mapping) else frozenset()
    return [
        _laid_out({**kept, **found}[spec.name], spec, own=not written.isdisjoint(names_of(spec)))
        for spec in artifact.state
    ]


def with_weights(artifact: Artifact, state: Sequence[Any], weights: StandaloneWeights) -> list[Any]:
    """The tensors of `state`, and others in the place of those that `weights` names. Those of a mapping are copied.

    Raises BindError, with every mismatch at once.
    """
    if not state:
        why = "holds frozen weights" if artifact.weights == "frozen" else "has no weights"
        raise BindError(
            f"the artifact of `{artifact.model}` {why}, and none can be put in their place",
            hint="build it with `weights: live`, or load the artifact that was built for the new weights",
        )
    source = _open(weights)
    known = {*artifact.unused, *(name for spec in artifact.state for name in names_of(spec))}
    check_forms(source, artifact.state, known, partial=True)
    return [
        tensor
        if source.forms.keys().isdisjoint(names_of(spec))
        else _laid_out(_read(source, spec), spec, own=isinstance(weights, Mapping))
        for spec, tensor in zip(artifact.state, state, strict=True)
    ]


def _read(source: _Source, spec: StateSpec) -> Any:
    there = [name for name in names_of(spec) if name in source.forms]
    tensor = source.read(there[0])
    loose = tuple(
        Issue(f"is one tensor with `{there[0]}` in the artifact, and has other values here", where=name)
        for name in there[1:]
        if _bits(tensor) != _bits(source.read(name))
    )
    if loose:
        hint = "give one name of each alone, or save the checkpoint from a module that ties them"
        raise BindError(f"tied weights are not equal in {source.where}", hint=hint, issues=loose)
    return tensor


def _bits(tensor: Any) -> tuple[str, Sequence[int], memoryview]:
    core = open_cpu()
    dense = core.copied(tensor, tensor.shape, strides_in("contiguous", tensor.shape))
    values = core.strided(dense, (math.prod(tensor.shape) * tensor.itemsize,), (1,), 0, "uint8")
    return tensor.dtype, tensor.shape, memoryview(values)


def _constants(artifact: Artifact, read: Callable[[File], bytes]) -> Iterator[tuple[str, Any]]:
    """The values of buffers that no checkpoint holds; one of shape [] is the value of all elements."""
    specs = {spec.name: spec for spec in artifact.state if not spec.persistent}
    if not specs or artifact.constants is None:
        return
    data = read(artifact.constants)
    begin = 8 + int.from_bytes(data[:8], "little")
    try:
        entries = tensors_in(data[8:begin], len(data) - begin)[1]
        for name, entry in entries.items():
            if name in specs:
                tensor = _placed(data, begin, entry, name)
                shape = specs[name].shape
                yield name, open_cpu().copied(tensor, shape, strides_in("contiguous", shape))
    except ValueError as error:
        raise CorruptError(
            f"the artifact's file of constants cannot be read: {error}", hint="build it again"
        ) from error


_ALIGNMENT = 16
"""Bytes: int8 weights must lie so."""


def _laid_out(tensor: Any, spec: StateSpec, *, own: bool) -> Any:
    """The tensor with the strides that were compiled: itself, or a copy, as where the caller's must not be changed."""
    if any(step == 0 and size > 1 for size, step in zip(spec.shape, spec.stride, strict=True)):
        raise BindError(
            f"`{spec.name}` was compiled with strides {list(spec.stride)}, of elements that share their place",
            hint="build the model with a contiguous one, or load it with aotc.load, where torch is installed",
        )
    strict = _ALIGNMENT if spec.dtype == "int8" else tensor.itemsize
    axes = zip(spec.shape, tensor.strides, spec.stride, strict=True)
    if own or tensor.address % strict or any(size > 1 and here != built for size, here, built in axes):
        return open_cpu().copied(tensor, spec.shape, spec.stride)
    return open_cpu().strided(tensor, spec.shape, spec.stride)
