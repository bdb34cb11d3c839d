"""Calls in one call of C++ (`aotc.core`): the tables that the evaluator reads, from the record and the module.

The call table is complete before the first call: how arguments bind, what each tensor must be, the modes, what runs
for which sizes. The facts are what the module and the process must be: one object, made of what Python compared last,
which is swapped whole where Python has found, and accepted, a change. A call that the evaluator does not decide is made
by Python (`aotc.runtime.call`), which compares the same and explains what it refuses.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.autograd import forward_ad

from aotc.call_table.bind import sequences, tuples
from aotc.call_table.dispatch import Plan, Shape
from aotc.errors import LibraryError
from aotc.reads.facts import Facts, Reader
from aotc.reads.modes import ASKED, OF_INPUT, OF_STATE, matmul_precision
from aotc.reads.tensors import dtype_of
from aotc.records import Artifact, Parameter, Variant
from aotc.runtime.call import CompiledCall
from aotc.runtime.guards import PLAIN_TENSORS, Guards, is_followed
from aotc.runtime.libraries.library import CLibrary
from aotc.runtime.state.call_state import State
from aotc.tensors.layouts import with_strides
from aotc.tensors.strides import strides_in

INTERFACE = 2
"""Of the tables that the extension reads: of another number, it was compiled before this module changed them."""

_log = logging.getLogger("aotc")


def use_native(call: CompiledCall) -> None:
    """Let the evaluator make calls; of a model by regions, those of each region. `AOTC_NATIVE_CALL=0`: let Python."""
    core = open_core()
    if core is not None and os.environ.get("AOTC_NATIVE_CALL") != "0":
        for part in filter(can_be_native, call.parts()):
            if part is not call and part._watch is not None:
                part._watch.check()  # it was made before the region's forward was put in place
            CallEvaluator(part, core)


# -- the door to torch ------------------------------------------------------------------------------------------------


@functools.cache
def open_core() -> Any | None:
    """The extension module; None, with the reason in the log, where it cannot be used."""
    try:
        return load_core()
    except ImportError as error:
        _log.info("calls are made by Python, which takes longer: %s", error)
        return None


def load_core() -> Any:
    """The extension module. Raises ImportError where it was not built, where its door does not find what it reads of
    torch, or where it reads something else than Python does."""
    core = importlib.import_module("aotc.core._evaluator")
    if getattr(core, "INTERFACE", 0) != INTERFACE:
        raise ImportError("aotc.core was compiled from other sources than these: install aotc again")
    samples = _samples()
    core.open(tuple((each, torch._C._dispatch_keys(each).raw_repr(), each._cdata) for each in samples))
    with torch.inference_mode(False):
        included, excluded = _local_keys()
    with torch.inference_mode():
        now = _local_keys()
    core.know_modes(included ^ now[0], excluded ^ now[1])
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            if core.modes()[2:] != (torch.is_grad_enabled(), torch.is_inference_mode_enabled()):
                raise ImportError("the evaluator does not know the modes of this torch")
    for each in samples:
        keys = torch._C._dispatch_keys(each).raw_repr()
        seen = [*each.shape], [*each.stride()], each.data_ptr(), keys, each.get_device(), each.requires_grad
        if core.described(each)[1:] != seen:
            raise ImportError("the evaluator does not know the tensors of this torch")
    return core


def _samples() -> list[Tensor]:
    """Tensors that differ in all that the door reads."""
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        plain, wide = torch.ones(3), torch.zeros(2, 3, 4, 5, 6, 7, dtype=torch.int64)
        number = torch.ones(4, dtype=torch.complex64)
        samples = [plain, wide, wide.permute(5, 1, 0, 2, 4, 3), wide[:, 1:, ::2], number, plain.to(torch.bfloat16)]
        samples += [torch.ones(2, requires_grad=True), torch._neg_view(plain), number.conj(), torch.empty(0, 2)]
    with torch.inference_mode():
        samples.append(torch.ones(5))
    return samples


def _local_keys() -> tuple[int, int]:
    of = torch._C
    return of._dispatch_tls_local_include_set().raw_repr(), of._dispatch_tls_local_exclude_set().raw_repr()


@functools.cache
def _plain_keys(device: torch.device) -> tuple[int, ...]:
    """The dispatch keys of dense tensors on a device that are neither conjugated, negated, nested nor wrapped."""
    with torch.inference_mode(False):
        usual = torch.empty(0, device=device)
    with torch.inference_mode():
        made = torch.empty(0, device=device)
    return torch._C._dispatch_keys(usual).raw_repr(), torch._C._dispatch_keys(made).raw_repr()


@functools.cache
def _autocast_keys(device: str) -> int:
    """The excluded dispatch keys of a thread that autocast for a device type changes."""
    enabled, before = torch.is_autocast_enabled(device), _local_keys()[1]
    torch.set_autocast_enabled(device, not enabled)
    try:
        return before ^ _local_keys()[1]
    finally:
        torch.set_autocast_enabled(device, enabled)


@functools.cache
def _dtype_code(dtype: torch.dtype) -> int:
    core = open_core()
    assert core is not None
    return int(core.described(torch.empty(0, dtype=dtype, device="cpu"))[0])


# -- the call table ---------------------------------------------------------------------------------------------------


def can_be_native(call: CompiledCall) -> bool:
    """Whether the table has a row for all that a call compares."""
    known = all(name in ASKED or name == OF_INPUT or name.startswith(OF_STATE) for name in call._guards.asked)
    return known and (call.module is None or "training" in vars(call.module))


class CallEvaluator:
    """The evaluator of a callable, and the facts that it has.

    It does not hold the callable: who drops that has its libraries closed at once.
    """

    def __init__(self, call: CompiledCall, core: Any) -> None:
        self._evaluator = core.Evaluator(table_of(call))
        self._compared: tuple[Any, ...] = ()
        self._alone = threading.Lock()
        call.native, call.renew_facts, call.forget = self._evaluator, self.renew, self.forget
        call._counters.native = self._evaluator.counts
        self.renew(call)

    def renew(self, call: CompiledCall) -> None:
        """Take the facts anew where Python has replaced one since. Where another thread is here, not this time."""
        if not self._alone.acquire(blocking=False):
            return
        try:
            compared = _compared_with(call)
            if len(compared) != len(self._compared) or not all(map(_same, compared, self._compared)):
                self._evaluator.swap(facts_of(call, compared))
                self._compared = compared
        finally:
            self._alone.release()

    def forget(self) -> None:
        """Hold none of the module's tensors: they are being replaced."""
        self._compared = ()
        self._evaluator.swap(None)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is int and one == other)


