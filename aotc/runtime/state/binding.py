"""Where the tensors of calls come from, for an artifact and a module: from the module, or from nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from aotc.errors import BindError
from aotc.runtime.state.call_state import State, StateRows, Swap, TakeState, written_state
from aotc.runtime.state.weights import ModuleState

if TYPE_CHECKING:
    from aotc.records import Artifact
    from aotc.runtime.checkpoints.checkpoint_files import Checkpoint
    from aotc.runtime.state.read_write_lock import ReadWriteLock
    from aotc.runtime.state.state_source import Bound


def bind_state(
    artifact: Artifact, module: nn.Module | None, device: torch.device, gate: ReadWriteLock | None = None
) -> Bound:
    """The module's tensors in the order of `artifact.state`, checked. States that are replaced together share a `gate`.

    Raises BindError, here or at the later call that finds a replaced tensor, with every mismatch at once.
    """
    if artifact.weights == "frozen":
        from aotc.runtime.state.frozen import watch_frozen

        return Unchanging(artifact, lambda: watch_frozen(artifact, module))
    if module is not None:
        written = written_state(artifact)
        if any(spec.subclass is not None for spec in artifact.state):
            from aotc.runtime.state.inner_tensors import SubclassState

            return SubclassState(module, artifact.state, device, written, gate)
        return ModuleState(module, artifact.state, device, written, gate)
    if artifact.state:
        raise BindError(
            f"the artifact of `{artifact.model}` uses the module's own weights, and no module was given",
            hint="pass the module: aotc.load(ref, module); or a checkpoint: aotc.load(ref, "
            'weights="model.safetensors"); or build it with `weights: frozen`',
        )
    nothing = State()
    return Unchanging(artifact, lambda: lambda: nothing)


class Unchanging:
    """No tensors: the library holds its weights, or has none."""

    owned = False

    def __init__(self, artifact: Artifact, watch: Callable[[], TakeState]) -> None:
        self._artifact, self._watch, self._take = artifact, watch, watch()

    def take(self) -> State:
        return self._take()

    def seen(self) -> TakeState:
        return self._take

    def rows(self, seen: TakeState) -> StateRows:
        of_module = getattr(seen, "rows", StateRows(State()))
        return of_module._replace(slots=((vars(self), "_take", seen), *of_module.slots))

    def refresh(self) -> None:
        self._take = self._watch()

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        artifact = self._artifact
        why = "holds frozen weights" if artifact.weights == "frozen" else "has no weights"
        raise BindError(
            f"the artifact of `{artifact.model}` {why}, and none can be put in their place",
            hint="build it with `weights: live`, or load the artifact that was built for the new weights",
        )

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        return Swap(self.take(), self.take(), tensors)

    def commit(self, swap: Swap) -> bool:
        return True
