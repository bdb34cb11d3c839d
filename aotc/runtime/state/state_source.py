"""The interface of the source of a call's tensors. Imported for types alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from aotc.runtime.checkpoints.checkpoint_files import Checkpoint
from aotc.runtime.state.call_state import State, StateRows, Swap


class Bound(Protocol):
    """Where the tensors of calls come from; `owned` where only the callable holds them."""

    @property
    def owned(self) -> bool: ...

    def take(self) -> State:
        """The tensors for one call, checked. Raises BindError."""
        ...

    def seen(self) -> Any:
        """The state that `take` compared last: one object, which is replaced and never changed."""
        ...

    def rows(self, seen: Any) -> StateRows: ...

    def refresh(self) -> None:
        """Read the module's tensors again, as submodules may have been replaced. Raises BindError."""
        ...

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """The replacements of a checkpoint by tensor, checked and on the device. Raises BindError."""
        ...

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        """Raises BindError."""
        ...

    def commit(self, swap: Swap) -> bool:
        """Make `swap.state` the state of later calls. False, without effect, if the state is not `swap.base`."""
        ...
