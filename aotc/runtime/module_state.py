"""The tensors of a module as the state of a library.

They stay the module's own: an in-place change is seen at once, and a tensor put in a parameter's place is noticed at
the next call and checked before it is used.
"""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from aotc.errors import BindError, Issue
from aotc.records import StateSpec
from aotc.runtime.after_fork import renew_in_child
from aotc.runtime.state import State, Swap, names_of, with_tensors
from aotc.runtime.tensor_forms import DENSE_COPY, GPU_ALIGNMENT, forms_check, lacks_values, used_strides
from aotc.snapshot import dtype_name, named_state
from aotc.tensors.layouts import with_strides
from aotc.tensors.overlaps import overlapping

if TYPE_CHECKING:
    from aotc.runtime.weights import Checkpoint

T = TypeVar("T")

_data_ptr = cast("Callable[[Any], int]", torch.Tensor.data_ptr)


class _Seen(NamedTuple):
    """The tensors that passed the check last.

    `aliases` share their storage and so keep it: no other tensor can come to lie at one of `pointers` unnoticed.
    """

    tensors: list[Tensor]
    pointers: list[int]
    have_same_forms: Callable[[list[Any]], bool]
    aliases: list[Tensor]
    state: State


class ModuleState:
    """The tensors of a module, wherever they are replaced: by its owner, or by an update of all names at once."""

    owned = False

    def __init__(
        self, module: nn.Module, specs: Sequence[StateSpec], device: torch.device, written: frozenset[str] = frozenset()
    ) -> None:
        """`written` names the tensors that the model writes to."""
        self._module, self._specs, self._device, self._written = module, specs, device, written
        self._replacing = threading.RLock()
        self._eager = Gate()
        self._generation = 0
        self._look()
        self._seen = self._check()
        renew_in_child(self, ModuleState._renew)

    def _look(self) -> None:
        names = [spec.name for spec in self._specs] + [alias for spec in self._specs for alias in spec.aliases]
        self._check_tree = watch_tree(self._module, names)
        self._slots = slots_of(self._module, names)
        self._owners, self._keys = [owner for owner, _ in self._slots], [key for _, key in self._slots]

    def refresh(self) -> None:
        with self._replacing:
            self._look()
            if not self._is_current(self._seen):
                self._seen = self._check()

    def _renew(self) -> None:
        self._replacing = threading.RLock()

    def take(self) -> State:
        self._check_tree()
        last = self._seen  # replaced as a whole: any thread may call, and each gives only a state that it found checked
        if self._is_current(last):
            return last.state
        with self._replacing:
            if not self._is_current(self._seen):
                self._seen = self._check()
            return self._seen.state

    def run_eagerly(self, function: Callable[[], T]) -> T:
        """Call what runs the module: no update replaces its tensors meanwhile."""
        return self._eager.run_inside(function)

    def _is_current(self, seen: _Seen) -> bool:
        current: list[Any] = list(map(dict.get, self._owners, self._keys))
        return (
            all(map(operator.is_, current, seen.tensors))
            and list(map(_data_ptr, current)) == seen.pointers
            and seen.have_same_forms(current)
        )

    def _check(self) -> _Seen:
        current = [owner.get(key) for owner, key in self._slots]
        count = len(self._specs)
        check_state(self._specs, current[:count], self._device, current[count:], self._written)
        tensors = cast("list[Tensor]", current)
        state = (with_strides(tensor, spec.stride) for spec, tensor in zip(self._specs, tensors, strict=False))
        return _saw(tensors, State(state, self._next()))

    def _next(self) -> int:
        self._generation += 1
        return self._generation

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """For any tensor of the module, also one that no variant takes: module and compiled code go on agreeing."""
        from aotc.runtime.module_swap import read_replacements

        return read_replacements(self._module, self._specs, self._device, checkpoint)

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        from aotc.runtime.module_swap import in_every_place

        with self._replacing:
            made = with_tensors(self.take(), self._specs, in_every_place(named_state(self._module), tensors))
            made.state.generation = self._next()
            return made

    def commit(self, swap: Swap) -> bool:
        return self._eager.run_alone(lambda: self._replace(swap))

    def _replace(self, swap: Swap) -> bool:
        with self._replacing:
            if self.take() is not swap.base:
                return False
            slots = slots_of(self._module, swap.tensors)
            new = {(id(owner), key): tensor for (owner, key), tensor in zip(slots, swap.tensors.values(), strict=True)}
            tensors = [cast(Tensor, new.get((id(owner), key), owner.get(key))) for owner, key in self._slots]
            owners, keys = [owner for owner, _ in slots], [key for _, key in slots]
            seen = _saw(tensors, swap.state)
            # In one call of C: neither a signal's handler nor another thread runs between two of the tensors.
            set_all([*owners, vars(self)], [*keys, "_seen"], [*swap.tensors.values(), seen])
            return True


