"""What a call passes to a live library as its weights, and what every source of them can do.

A live library holds no weights: every parameter and buffer is an argument of each call. A call takes all of them at
once, as one `State` that never changes, so nothing can be half old and half new. They come from a module
(`aotc.runtime.module_state`) or from a checkpoint; `aotc.runtime.binding` makes the one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from aotc.records import StateSpec

if TYPE_CHECKING:
    from aotc.runtime.weights import Checkpoint


class State(list[Tensor]):
    """What one call passes to a library: a tensor for each entry of `artifact.state`, never changed once it is made.

    The same object until a tensor is replaced, so what was captured for it is known to be good; later ones have a
    higher `generation`.
    """

    __slots__ = ("__weakref__", "generation")

    def __init__(self, tensors: Iterable[Tensor] = (), generation: int = 0) -> None:
        super().__init__(tensors)
        self.generation = generation


TakeState = Callable[[], State]


class Swap(NamedTuple):
    """New tensors by name, and the state with them in place of those of `base`."""

    base: State
    state: State
    tensors: Mapping[str, Tensor]


class Bound(Protocol):
    """Where the tensors of calls come from; `owned` where nobody but the callable holds them."""

    @property
    def owned(self) -> bool: ...

    def take(self) -> State:
        """The tensors for one call, checked. Raises BindError."""
        ...

    def refresh(self) -> None:
        """Look at the module anew, whose submodules may be others. Raises BindError."""
        ...

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """What a checkpoint puts in the place of which tensors, checked and on the device. Raises BindError."""
        ...

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        """Raises BindError."""
        ...

    def commit(self, swap: Swap) -> bool:
        """Let later calls take `swap.state`; False, and nothing has happened, if `swap.base` is not what they take."""
        ...


def with_tensors(base: State, specs: Sequence[StateSpec], tensors: Mapping[str, Tensor]) -> Swap:
    """`base` with `tensors` in place of those that its specs call so."""
    replaced = [tensors.get(spec.name, old) for spec, old in zip(specs, base, strict=True)]
    return Swap(base, State(replaced, base.generation + 1), tensors)


def names_of(spec: StateSpec) -> tuple[str, ...]:
    """All names of a tensor."""
    return (spec.name, *spec.aliases)