def table_of(call: CompiledCall) -> dict[str, Any]:
    """The tables by which the evaluator checks and dispatches a call; `facts` are separate."""
    guards, dims = call._guards, call._dispatcher.dims
    autocast, elsewhere = _autocast_keys(call.device.type), "cuda" if call.device.type == "cpu" else "cpu"
    runs_in_c = [_runs_in_c(call, index) for index in range(len(call._libraries))]
    layouts = [(index, leaf.layout) for index, leaf, *_ in guards.tensors]
    return {
        "binding": _binding_of(call),
        "types": tuple(PLAIN_TENSORS),
        "keys": _plain_keys(call.device),
        "tensors": tuple(
            (index, _dtype_code(dtype), len(leaf.shape), index in guards.with_gradients)
            for index, leaf, dtype, _ in guards.tensors
        ),
        "constants": tuple((index, leaf.value) for index, leaf in guards.constants),
        "dims": tuple(dims.sources[name] for name in dims.names),
        "libraries": tuple(_library_of(call, index) if in_c else None for index, in_c in enumerate(runs_in_c)),
        "grad": int(guards.asked.get("grad", -1)),  # type: ignore[arg-type]
        "inference": int(guards.asked.get("inference", -1)),  # type: ignore[arg-type]
        "of_input": int(OF_INPUT in guards.asked),
        "gpu": call.device.index if call.device.type == "cuda" else -1,
        "included": 0,
        "excluded": autocast if guards.ambient.autocast is not None else 0,
        "unasked": _autocast_keys(elsewhere),
        "is_followed": is_followed,
        "plan": functools.partial(_plan_of, call._dispatcher.plan, layouts, runs_in_c),
        "launch": functools.partial(_launched, weakref.ref(call)),
        "restride": _restride,
    }