def set_all(owners: Sequence[dict[str, Any]], keys: Iterable[str], values: Sequence[Any]) -> None:
    """Set `owner[key] = value` for all of them, without a bytecode of Python's between two: all or none, for signals,
    threads and forks alike."""
    deque(map(operator.setitem, owners, keys, values), maxlen=0)


def _saw(tensors: list[Tensor], state: State) -> _Seen:
    pointers, aliases = list(map(_data_ptr, tensors)), [tensor.detach() for tensor in tensors]
    return _Seen(tensors, pointers, forms_check(tensors), aliases, state)


class Gate:
    """Many may be inside at a time, or one alone; one that waits to be alone lets nobody else in.

    A thread that is alone may enter: what its signals' handlers do, it does itself. So may one that is inside.

    A handler may raise wherever Python looks for signals: after any call, and on entering a function of Python's. So
    nothing is done between taking and giving back but in one call of C each, the latter the first of a `finally`; and
    who waits looks from time to time, since to be woken up may be lost.
    """

    LOOKS_EVERY = 0.001

    def __init__(self) -> None:
        self._entry = threading.RLock()
        self._inside: dict[object, int] = {}
        renew_in_child(self, Gate._renew)

    def _renew(self) -> None:
        self._entry = threading.RLock()
        own = threading.get_ident()
        for token in [token for token, thread in self._inside.items() if thread != own]:
            del self._inside[token]  # in place: a call of this thread that is inside takes itself out of it

    def run_inside(self, function: Callable[[], T]) -> T:
        thread, token, inside = threading.get_ident(), object(), self._inside
        try:
            if thread in inside.values():  # one that waits to be alone waits for this thread
                inside[token] = thread
            else:
                with self._entry:
                    inside[token] = thread
            return function()
        finally:
            inside.pop(token, None)

    def run_alone(self, function: Callable[[], T]) -> T:
        """Raises BindError in a thread that is inside: it would wait for itself."""
        if threading.get_ident() in self._inside.values():
            raise BindError(
                "the weights cannot be replaced within a call that runs the module eagerly, by the same thread",
                hint="let a signal's handler set a flag, and update where the flag is read",
            )
        with self._entry:
            while self._inside:
                time.sleep(self.LOOKS_EVERY)
            return function()


