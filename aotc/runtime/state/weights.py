"""The tensors that a call passes to a live library, which holds none of its own, and their checks.

A call takes all of them at once, as one `State` that never changes, so nothing can be half old and half new. They stay
the module's own: an in-place change is seen at once, and a tensor put in a parameter's place is noticed at the next
call and checked before it is used. (Those of a checkpoint: `aotc.runtime.checkpoints`.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from aotc.reads.tensors import dtype_of, plain_state
from aotc.records import Artifact, StateSpec
from aotc.runtime.state.read_write_lock import ReadWriteLock
from aotc.tensors.layouts import has_memory, with_strides

if TYPE_CHECKING:
    from aotc.runtime.checkpoints.checkpoint_files import Checkpoint

T = TypeVar("T")
StateForm = tuple[Any, ...]

_data_ptr = cast("Callable[[Any], int]", torch.Tensor.data_ptr)

DENSE_COPY = "give a copy of its values: .to_dense(), or .clone()"

ALIGNMENT = 16
"""Bytes: kernels for a GPU are compiled for arguments that lie so, and int8 weights must on a CPU."""


class State(list[Tensor]):
    """The tensors that one call passes to a library, one for each entry of `artifact.state`. Immutable.

    The same object until a tensor is replaced, so what was captured for it is known to be good; later ones have a
    higher `generation`.
    """

    __slots__ = ("__weakref__", "generation")

    def __init__(self, tensors: Iterable[Tensor] = (), generation: int = 0) -> None:
        super().__init__(tensors)
        self.generation = generation


TakeState = Callable[[], State]


class Swap(NamedTuple):
    """New tensors by name, and the state with them in place of those of `base`; of each region, where there are any."""

    base: State
    state: State
    tensors: Mapping[str, Tensor]
    parts: tuple[Swap, ...] = ()


class StateRows(NamedTuple):
    """The tensors of a call, and rows of `aotc.reads.facts.Facts` by which it is told that they are still these.

    `placed`: a tensor, its address, and a tensor of the form that it must have.
    """

    state: State
    slots: Sequence[tuple[dict[str, Any], str, Any]] = ()
    written: Sequence[tuple[Tensor, int, int]] = ()
    placed: Sequence[tuple[Tensor, int, Tensor]] = ()


class Bound(Protocol):
    """Where the tensors of calls come from; `owned` where only the callable holds them."""

    @property
    def owned(self) -> bool: ...

    def take(self) -> State:
        """The tensors for one call, checked. Raises BindError."""
        ...

    def seen(self) -> Any:
        """What `take` compared last: one object, which is replaced and never changed."""
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


def names_of(spec: StateSpec) -> tuple[str, ...]:
    """All names of a tensor."""
    return (spec.name, *spec.aliases)


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
        from aotc.runtime.explain.weights import no_weights_error

        raise no_weights_error(artifact)
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
        from aotc.runtime.explain.weights import unchanging_error

        raise unchanging_error(self._artifact)

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        return Swap(self.take(), self.take(), tensors)

    def commit(self, swap: Swap) -> bool:
        return True


def written_state(artifact: Artifact) -> frozenset[str]:
    """The names of the tensors that the model writes to."""
    return frozenset(name for variant in artifact.variants for name in variant.mutated_state)


class _Seen(NamedTuple):
    """The tensors that passed the check last.

    `aliases` share their storage and so keep it: no other tensor can come to lie at one of `pointers` unnoticed.
    """

    tensors: list[Tensor]
    classes: list[type]
    pointers: list[int]
    forms: list[StateForm]
    aliases: list[Tensor]
    state: State


class ModuleState:
    """The tensors of a module, wherever they are replaced: by its owner, or by an update of all names at once."""

    owned = False

    def __init__(
        self,
        module: nn.Module,
        specs: Sequence[StateSpec],
        device: torch.device,
        written: frozenset[str] = frozenset(),
        gate: ReadWriteLock | None = None,
    ) -> None:
        """`written` names the tensors that the model writes to."""
        self._module, self._specs, self._device, self._written = module, specs, device, written
        self._gate = gate or ReadWriteLock()
        self._generation = 0
        self._look()
        self._seen = self._check()

    def _look(self) -> None:
        names = [spec.name for spec in self._specs] + [alias for spec in self._specs for alias in spec.aliases]
        self._slots = self._slots_of(names)
        self._owners, self._keys = [owner for owner, _ in self._slots], [key for _, key in self._slots]

    def _slots_of(self, names: Iterable[str]) -> list[tuple[dict[str, Any], str]]:
        return slots_of(self._module, names)

    def refresh(self) -> None:
        with self._gate.replacing:
            self._look()
            if not self._is_current(self._seen):
                self._seen = self._check()

    def take(self) -> State:
        last = self._seen  # replaced as a whole: any thread may call, and each gives only a state that it found checked
        if self._is_current(last):
            return last.state
        with self._gate.replacing:
            if not self._is_current(self._seen):
                self._seen = self._check()
            return self._seen.state

    def run_eagerly(self, function: Callable[[], T]) -> T:
        """Call what runs the module: no update replaces its tensors meanwhile."""
        return self._gate.run_inside(function)

    def _is_current(self, seen: _Seen) -> bool:
        current: list[Any] = list(map(dict.get, self._owners, self._keys))
        return (
            all(map(operator.is_, current, seen.tensors))
            and list(map(type, current)) == seen.classes
            and list(map(_data_ptr, current)) == seen.pointers
            and list(map(form_of, current)) == seen.forms
        )

    def seen(self) -> _Seen:
        return self._seen

    def rows(self, seen: _Seen) -> StateRows:
        slots = [(owner, key, tensor) for (owner, key), tensor in zip(self._slots, seen.tensors, strict=True)]
        placed = zip(seen.tensors, seen.pointers, seen.aliases, strict=True)
        return StateRows(seen.state, ((vars(self), "_seen", seen), *slots), placed=tuple(placed))

    def _check(self) -> _Seen:
        current = [owner.get(key) for owner, key in self._slots]
        count = len(self._specs)
        check_state(self._specs, current[:count], self._device, current[count:], self._written)
        tensors = cast("list[Tensor]", current)
        state = (with_strides(tensor, spec.stride) for spec, tensor in zip(self._specs, tensors, strict=False))
        return saw(tensors, State(state, self._next()))

    def _next(self) -> int:
        self._generation += 1
        return self._generation

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """For any tensor of the module, also one that no variant takes: module and compiled code go on agreeing."""
        from aotc.runtime.checkpoints.module_swap import read_replacements

        return read_replacements(self._module, self._specs, self._device, checkpoint)

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        from aotc.runtime.checkpoints.module_swap import in_every_place, swapped

        with self._gate.replacing:
            return swapped(self, in_every_place(plain_state(self._module), tensors))

    def commit(self, swap: Swap) -> bool:
        from aotc.runtime.checkpoints.module_swap import commit

        return commit(self._gate, [(self, swap)])


def saw(tensors: list[Tensor], state: State) -> _Seen:
    pointers, aliases = list(map(_data_ptr, tensors)), [tensor.detach() for tensor in tensors]
    return _Seen(tensors, list(map(type, tensors)), pointers, list(map(form_of, tensors)), aliases, state)


def slots_of(module: nn.Module, names: Iterable[str]) -> list[tuple[dict[str, Any], str]]:
    """Where the module keeps parameters and buffers: for each the dict and the key in it, or an empty dict."""
    modules = _modules_of(module)
    slots: list[tuple[dict[str, Any], str]] = []
    for name in names:
        path, _, key = name.rpartition(".")
        held: Any = {}
        if (owner := modules.get(path)) is not None:
            held = owner._parameters if key in owner._parameters else owner._buffers
        slots.append((held, key))
    return slots


def _modules_of(module: nn.Module) -> dict[str, nn.Module]:
    """By their paths, in one walk: asking a module for each of its paths takes ten times as long."""
    return dict(module.named_modules(remove_duplicate=False))


def check_state(
    specs: Sequence[StateSpec],
    tensors: Sequence[Tensor | None],
    device: torch.device,
    aliases: Sequence[Tensor | None],
    written: frozenset[str],
) -> None:
    """Compare each tensor with its spec, and the specs' aliases, in order; raises BindError with every mismatch."""
    tied = (tensor for spec, tensor in zip(specs, tensors, strict=True) for _ in spec.aliases)
    if not (
        all(map(_fits, specs, tensors, (device,) * len(specs), (is_written(spec, written) for spec in specs)))
        and all(map(operator.is_, aliases, tied))
        and not (written and _share_memory(specs, cast("Sequence[Tensor]", tensors), written))
    ):
        from aotc.runtime.explain.weights import state_error

        raise state_error(specs, tensors, device, aliases, written)


