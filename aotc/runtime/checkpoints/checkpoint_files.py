"""Weights by name, from a checkpoint instead of a module: safetensors files, or a mapping of tensors.

The forms (dtype and shape) of all tensors are known and compared before one of them is read, so everything that is
wrong with a checkpoint is said at once, and nothing is half done. On a CPU, tensors of a file are views of the mapped
file, which is private to the process: what is written to them stays in it. To a GPU they are copied straight from the
mapping, by several threads (`staged`), so the host never holds a whole copy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from aotc.checkpoints.checkpoint_forms import TensorHeader
from aotc.checkpoints.mapped_file import MappedFile
from aotc.checkpoints.safetensors_files import CONVERTED, SafetensorsFiles
from aotc.errors import BindError, Issue
from aotc.reads.tensors import NO_SUBCLASSES, dtype_name, same_bits
from aotc.records import names_of
from aotc.runtime.state.call_state import ALIGNMENT, DENSE_COPY, lacks_values, used_strides
from aotc.tensors.layouts import with_strides
from aotc.tensors.strides import overlaps_itself

if TYPE_CHECKING:
    from aotc.records import StateSpec

Weights = str | os.PathLike[str] | Mapping[str, Tensor]
"""A safetensors file, a shard index (`*.safetensors.index.json`), a folder that holds either, or names and tensors."""

COPIERS = 4
"""Threads that copy to a GPU; one alone spends its time on the page faults of the mapping."""

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class Checkpoint(Protocol):
    """Tensors by name."""

    where: str
    """The checkpoint, for messages."""

    @property
    def subclasses(self) -> Mapping[str, Any]:
        """By the names of parameters of a subclass of Tensor, which `forms` has not: what it is known of the subclass,
        as `aotc.tensors.subclasses` describes it."""
        ...

    @property
    def forms(self) -> Mapping[str, TensorHeader]: ...

    def read(self, name: str) -> Tensor:
        """The tensor, from any file and in any layout."""
        ...

    owned: bool
    """Whether the tensors of `read` are reachable from nowhere else."""


def open_weights(weights: Weights | Checkpoint) -> Checkpoint:
    """Raises BindError where there is no checkpoint, or it cannot be read. One that is open stays as it is."""
    if isinstance(weights, MappingCheckpoint | FileCheckpoint):
        return weights
    if isinstance(weights, Mapping):
        if any(hasattr(tensor, "__tensor_flatten__") for tensor in weights.values()):
            from aotc.tensors.subclasses import unwrapped, wrappers

            return MappingCheckpoint(unwrapped(weights), wrappers(weights))
        return MappingCheckpoint(weights)
    if not isinstance(weights, str | os.PathLike):
        raise BindError(
            f"weights is {type(weights).__name__}",
            hint="give a safetensors file, a shard index, a folder that holds either, or a mapping of names to tensors",
        )
    return FileCheckpoint(Path(weights))


def by_inner_names(checkpoint: Checkpoint, specs: Sequence[StateSpec]) -> Checkpoint:
    """The checkpoint by the names that `specs` give to the tensors within parameters of a subclass, as quantised ones
    are. Raises BindError where the subclass or its context (a block size) is not that of the specs."""
    if all(spec.subclass is None for spec in specs):
        return checkpoint
    from aotc.runtime.checkpoints.checkpoint_subclasses import Renamed

    return Renamed(checkpoint, specs)


class MappingCheckpoint:
    """The caller's own tensors. Raises BindError for values that are not plain tensors."""

    where = "the mapping"
    owned = False

    def __init__(self, tensors: Mapping[str, Tensor], subclasses: Mapping[str, Any] = NO_SUBCLASSES) -> None:
        self.subclasses = subclasses
        odd = [issue for name, tensor in tensors.items() for issue in _odd(name, tensor)]
        if odd:
            raise BindError("the mapping's values are not all plain tensors", issues=tuple(odd))
        self.tensors = dict(tensors)
        self.forms = {name: TensorHeader(dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name].detach().resolve_conj().resolve_neg()


def _odd(name: object, tensor: object) -> Iterator[Issue]:
    if not isinstance(name, str):
        yield Issue(f"a name is expected, {name!r:.100} came")
    elif not isinstance(tensor, Tensor) or type(tensor) not in _PLAIN:
        yield Issue(f"a tensor is expected, {type(tensor).__name__} came", where=name)
    elif lack := lacks_values(tensor):
        yield Issue(f"a dense tensor with values in memory is expected, {lack} came", where=name, hint=DENSE_COPY)


class FileCheckpoint(SafetensorsFiles):
    """Tensors of safetensors files."""

    owned = True

    @property
    def subclasses(self) -> Mapping[str, Any]:
        from aotc.runtime.checkpoints.checkpoint_subclasses import described_in

        return {name: each for part in self.opened for name, each in described_in(part.metadata)}

    def read(self, name: str) -> Tensor:
        with torch.inference_mode(False):  # calls outside of it may write to them, and a module holds them
            try:
                return _tensor(self.file_of[name], name)
            except ValueError as error:
                raise BindError(f"{self.where} cannot be read as safetensors: {error}", hint=CONVERTED) from error


def _tensor(file: MappedFile, name: str) -> Tensor:
    """A view of the mapped file. Raises ValueError where this torch has no such dtype."""
    entry = file.tensors[name]
    if not isinstance(dtype := getattr(torch, entry.dtype, None), torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {entry.dtype}")
    begin, end = entry.data_offsets
    if (expected := math.prod(entry.shape) * dtype.itemsize) != end - begin:
        raise ValueError(f"`{name}` has {end - begin} bytes; {entry.dtype} {list(entry.shape)} has {expected}")
    if begin == end:
        return torch.empty(entry.shape, dtype=dtype)
    data = torch.frombuffer(file.memory, dtype=torch.uint8, count=end - begin, offset=file.begin + begin)
    if data.data_ptr() % dtype.itemsize:  # written by a tool that does not align
        data = data.clone()
    return data.view(dtype).view(entry.shape)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_tensors(
    checkpoint: Checkpoint, specs: Iterable[StateSpec], device: torch.device, own: Callable[[StateSpec], bool]
) -> dict[str, Tensor]:
    """The tensors of those `specs` that the checkpoint holds, by the specs' own names, in the layout that was compiled.

    Where `own(spec)`, the caller's memory is copied, else it is used where it can be. Raises BindError where names of
    one tensor hold different values, or a tensor cannot be laid out.
    """
    found: dict[str, tuple[StateSpec, Tensor]] = {}
    loose = []
    for spec in specs:
        there = [name for name in names_of(spec) if name in checkpoint.forms]
        if there:
            tensor = checkpoint.read(there[0])
            loose += [
                Issue(f"is one tensor with `{there[0]}` in the artifact, and has other values here", where=name)
                for name in there[1:]
                if not same_bits(tensor, checkpoint.read(name))
            ]
            found[spec.name] = spec, tensor
    if loose:
        hint = "give one name of each alone, or save the checkpoint from a module that ties them"
        raise BindError(f"tied weights are not equal in {checkpoint.where}", hint=hint, issues=tuple(loose))
    with Placing(device) as placing:
        return {
            name: placing.place(tensor, spec, copy=not checkpoint.owned and own(spec))
            for name, (spec, tensor) in found.items()
        }


class Placing:
    """Puts tensors where and how they were compiled for. What it gave is filled when the context ends.

    They are plain tensors also under `torch.inference_mode()`, so that calls outside of it may write to them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Placing:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            _copy_all(self._copies, self._device)

    def place(self, tensor: Tensor, spec: StateSpec, *, copy: bool) -> Tensor:
        """The tensor itself where it is right already and no `copy` is asked for. Raises BindError."""
        strict = self._device.type == "cuda" or tensor.dtype is torch.int8
        alignment = ALIGNMENT if strict else tensor.element_size()
        wanted = used_strides(spec.shape, spec.stride)
        fits = used_strides(tensor.shape, tensor.stride()) == wanted and tensor.data_ptr() % alignment == 0
        if fits and not copy and tensor.device == self._device:
            return with_strides(tensor, spec.stride)
        # An axis of stride 0 repeats one slice.
        repeated = [axis for axis, step in enumerate(wanted) if step == 0 and spec.shape[axis] > 1]
        once = tensor
        for axis in repeated:
            once = once.narrow(axis, 0, 1)
        if overlaps_itself(once.shape, spec.stride) or (repeated and not same_bits(once.expand(spec.shape), tensor)):
            raise BindError(
                f"`{spec.name}` was compiled with strides {list(spec.stride)}; the checkpoint's values cannot lie so",
                hint="load with the module",
            )
        try:
            with torch.inference_mode(False):
                placed = torch.empty_strided(once.shape, spec.stride, dtype=tensor.dtype, device=self._device)
        except RuntimeError as error:
            if self._device.type == "cuda":
                raise  # torch's own OutOfMemoryError, which a service may wait for
            raise BindError(
                f"`{spec.name}` was compiled with strides {list(spec.stride)}, for which there is no memory: {error}",
                hint="free memory, or load with the module",
            ) from error
        self._copies.append((placed, once))
        return placed.expand(spec.shape)


def _copy_all(copies: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    if device.type != "cuda":
        with torch.inference_mode(False), torch.no_grad():
            for placed, tensor in copies:
                placed.copy_(tensor)
        return
    from aotc.runtime.checkpoints.staged import copy_to_gpu

    if copies := copy_to_gpu(copies, device):
        copy_plainly(copies, device)


def copy_plainly(copies: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """To a GPU by `copy_`, in some threads."""
    here = torch.cuda.current_stream(device)
    largest_first = sorted(copies, key=lambda copy: -copy[1].nbytes)
    with ThreadPoolExecutor(COPIERS) as pool:
        parts = [largest_first[first::COPIERS] for first in range(COPIERS)]
        list(pool.map(lambda part: _copy_part(part, device, here), parts))


def _copy_part(copies: Sequence[tuple[Tensor, Tensor]], device: torch.device, here: torch.cuda.Stream) -> None:
    """On a stream of its own, after what the caller's stream did before: it may have used that memory."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(here)
    with torch.cuda.stream(stream), torch.no_grad():
        for placed, tensor in copies:
            placed.copy_(tensor)
    stream.synchronize()
