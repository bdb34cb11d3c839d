"""The module's tensors as arguments of a library.

A live library holds no weights: every parameter and buffer is an argument of each call. With a module these are its own
tensors: an in-place change is seen at once, and a tensor put in a parameter's place is noticed at the next call and
checked before it is used. Without one they come from a checkpoint (`aotc.runtime.weights`). Either way a call takes all
of them at once, as one `State` that never changes, so nothing can be half old and half new. A frozen library holds its
weights; a module that is given beside it is watched for changes.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from aotc.errors import BindError, CorruptError, Issue
from aotc.records import Artifact, StateSpec
from aotc.runtime.weights import Checkpoint, Placing, check_forms, names_of, read_tensors, used_strides
from aotc.snapshot import dtype_name, named_state, state_specs, tensor_digests

_data_ptr = cast("Callable[[Any], int]", torch.Tensor.data_ptr)


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
    """Where the tensors of calls come from."""

    def take(self) -> State:
        """The tensors for one call, checked. Raises BindError."""
        ...

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """What a checkpoint puts in the place of which tensors, checked and on the device. Raises BindError."""
        ...

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap: ...

    def commit(self, swap: Swap) -> bool:
        """Let later calls take `swap.state`; False, and nothing has happened, if `swap.base` is not what they take."""
        ...


def bind_state(artifact: Artifact, module: nn.Module | None, device: torch.device) -> Bound:
    """The module's tensors in the order of `artifact.state`, checked.

    Raises BindError, here or at the later call that finds a replaced tensor, with every mismatch at once.
    """
    if artifact.weights == "frozen":
        return Unchanging(artifact, _frozen(artifact, module))
    if module is not None:
        return ModuleState(module, artifact.state, device)
    if artifact.state:
        raise BindError(
            f"the artifact of `{artifact.model}` uses the module's own weights, and no module was given",
            hint="pass the module: aotc.load(ref, module); or a checkpoint: aotc.load(ref, "
            'weights="model.safetensors"); or build it with `weights: frozen`',
        )
    nothing = State()
    return Unchanging(artifact, lambda: nothing)


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

    def __init__(self, artifact: Artifact, take: TakeState) -> None:
        self.take = take
        self._why = "holds frozen weights" if artifact.weights == "frozen" else "has no weights"
        self._model = artifact.model

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

    def __init__(
        self,
        artifact: Artifact,
        checkpoint: Checkpoint,
        constants: Callable[[], Mapping[str, Tensor]],
        device: torch.device,
    ) -> None:
        self._specs, self._device = artifact.state, device
        self._known = {*artifact.unused, *(name for spec in artifact.state for name in names_of(spec))}
        self._written = {name for variant in artifact.variants for name in variant.mutated_state}
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

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        check_forms(checkpoint, self._specs, self._known, partial=True)
        return read_tensors(checkpoint, self._specs, self._device, lambda spec: True)

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        return _swap(self._state, self._specs, tensors)

    def commit(self, swap: Swap) -> bool:
        self._state = swap.state
        return True


def _swap(base: State, specs: Sequence[StateSpec], tensors: Mapping[str, Tensor]) -> Swap:
    replaced = [tensors.get(spec.name, old) for spec, old in zip(specs, base, strict=True)]
    return Swap(base, State(replaced, base.generation + 1), tensors)


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


class _Seen(NamedTuple):
    """The tensors that passed the check last.

    `aliases` share their storage and so keep it: no other tensor can come to lie at one of `pointers` unnoticed.
    """

    tensors: list[Tensor]
    pointers: list[int]
    aliases: list[Tensor]
    state: State


class ModuleState:
    """The tensors of a module, wherever they are replaced: by its owner, or by an update of all names at once."""

    def __init__(self, module: nn.Module, specs: Sequence[StateSpec], device: torch.device) -> None:
        names = [spec.name for spec in specs] + [alias for spec in specs for alias in spec.aliases]
        self._module, self._specs, self._device = module, specs, device
        self._check_tree = _watch_tree(module, names)
        self._slots = [_slot(module, name) for name in names]
        self._replacing = threading.RLock()
        self._eager = Gate()
        self._generation = 0
        self._seen = self._check()

    def take(self) -> State:
        self._check_tree()
        last = self._seen  # replaced as a whole: any thread may call, and each gives only a state that it found checked
        if self._is_current(last):
            return last.state
        with self._replacing:  # an update that is under way is finished first
            if not self._is_current(self._seen):
                self._seen = self._check()
            return self._seen.state

    def eager(self) -> Any:
        """A context in which the module is run: no update replaces its tensors meanwhile."""
        return self._eager.inside()

    def _is_current(self, seen: _Seen) -> bool:
        current: list[Any] = [owner.get(key) for owner, key in self._slots]
        return all(map(operator.is_, current, seen.tensors)) and list(map(_data_ptr, current)) == seen.pointers

    def _check(self) -> _Seen:
        current = [owner.get(key) for owner, key in self._slots]
        count = len(self._specs)
        check_state(self._specs, current[:count], self._device, current[count:])
        return self._saw(cast("list[Tensor]", current), State(cast("list[Tensor]", current[:count]), self._next()))

    def _next(self) -> int:
        self._generation += 1
        return self._generation

    def _saw(self, tensors: list[Tensor], state: State) -> _Seen:
        return _Seen(tensors, list(map(_data_ptr, tensors)), [tensor.detach() for tensor in tensors], state)

    def replacements(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """For any tensor of the module, also one that no variant takes: module and compiled code go on agreeing."""
        specs = self._all_specs()
        check_forms(checkpoint, specs, (), partial=True)
        now = named_state(self._module)
        return {
            name: _like(tensor, now[name])
            for name, tensor in read_tensors(checkpoint, specs, self._device, lambda spec: True).items()
        }

    def _all_specs(self) -> list[StateSpec]:
        """The artifact's, and those of the module's other tensors as they are."""
        taken = {name for spec in self._specs for name in names_of(spec)}
        state = named_state(self._module)
        others: dict[int, str] = {}
        for name, tensor in state.items():
            if name not in taken:
                others.setdefault(id(tensor), name)
        return [*self._specs, *state_specs(state, others.values(), digests=False)]

    def swap(self, tensors: Mapping[str, Tensor]) -> Swap:
        with self._replacing:
            made = _swap(self.take(), self._specs, tensors)
            made.state.generation = self._next()
            return made

    def commit(self, swap: Swap) -> bool:
        places = {spec.name: names_of(spec) for spec in self._all_specs()}
        with self._eager.alone(), self._replacing:
            if self.take() is not swap.base:
                return False
            for name, tensor in swap.tensors.items():
                for owner, key in (_slot(self._module, place) for place in places[name]):
                    owner[key] = tensor
            self._seen = self._saw([cast(Tensor, owner.get(key)) for owner, key in self._slots], swap.state)
            return True


def _like(tensor: Tensor, old: Tensor) -> Tensor:
    """A parameter if the old tensor is one."""
    return nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else tensor


class Gate:
    """Many may be inside at a time, or one alone; one that waits to be alone lets nobody else in."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._waiting = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._inside)
                yield
            finally:
                self._waiting -= 1
                self._changed.notify_all()