def _fits(spec: StateSpec, tensor: Tensor | None, device: torch.device, writes: bool) -> bool:
    return (
        tensor is not None
        and not is_special(tensor)
        and tensor.device == device
        and not lacks_values(tensor)
        and tensor.dtype is dtype_of(spec.dtype)
        and tensor.shape == spec.shape
        and used_strides(spec.shape, spec.stride) == used_strides(tensor.shape, tensor.stride())
        and not (tensor.is_conj() or tensor.is_neg())
        and not is_unaligned(tensor, device, writes)
    )


def is_special(tensor: Tensor) -> bool:
    """Whether it is of a subclass that does something else with its values, which is not in the compiled code."""
    return any("__torch_dispatch__" in vars(cls) for cls in type(tensor).__mro__[:-1] if cls is not Tensor)


def is_unaligned(tensor: Tensor, device: torch.device, writes: bool) -> bool:
    """Whether a library for GPUs would write to an aligned copy; or torch's product with int8 weights on a CPU, which
    reads 16 bytes at a time, would end the process."""
    needed = ALIGNMENT if (writes if device.type == "cuda" else tensor.dtype is torch.int8) else 1
    return needed > 1 and bool(tensor.data_ptr() % needed)


def is_written(spec: StateSpec, written: frozenset[str]) -> bool:
    return not written.isdisjoint(names_of(spec))


def _share_memory(specs: Sequence[StateSpec], tensors: Sequence[Tensor], written: frozenset[str]) -> bool:
    from aotc.tensors.overlaps import overlapping

    return any(overlapping(tensors, {index for index, spec in enumerate(specs) if is_written(spec, written)}))


def form_of(tensor: Tensor) -> StateForm:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg(), tensor.is_conj()


def lacks_values(tensor: Tensor) -> str:
    """Why no compiled code could read a tensor's values from its address: what it is; "" where it could.

    Code that is given such a tensor reads at address 0, which ends the process.
    """
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor.is_meta:
        return "one on the meta device"
    return "one without memory" if tensor.numel() and not has_memory(tensor) else ""


def used_strides(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Strides with those of axes of size 1 set to 0, which do not say where elements lie: `aotc.tensors.layouts`."""
    return [step if size != 1 else 0 for size, step in zip(shape, stride, strict=True)]
