"""Where the tensors of calls come from: the module, or nowhere. (A checkpoint: `aotc.runtime.checkpoint_state`.)"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from aotc.errors import BindError
from aotc.records import Artifact
from aotc.runtime.module_state import ModuleState
from aotc.runtime.state import Bound, State, Swap, TakeState

if TYPE_CHECKING:
    from aotc.runtime.weights import Checkpoint


def bind_state(artifact: Artifact, module: nn.Module | None, device: torch.device) -> Bound:
    """The module's tensors in the order of `artifact.state`, checked.

    Raises BindError, here or at the later call that finds a replaced tensor, with every mismatch at once.
    """
    if artifact.weights == "frozen":
        from aotc.runtime.frozen import watch_frozen

        return Unchanging(artifact, lambda: watch_frozen(artifact, module))
    if module is not None:
        return ModuleState(module, artifact.state, device, written_state(artifact))
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


def written_state(artifact: Artifact) -> frozenset[str]:
    """The names of the tensors that the model writes to."""
    return frozenset(name for variant in artifact.variants for name in variant.mutated_state)