def _binding_of(call: CompiledCall) -> dict[str, Any]:
    signature, variants = call.artifact.signature, call.artifact.variants
    leaves, parameters = signature.leaves, signature.parameters

    any_sequence, any_order = all(each.any_sequence for each in variants), all(each.any_order for each in variants)
    extras = [each.name for each in parameters if each.kind == "extra" and each.default is msgspec.UNSET]

    def default_of(parameter: Parameter) -> Any:
        if parameter.optional:
            return leaves[parameter.tree].value
        return NotImplemented if parameter.default is msgspec.UNSET else parameter.default

    return {
        "parameters": tuple(
            (
                None if each.kind == "positional" else each.name,
                default_of(each),
                each.tree,
                bool(variants) and all(each.name in variant.empty_is_none for variant in variants),
            )
            for each in parameters
        ),
        "positional": sum(each.kind in ("positional", "either") for each in parameters),
        "ordered": tuple(extras) if len(extras) > 1 and not any_order else (),
        "lists": tuple(sequences()) if any_sequence else (list,),
        "tuples": tuple(sequences() if any_sequence else tuples()),
        "any_order": any_order,
        "leaves": len(leaves),
        "makers": tuple(call.makers),
    }


def _plan_of(
    plan_for: Callable[[Shape], Plan | None],
    layouts: Sequence[tuple[int, str]],
    runs_in_c: Sequence[bool],
    sizes: Shape,
) -> tuple[Any, ...] | None:
    """The evaluator's row for calls of these sizes; None where no bucket takes them."""
    plan = plan_for(sizes)
    if plan is None:
        return None
    shapes = [(plan.shapes[index], layout) for index, layout in layouts]
    return (
        *(plan.variant, int(bool(plan.pads)), plan.request_elements, plan.run_elements),
        runs_in_c[plan.variant] and not plan.pads and not plan.crops,
        tuple((shape, strides_in(layout, shape)) for shape, layout in shapes if shape is not None),
        plan,
    )


def _restride(tensor: Tensor, strides: Shape) -> Tensor:
    return with_strides(tensor, strides, detached=not tensor.requires_grad)


def _runs_in_c(call: CompiledCall, index: int) -> bool:
    """Whether nothing but the library runs in a call of this variant."""
    guards, attached = call._guards, call._attached[index]
    return (
        type(call) is CompiledCall
        and call.device.type == "cpu"
        and type(call._libraries[index]) is CLibrary
        and attached.launch is attached.direct
        and not (guards.mutated or guards.from_storage or guards.state_aliases or attached.variant.mutated_state)
    )


def _library_of(call: CompiledCall, index: int) -> tuple[Any, ...]:
    library, attached = call._libraries[index], call._attached[index]
    assert isinstance(library, CLibrary)
    return (
        ctypes.cast(getattr(library._library, library._run_name), ctypes.c_void_p).value,
        _positions(call.artifact, attached.variant),
        library.counts[1],
        _shape_of_result(attached.variant, library.counts[1]),
        attached._assemble,
        functools.partial(_raise_failure, weakref.ref(call), library),
    )


def _launched(of: Callable[[], CompiledCall | None], plan: Plan, state: State, ran: list[Any], given: list[Any]) -> Any:
    """A call that Python takes part in. NotImplemented where inputs share memory that the model writes to."""
    call = of()
    assert call is not None  # it is being called
    aliases = call._guards.state_aliases
    if (
        not call._guards.do_not_overlap(ran)
        or call.unaligned(ran)
        or (aliases is not None and aliases.issues(given, state))
    ):
        return NotImplemented
    if call._streams:
        call._streams.note()
    if call.on_sizes is not None:
        call.on_sizes(plan.sizes)
    call.agree(given)
    return call.launch(ran, state, plan, given)


def _raise_failure(of: Callable[[], CompiledCall | None], library: CLibrary, leaves: list[Any]) -> None:
    from aotc.runtime.explain.indices import with_indices

    call = of()
    assert call is not None  # it is being called
    call._counters.count_error(LibraryError)
    raise with_indices(LibraryError(f"the library failed: {library._reason()}"), call.artifact.signature.leaves, leaves)