def watch_tree(module: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """A function that raises BindError once a submodule that holds one of these tensors is another object.

    Its tensors could be found, but its class and attributes are not those that were checked at the load.
    """
    modules = _modules_of(module)
    paths: set[str] = set()
    for name in names:
        path = name.rpartition(".")[0]
        while path and path in modules and path not in paths:
            paths.add(path)
            path = path.rpartition(".")[0]
    ordered = sorted(paths)
    parts = [path.rpartition(".") for path in ordered]
    owners, keys = [modules[parent]._modules for parent, _, _ in parts], [name for _, _, name in parts]
    children = list(map(dict.get, owners, keys))

    def check() -> None:
        now = list(map(dict.get, owners, keys))
        if not all(map(operator.is_, now, children)):
            replaced = [path for path, old, new in zip(ordered, children, now, strict=True) if old is not new]
            raise BindError(
                f"submodules were replaced after the load: {', '.join(replaced[:5])}",
                hint="call aotc.load again, which checks the new ones",
            )

    return check


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
    issues = [
        issue
        for spec, tensor in zip(specs, tensors, strict=True)
        for issue in _state_issues(spec, tensor, device, writes=not written.isdisjoint(names_of(spec)))
    ]
    tied = ((spec.name, tensor, alias) for spec, tensor in zip(specs, tensors, strict=True) for alias in spec.aliases)
    loose = [
        Issue(f"was one tensor with `{name}` at build, and is another one here", where=alias, hint="tie them again")
        for (name, tensor, alias), other in zip(tied, aliases, strict=True)
        if other is not tensor
    ]
    if issues:
        raise BindError(
            "the module's tensors are not those that the artifact was built for",
            issues=(*issues, *loose),
            hint="load the artifact with the model and dtype of its manifest, on the device that it runs on",
        )
    if loose:
        raise BindError("weights that were tied at build are not tied here", issues=tuple(loose))
    if written and (shared := _shared_issues(specs, cast("Sequence[Tensor]", tensors), written)):
        raise BindError(
            "the model writes to tensors of the module that share memory, and was compiled for distinct ones",
            issues=tuple(shared),
            hint="give each memory of its own, both where it is built and here",
        )


def _shared_issues(specs: Sequence[StateSpec], tensors: Sequence[Tensor], written: frozenset[str]) -> list[Issue]:
    own = {index for index, spec in enumerate(specs) if not written.isdisjoint(names_of(spec))}
    found = []
    for pair in overlapping(tensors, own):
        one, other = (specs[index] for index in pair)
        found.append(
            Issue(
                f"lies in the memory of `{one.name}`",
                where=other.name,
                expected="memory of its own",
                actual=f"that of `{one.name}`",
                hint="put a clone in its place",
            )
        )
    return found


def _state_issues(spec: StateSpec, tensor: Tensor | None, device: torch.device, *, writes: bool) -> list[Issue]:
    if tensor is None:
        return [Issue("the module has no such parameter or buffer", where=spec.name)]
    if any("__torch_dispatch__" in vars(cls) for cls in type(tensor).__mro__[:-1] if cls is not Tensor):
        hint = "load the model with plain weights; what a subclass does with them is not in the compiled code"
        return [
            Issue(f"a plain tensor is expected, the module's is a {type(tensor).__name__}", where=spec.name, hint=hint)
        ]
    if not tensor.is_meta and (lack := lacks_values(tensor)):
        return [Issue(f"built for a dense tensor, the module's is {lack}", where=spec.name, hint=DENSE_COPY)]
    if writes and device.type == "cuda" and tensor.data_ptr() % GPU_ALIGNMENT:
        # A library for GPUs would write to an aligned copy.
        what = f"its memory begins at an address that {GPU_ALIGNMENT} does not divide, and the model writes to it"
        return [Issue(what, where=spec.name, hint="put a clone in its place")]
    pairs = (
        ("dtype", spec.dtype, dtype_name(tensor.dtype)),
        ("shape", list(spec.shape), list(tensor.shape)),
        ("stride", used_strides(spec.shape, spec.stride), used_strides(tensor.shape, tensor.stride())),
        ("device", str(device), str(tensor.device)),
        ("lazy view", "none", "conj or neg" if tensor.is_conj() or tensor.is_neg() else "none"),
    )
    return [
        Issue(
            f"built for {label} {expected}, the module's is {actual}",
            where=spec.name,
            expected=str(expected),
            actual=str(actual),
        )
        for label, expected, actual in pairs
        if expected != actual
    ]