def _watch_tree(module: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """A function that raises BindError once a submodule that holds one of these tensors is another object.

    Its tensors could be found, but its class and attributes are not those that were checked at the load.
    """
    parents = [name.split(".")[:-1] for name in names]
    paths = sorted({".".join(parent[: end + 1]) for parent in parents for end in range(len(parent))})
    edges = [(_modules_of(module, path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths]
    children = [owner.get(key) for owner, key in edges]

    def check() -> None:
        now = [owner.get(key) for owner, key in edges]
        if not all(map(operator.is_, now, children)):
            replaced = [path for path, old, new in zip(paths, children, now, strict=True) if old is not new]
            raise BindError(
                f"submodules were replaced after the load: {', '.join(replaced[:5])}",
                hint="call aotc.load again, which checks the new ones",
            )

    return check


def _modules_of(module: nn.Module, path: str) -> Mapping[str, Any]:
    try:
        return module.get_submodule(path)._modules
    except AttributeError:
        return {}


def _slot(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return {}, key
    return (owner._parameters if key in owner._parameters else owner._buffers), key


def check_state(
    specs: Sequence[StateSpec],
    tensors: Sequence[Tensor | None],
    device: torch.device,
    aliases: Sequence[Tensor | None],
) -> None:
    """Compare each tensor with its spec, and the specs' aliases, in order; raises BindError with every mismatch."""
    issues = [
        issue for spec, tensor in zip(specs, tensors, strict=True) for issue in _state_issues(spec, tensor, device)
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


def _state_issues(spec: StateSpec, tensor: Tensor | None, device: torch.device) -> list[Issue]:
    if tensor is None:
        return [Issue("the module has no such parameter or buffer", where=spec.name)]
    if tensor.layout is not torch.strided:
        return [Issue(f"built for a dense tensor, the module's is {tensor.layout}", where=spec.name)]
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


def _frozen(artifact: Artifact, module: nn.Module | None) -> TakeState:
    nothing = State()
    if module is None:
        return lambda: nothing
    state = named_state(module)
    tensors = [state.get(spec.name) for spec in artifact.state]
    present = {spec.name: tensor for spec, tensor in zip(artifact.state, tensors, strict=True) if tensor is not None}
    digests = tensor_digests(present)
    issues = [issue for spec in artifact.state for issue in _frozen_issues(spec, present.get(spec.name), digests)]
    if issues:
        raise BindError(
            f"the artifact of `{artifact.model}` holds frozen weights, and the module's are others",
            issues=tuple(issues),
            hint="rebuild it for this checkpoint, or build with `weights: live`",
        )
    if blind := [name for name, tensor in present.items() if tensor.is_inference()]:
        raise BindError(
            f"the weights are inference tensors, whose changes cannot be seen: {', '.join(blind[:5])}",
            hint="build the module outside of torch.inference_mode(), or load the frozen artifact without a module",
        )
    check_tree = _watch_tree(module, present)
    slots = [_slot(module, name) for name in present]
    watched = list(present.values())
    frozen_at = list(map(_stamp, watched))
    storages = [tensor.detach() for tensor in watched]

    def take(_keep: Sequence[Tensor] = storages) -> State:
        """`_keep` holds the storages, so that no other tensor can come to lie at the same address unnoticed."""
        check_tree()
        now = [owner.get(key) for owner, key in slots]
        if not all(map(operator.is_, now, watched)) or list(map(_stamp, watched)) != frozen_at:
            pairs = zip(present, now, map(_stamp, watched), watched, frozen_at, strict=True)
            changed = [name for name, new, stamp, old, then in pairs if new is not old or stamp != then]
            raise BindError(
                f"weights of the module changed after the load: {', '.join(changed[:5])}; "
                f"the artifact of `{artifact.model}` holds the frozen old ones",
                hint="rebuild it for the new weights, or build with `weights: live`",
            )
        return nothing

    return take


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Changes with `p.data = …` and with every in-place operator; not with one on `p.data`, which torch hides."""
    return tensor.data_ptr(), tensor._version


def _frozen_issues(spec: StateSpec, tensor: Tensor | None, digests: Mapping[str, str]) -> list[Issue]:
    if tensor is None:
        return [Issue("the module has no such tensor", where=spec.name, expected=spec.digest)]
    kind = (spec.dtype, spec.shape)
    here = (dtype_name(tensor.dtype), tuple(tensor.shape))
    if kind != here:
        built, now = (f"{dtype} {list(shape)}" for dtype, shape in (kind, here))
        return [Issue(f"built for {built}, the module's is {now}", where=spec.name, expected=built, actual=now)]
    if digests[spec.name] == spec.digest:
        return []
    return [
        Issue("is not the tensor that was frozen in", where=spec.name, expected=spec.digest, actual=digests[spec.name])
    ]