def _positions(artifact: Artifact, variant: Variant) -> tuple[int, ...]:
    """Of each argument, its place among the leaves and, after them, the tensors of the state."""
    names = {spec.name: position for position, spec in enumerate(artifact.state)} if artifact.weights == "live" else {}
    count = len(artifact.signature.leaves)
    return tuple(
        argument.leaf if argument.leaf is not None else count + names[str(argument.state)]
        for argument in variant.arguments
    )


def _shape_of_result(variant: Variant, given: int) -> bool | None:
    """True: the library's one output. False: a tuple of its outputs, in order. None: as the variant makes it."""
    tree, outputs = variant.output_tree, variant.outputs
    if [output.index for output in outputs] != [*range(given)] or any(output.view for output in outputs):
        return None
    if isinstance(tree, int):
        return True if given == 1 else None
    return False if tree.type == "tuple" and tree.items == tuple(range(given)) else None


# -- the facts --------------------------------------------------------------------------------------------------------


def _compared_with(call: CompiledCall) -> tuple[Any, ...]:
    """The objects that Python compared last, each of which is replaced and never changed: what the module was seen to
    be, its tensors as they were checked, the training flags, and the addresses of the libraries' containers."""
    seen = call._watch._seen if call._watch is not None else None
    containers = [each._container.value if type(each) is CLibrary else None for each in call._libraries]
    return seen, call._state.seen(), call._guards.modes, *containers


def facts_of(call: CompiledCall, compared: tuple[Any, ...]) -> dict[str, Any]:
    """All that the evaluator compares of the module and the process, of one snapshot. A call in which one of its parts
    has been replaced is Python's."""
    seen, of_state, modes, *containers = compared
    guards = call._guards
    slots: list[tuple[dict[Any, Any], Any, Any]] = [
        (vars(forward_ad), "_current_level", -1),  # Python looks for tangents
        (vars(guards), "modes", modes),
        *((attributes, "training", mode) for attributes, mode in zip(guards._with_mode, modes, strict=True)),
    ]
    for library in call._libraries:
        if type(library) is CLibrary:
            slots.append((vars(library), "_container", vars(library)["_container"]))
    if call.module is not None:
        slots.append((vars(call.module), "training", guards.training))
    facts, tensors = Facts(), call._state.rows(of_state)
    if seen is not None:
        slots.append((vars(call._watch), "_seen", seen))
        facts = seen.facts
    covered = {id(table) for table, _ in facts.tables}
    slots += [slot for slot in tensors.slots if id(slot[0]) not in covered]
    return {
        **facts._asdict(),
        "slots": (*slots, *facts.slots),
        "written": (*facts.written, *tensors.written),
        "readers": (*_ambient(call), *facts.readers),
        "gradients": tuple(_gradients(guards)),
        "placed": tuple(tensors.placed),
        "tensors": tensors.state,
        "containers": tuple(containers),
    }


def _ambient(call: CompiledCall) -> list[Reader]:
    """Readers of the fields of `Ambient` that the thread's dispatch keys do not tell (they tell if autocast is on)."""
    ambient = call._guards.ambient
    readers: list[Reader] = [
        (torch.get_default_dtype, dtype_of(ambient.default_dtype)),
        (matmul_precision, ambient.float32_matmul_precision),
        (torch.are_deterministic_algorithms_enabled, ambient.deterministic),
    ]
    if ambient.num_threads is not None:
        readers.append((torch.get_num_threads, ambient.num_threads))
    if "device" in call._guards.asked:
        readers.append((ASKED["device"], call._guards.asked["device"]))
    if ambient.autocast is not None:
        readers.append((functools.partial(torch.get_autocast_dtype, call.device.type), dtype_of(ambient.autocast)))
    return readers


def _gradients(guards: Guards) -> list[tuple[Any, Any, Any]]:
    """Whether the module's tensors require a gradient, where forward asked: table, key, answer."""
    found = []
    for name, read in guards.asked_now.items():
        if name.startswith(OF_STATE):
            assert isinstance(read, functools.partial)
            found.append((*read.args, bool(guards.asked[name])))
    return found
