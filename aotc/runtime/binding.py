"""Where the tensors of calls come from: the module, a checkpoint, or nowhere, as the artifact and the caller say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from aotc.errors import BindError, CorruptError
from aotc.records import Artifact, StateSpec
from aotc.runtime.frozen import watch_frozen
from aotc.runtime.module_state import ModuleState
from aotc.runtime.state import Bound, State, Swap, TakeState, with_tensors
from aotc.runtime.weights import Checkpoint, Placing, check_forms, names_of, read_tensors
from aotc.snapshot import dtype_name


def bind_state(artifact: Artifact, module: nn.Module | None, device: torch.device) -> Bound:
    """The module's tensors in the order of `artifact.state`, checked.

    Raises BindError, here or at the later call that finds a replaced tensor, with every mismatch at once.
    """
    if artifact.weights == "frozen":
        return Unchanging(artifact, lambda: watch_frozen(artifact, module))
    if module is not None:
        return ModuleState(module, artifact.state, device, _written(artifact))
    if artifact.state:
        raise BindError(
            f"the artifact of `{artifact.model}` uses the module's own weights, and no module was given",
            hint="pass the module: aotc.load(ref, module); or a checkpoint: aotc.load(ref, "
            'weights="model.safetensors"); or build it with `weights: frozen`',
        )
    nothing = State()
    return Unchanging(artifact, lambda: lambda: nothing)


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


class Unchanging:
    """No tensors: the library holds its weights, or has none."""

    owned = False

    def __init__(self, artifact: Artifact, watch: Callable[[], TakeState]) -> None:
        self._watch, self._take = watch, watch()
        self._why = "holds frozen weights" if artifact.weights == "frozen" else "has no weights"
        self._model = artifact.model

    def take(self) -> State:
        return self._take()

    def refresh(self) -> None:
        self._take = self._watch()

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        raise BindError(
            f"the artifact of `{self._model}` {self._why}, and none can be put in their place",
            hint="build it with `weights: live`, or load the artifact that was built for the new weights",
        )

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        return Swap(self.take(), self.take(), tensors)

    def commit(self, swap: Swap) -> bool:
        return True


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
        self._written = _written(artifact)
        expected = [spec for spec in artifact.state if spec.persistent]
        stored, kept = [spec for spec in artifact.state if not spec.persistent], {}
        if stored:
            values = constants()
            with Placing(device) as placing:
                kept = {
                    spec.name: _constant(values[spec.name], spec, placing) for spec in stored if spec.name in values
                }
            expected += [spec for spec in stored if spec.name not in values]  # too large to be kept: let it be given
        check_forms(checkpoint, expected, {*self._known, *kept})
        read = read_tensors(checkpoint, expected, device, lambda spec: spec.name in self._written)
        self._state = State({**kept, **read}[spec.name] for spec in artifact.state)

    def take(self) -> State:
        return self._state

    def refresh(self) -> None:
        pass

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        check_forms(checkpoint, self._specs, self._known, partial=True)
        return read_tensors(checkpoint, self._specs, self._device, lambda spec: True)

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        return with_tensors(self._state, self._specs, tensors)

    def commit(self, swap: Swap) -> bool:
        self._state = swap.state
        return True


def _written(artifact: Artifact) -> frozenset[str]:
    """The names of the tensors that the model writes to."""
    return frozenset(name for variant in artifact.variants for name in variant.mutated_state)


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
