"""The tensors of a checkpoint as the state of a library."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aotc.checkpoints.checkpoint_forms import check_forms
from aotc.errors import BindError, CorruptError
from aotc.reads.tensors import dtype_name
from aotc.records import names_of
from aotc.runtime.checkpoints.checkpoint_files import (
    Checkpoint,
    Placing,
    Weights,
    by_inner_names,
    open_weights,
    read_tensors,
)
from aotc.runtime.checkpoints.module_swap import with_tensors
from aotc.runtime.state.call_state import State, StateRows, Swap, is_written, written_state
from aotc.tensors.constants import decode_constants

if TYPE_CHECKING:
    from aotc.reads.outside import ReadFile
    from aotc.records import Artifact, StateSpec
    from aotc.runtime.parallel.ranks import RanksOfLoad
    from aotc.runtime.state.state_source import Bound


def bind_weights(
    artifact: Artifact,
    weights: Weights | Checkpoint | CheckpointState,
    device: torch.device,
    read_file: ReadFile,
    ranks: RanksOfLoad | None = None,
) -> Bound:
    """The tensors of `weights` in the order of `artifact.state`. Raises BindError, with every mismatch at once."""
    if isinstance(weights, CheckpointState):
        return weights.shared()
    checkpoint = open_weights(weights)
    if ranks is not None:
        checkpoint = ranks.part_of(checkpoint, artifact)
    file = artifact.constants
    return bind_checkpoint(
        artifact, checkpoint, lambda: {} if file is None else decode_constants(read_file(file)), device
    )


def bind_checkpoint(
    artifact: Artifact, checkpoint: Checkpoint, constants: Callable[[], Mapping[str, Tensor]], device: torch.device
) -> Bound:
    """The tensors of a checkpoint in the order of `artifact.state`; `constants` gives those that no checkpoint holds.

    Raises BindError, with every mismatch at once.
    """
    if artifact.weights == "frozen":
        raise BindError(
            f"the artifact of `{artifact.model}` holds frozen weights, and takes no others",
            hint="load it without `weights`, or build it with `weights: live`",
        )
    return CheckpointState(artifact, checkpoint, constants, device)


class CheckpointState:
    """Tensors of the callable's own."""

    owned = True

    def __init__(
        self,
        artifact: Artifact,
        checkpoint: Checkpoint,
        constants: Callable[[], Mapping[str, Tensor]],
        device: torch.device,
    ) -> None:
        self._specs, self._device = artifact.state, device
        self._known = {*artifact.unused, *(name for spec in artifact.state for name in names_of(spec))}
        self._written = written_state(artifact)
        expected = [spec for spec in artifact.state if spec.persistent]
        stored, kept = [spec for spec in artifact.state if not spec.persistent], {}
        if stored:
            values = constants()
            with Placing(device) as placing:
                kept = {
                    spec.name: _constant(values[spec.name], spec, placing) for spec in stored if spec.name in values
                }
            expected += [spec for spec in stored if spec.name not in values]  # too large to be kept: let it be given
        checkpoint = by_inner_names(checkpoint, expected)
        check_forms(checkpoint, expected, {*self._known, *kept})
        read = read_tensors(checkpoint, expected, device, lambda spec: spec.name in self._written)
        self._state = State({**kept, **read}[spec.name] for spec in artifact.state)

    def shared(self) -> CheckpointState:
        """The same tensors for one callable more; of those that the model writes to, a copy."""
        other = copy.copy(self)
        with torch.inference_mode(False), torch.no_grad():
            other._state = State(
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device).copy_(each)
                if is_written(spec, self._written)
                else each
                for spec, each in zip(self._specs, self._state, strict=True)
            )
        return other

    def take(self) -> State:
        return self._state

    def seen(self) -> State:
        return self._state

    def rows(self, seen: State) -> StateRows:
        return StateRows(seen, ((vars(self), "_state", seen),))

    def refresh(self) -> None:
        pass

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        checkpoint = by_inner_names(checkpoint, self._specs)
        check_forms(checkpoint, self._specs, self._known, partial=True)
        return read_tensors(checkpoint, self._specs, self._device, lambda spec: True)

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        return with_tensors(self._state, self._specs, tensors)

    def commit(self, swap: Swap) -> bool:
        self._state = swap.state
        return True


def _constant(value: Tensor, spec: StateSpec, placing: Placing) -> Tensor:
    if dtype_name(value.dtype) != spec.dtype or tuple(value.shape) not in ((), spec.shape):
        raise BindError(
            f"the artifact's value of `{spec.name}` is {dtype_name(value.dtype)} {list(value.shape)}, and it was built "
            f"for {spec.dtype} {list(spec.shape)}",
            hint="build the artifact again",
        )
    try:
        return placing.place(value.expand(spec.shape), spec, copy=False)
    except RuntimeError as error:
        raise CorruptError(f"`{spec.name}` cannot be made as the record says: {error}") from error
