"""The tensors that one call passes to a live library, which holds none of its own, and what they must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from aotc.errors import BindError, Issue
from aotc.reads.tensors import dtype_name, dtype_of
from aotc.records import names_of
from aotc.tensors.layouts import has_memory

if TYPE_CHECKING:
    from aotc.records import Artifact, StateSpec

StateForm = tuple[Any, ...]

data_ptr = cast("Callable[[Any], int]", torch.Tensor.data_ptr)

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


class SeenTensors(NamedTuple):
    """The tensors that passed the check last.

    `aliases` share their storage and so keep it: no other tensor can come to lie at one of `pointers` unnoticed.
    """

    tensors: list[Tensor]
    classes: list[type]
    pointers: list[int]
    forms: list[StateForm]
    aliases: list[Tensor]
    state: State


def saw(tensors: list[Tensor], state: State) -> SeenTensors:
    pointers, aliases = list(map(data_ptr, tensors)), [tensor.detach() for tensor in tensors]
    return SeenTensors(tensors, list(map(type, tensors)), pointers, list(map(form_of, tensors)), aliases, state)


def written_state(artifact: Artifact) -> frozenset[str]:
    """The names of the tensors that the model writes to."""
    return frozenset(name for variant in artifact.variants for name in variant.mutated_state)


# -- what they must be ------------------------------------------------------------------------------------------------


def check_state(
    specs: Sequence[StateSpec],
    tensors: Sequence[Tensor | None],
    device: torch.device,
    aliases: Sequence[Tensor | None],
    written: frozenset[str],
) -> None:
    """Compare each tensor with its spec, and the specs' aliases, in order; raises BindError with every mismatch."""
    issues: list[Issue] = []
    for spec, tensor in zip(specs, tensors, strict=True):
        issues += _issues(spec, tensor, device, writes=is_written(spec, written))
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
            hint=_state_hint(issues, specs, tensors, device),
        )
    if loose:
        raise BindError("weights that were tied at build are not tied here", issues=tuple(loose))
    if written and (shared := _shared_issues(specs, cast("Sequence[Tensor]", tensors), written)):
        raise BindError(
            "the model writes to tensors of the module that share memory, and was compiled for distinct ones",
            issues=tuple(shared),
            hint="give each memory of its own, both where it is built and here",
        )


def _issues(spec: StateSpec, tensor: Tensor | None, device: torch.device, *, writes: bool) -> list[Issue]:
    """Every way in which a tensor is not what its spec says."""
    if tensor is None:
        return [Issue("the module has no such parameter or buffer", where=spec.name)]
    if is_special(tensor):
        hint = "build the model as it is here, quantised, or load it with plain weights"
        return [
            Issue(f"a plain tensor is expected, the module's is a {type(tensor).__name__}", where=spec.name, hint=hint)
        ]
    if not tensor.is_meta and (lack := lacks_values(tensor)):
        return [Issue(f"built for a dense tensor, the module's is {lack}", where=spec.name, hint=DENSE_COPY)]
    if tensor.device == device and is_unaligned(tensor, device, writes):
        used = "the model writes to it" if writes else "products with int8 weights need that"
        what = f"its memory begins at an address that {ALIGNMENT} does not divide, and {used}"
        return [Issue(what, where=spec.name, hint="put a clone in its place")]
    found = []

    def compare(label: str, expected: object, actual: object) -> None:
        if expected != actual:
            text = f"built for {label} {expected}, the module's is {actual}"
            found.append(Issue(text, where=spec.name, expected=str(expected), actual=str(actual)))

    if tensor.dtype is not dtype_of(spec.dtype):
        compare("dtype", spec.dtype, dtype_name(tensor.dtype))
    if tensor.shape != spec.shape:
        compare("shape", list(spec.shape), list(tensor.shape))
    if tensor.stride() != spec.stride:
        compare("stride", used_strides(spec.shape, spec.stride), used_strides(tensor.shape, tensor.stride()))
    if tensor.device != device:
        compare("device", str(device), str(tensor.device))
    if tensor.is_conj() or tensor.is_neg():
        compare("lazy view", "none", "conj or neg")
    return found


def _state_hint(
    issues: Sequence[Issue], specs: Sequence[StateSpec], tensors: Sequence[Tensor | None], device: torch.device
) -> str:
    """How to cast or move the whole module back; where that is not enough, which module is expected."""
    pairs = [(spec, tensor) for spec, tensor in zip(specs, tensors, strict=True) if tensor is not None]
    if any(tensor.is_meta for _, tensor in pairs):
        return "give it values: module.to_empty(device=…), then load_state_dict"
    cast = {spec.dtype for spec, tensor in pairs if spec.dtype != dtype_name(tensor.dtype)}
    moved = any(tensor.device != device for _, tensor in pairs)
    only = all(issue.message.startswith(("built for dtype ", "built for device ")) for issue in issues)
    # A cast would change others, too: complex numbers lose a part, and buffers of float64 their precision.
    others = [spec for spec, tensor in pairs if tensor.is_complex() or tensor.is_floating_point()]
    kept = bool(cast) and any(spec.dtype not in cast for spec in others)
    if not only or kept or len(cast) > 1 or any(not dtype_of(dtype).is_floating_point for dtype in cast):
        return "load the artifact with the model and dtype of its manifest, on the device that it runs on"
    to = [f"torch.{dtype}" for dtype in cast]
    return f"call module.to({', '.join([repr(str(device))] * moved + to)})" + (
        "; or set `dtype:` in the manifest, and build again" if cast else ""
    )


def _shared_issues(specs: Sequence[StateSpec], tensors: Sequence[Tensor], written: frozenset[str]) -> list[Issue]:
    from aotc.tensors.overlaps import overlapping

    own = {index for index, spec in enumerate(specs) if is_written(spec, written)}
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
    """Strides, with 0 for axes of size 1, whose strides move no element: `aotc.tensors.layouts`."""
    return [step if size != 1 else 0 for size, step in zip(shape, stride, strict=True)]
