"""Calls in one call of C, for artifacts that have the extension for it (`aotc/compiler/toolchain/native_call.cpp`).

Python decides: a call that it ran as it came is remembered with all that it compared, and later calls ask the extension
first. Where anything differs, that answers NotImplemented, and Python does the whole call. Where nothing does, it runs
the library, or has Python run it: on a GPU, with pads, writes, gradients, or operators of Python's. What replaces the
values that Python compares with (`refresh`, other weights, a fork) replaces objects that the extension compares, too.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import operator
import os
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

import msgspec
import torch
from torch.autograd import forward_ad

from aotc.errors import LibraryError
from aotc.machine.native import python_abi
from aotc.reads.modes import ASKED, OF_INPUT, OF_STATE, matmul_precision
from aotc.reads.tensors import dtype_of
from aotc.reads.watch import Seen
from aotc.records import NATIVE_INTERFACE, Artifact, File, NativeCall, TensorLeaf, Variant
from aotc.runtime.call import CompiledCall
from aotc.runtime.dispatch import Plan
from aotc.runtime.guards import PLAIN_TENSORS, Guards
from aotc.runtime.libraries.files import anonymous_file, path_of
from aotc.runtime.libraries.library import CLibrary
from aotc.runtime.state.weights import ModuleState, State

_log = logging.getLogger("aotc")
_modules: dict[str, Any] = {}


def use_native(call: CompiledCall, native: NativeCall, read_file: Callable[[File], bytes]) -> None:
    """Let later calls, of a model by regions those of each region, run in the extension, where it is one for this torch
    and this Python, and they are such calls as it can make. `AOTC_NATIVE_CALL=0` switches it off."""
    if not _fits(native):
        return
    called = [part for part in call.parts() if can_be_native(part)]
    if not called:
        return
    if (module := open_native(call.artifact, read_file)) is not None:
        for part in called:
            Native(part, module.Native())


def open_native(artifact: Artifact, read_file: Callable[[File], bytes]) -> Any | None:
    """The extension of an artifact; None where it has none that can be used here."""
    native = artifact.native
    if native is None or not _fits(native):
        return None
    try:
        return _opened(native.file, read_file)
    except (ImportError, OSError, LibraryError) as error:  # of a newer libc, or where no file may be mapped as code
        _log.info("%s: calls are made by Python: %s", artifact.model, error)
        return None


def _fits(native: NativeCall) -> bool:
    fits = (native.torch, native.abi, native.interface) == (torch.__version__, python_abi(), NATIVE_INTERFACE)
    return fits and os.environ.get("AOTC_NATIVE_CALL") != "0"


def _opened(file: File, read_file: Callable[[File], bytes]) -> Any:
    """The module, one per digest in a process. Raises ImportError, OSError."""
    if file.digest not in _modules:
        name = "aotc_native_call"
        with anonymous_file(file.name) as stream:
            stream.write(read_file(file))
            stream.flush()
            spec = spec_from_loader(name, loader := ExtensionFileLoader(name, path_of(stream)))
            assert spec is not None
            module = module_from_spec(spec)
            loader.exec_module(module)
        sys.modules.pop(name, None)  # its path is a descriptor's number, which other files get later
        vars(module).pop("__file__", None)
        tensor = torch.empty(0)
        if module.INTERFACE != NATIVE_INTERFACE or module.tensor_at(tensor) != tensor._cdata:
            raise ImportError("the extension is not one for this torch")
        _modules[file.digest] = module
    return _modules[file.digest]


def can_be_native(call: CompiledCall) -> bool:
    """Whether any call of it can be: the arguments are its leaves, and all modes can be told."""
    artifact, guards = call.artifact, call._guards
    signature = artifact.signature
    extras = sum(each.kind == "extra" for each in signature.parameters)
    return (
        type(call) is CompiledCall
        and [each.tree for each in signature.parameters] == [*range(len(signature.leaves))]
        and not any(isinstance(leaf, TensorLeaf) and leaf.default is not None for leaf in signature.leaves)
        and not any(variant.empty_is_none for variant in artifact.variants)
        and (extras < 2 or all(variant.any_order for variant in artifact.variants))
        and all(name in ASKED or name == OF_INPUT or name.startswith(OF_STATE) for name in guards.asked)
        and guards.asked.get("device", "cpu") == "cpu"
        and (call.module is None or "training" in vars(call.module))
    )


def _runs_in_c(call: CompiledCall, plan: Plan) -> bool:
    """Whether nothing but the library runs in a call."""
    guards, attached = call._guards, call._attached[plan.variant]
    return (
        call.device.type == "cpu"
        and type(call._libraries[plan.variant]) is CLibrary
        and attached.launch is attached.direct
        and not (plan.pads or plan.crops or guards.mutated or guards.from_storage or attached.variant.mutated_state)
    )


class Native:
    """What a callable knows of its extension: what it was armed with, and the sizes that it has been given.

    Neither holds the callable: who drops that has its libraries closed at once.
    """

    def __init__(self, call: CompiledCall, native: Any) -> None:
        self._native = native
        self._armed_with: tuple[Any, ...] = ()
        self._known: set[tuple[int, ...]] = set()
        self._alone = threading.Lock()
        call.native, call.remember, call.forget = native, self.remember, self.forget
        call._counters.native = native.counts

    def remember(self, call: CompiledCall, plan: Plan, leaves: Sequence[Any], state: State) -> None:
        """After a call that Python ran with these leaves, as they came. Where another thread is here, not this time."""
        if not self._alone.acquire(blocking=False):
            return
        try:
            self._remember(call, plan, leaves, state)
        finally:
            self._alone.release()

    def forget(self) -> None:
        """Hold none of the module's tensors: they are being replaced."""
        self._armed_with, self._known = (), set()
        self._native.disarm()

    def _remember(self, call: CompiledCall, plan: Plan, leaves: Sequence[Any], state: State) -> None:
        if isinstance(call._state, ModuleState) and call._state._seen.state is not state:
            return  # replaced meanwhile
        compared = _compared_with(call, state)
        if len(compared) != len(self._armed_with) or not all(map(operator.is_, compared, self._armed_with)):
            self._armed_with, self._known = compared, set()
            self._native.arm(spec_of(call, state))
        if plan.sizes in self._known:
            return
        self._known.add(plan.sizes)
        of_form = (
            tuple(leaves[index] for index, *_ in call._guards.tensors),
            plan.variant,
            (bool(plan.pads), plan.request_elements, plan.run_elements),
        )
        if not _runs_in_c(call, plan):
            self._native.add_launched(*of_form, functools.partial(_launched, weakref.ref(call), plan, state))
            return
        attached, library = call._attached[plan.variant], call._libraries[plan.variant]
        assert isinstance(library, CLibrary)
        if not library._container:
            return
        run = ctypes.cast(getattr(library._library, library._run_name), ctypes.c_void_p).value
        self._native.add(
            *of_form,
            run,
            library._container.value,
            _positions(call.artifact, attached.variant),
            library.counts[1],
            _shape_of_result(attached.variant, library.counts[1]),
            attached._assemble,
            state,
            functools.partial(_raise_failure, weakref.ref(call), library),
            library,
        )


def _launched(of: Callable[[], CompiledCall | None], plan: Plan, state: State, leaves: list[Any]) -> Any:
    """NotImplemented where the call differs from the one that ran in what the extension does not compare."""
    call = of()
    assert call is not None  # it is being called
    aliases = call._guards.state_aliases
    if (
        not call._guards.lie_apart(leaves)
        or call.unaligned(leaves)
        or (aliases is not None and aliases.issues(leaves, state))
    ):
        return NotImplemented
    if call._streams:
        call._streams.note()
    return call.launch(leaves, state, plan, leaves)


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


def _compared_with(call: CompiledCall, state: State) -> tuple[Any, ...]:
    """The objects that Python compared this call with, each of which is replaced and never changed."""
    seen = call._watch._seen if call._watch is not None else None
    of_state = call._state._seen if type(call._state) is ModuleState else None
    return seen, of_state, state, call._guards.modes, *(vars(library)["_container"] for library in _containers_of(call))


def _containers_of(call: CompiledCall) -> list[CLibrary]:
    """The libraries that the extension runs, whose containers a fork replaces."""
    return [library for library in call._libraries if type(library) is CLibrary]


def spec_of(call: CompiledCall, state: State) -> dict[str, Any]:
    """All that the extension compares in a call, whatever its sizes."""
    guards, leaves = call._guards, call.artifact.signature.leaves
    parameters = call.artifact.signature.parameters
    kinds = [each.kind for each in parameters]
    slots: list[tuple[dict[Any, Any], Any, Any]] = [
        (vars(forward_ad), "_current_level", -1),  # Python looks for tangents
        (vars(guards), "modes", guards.modes),
        *((attributes, "training", mode) for attributes, mode in zip(guards._with_mode, guards.modes, strict=True)),
        *((vars(library), "_container", vars(library)["_container"]) for library in _containers_of(call)),
    ]
    if call.module is not None:
        slots.append((vars(call.module), "training", guards.training))
    spec: dict[str, tuple[Any, ...]] = {
        "types": tuple(PLAIN_TENSORS),
        "names": tuple(None if each.kind == "positional" else each.name for each in parameters),
        "defaults": tuple(
            leaves[each.tree].value
            if each.optional
            else NotImplemented
            if each.default is msgspec.UNSET
            else each.default
            for each in parameters
        ),
        "tensors": tuple((index, index in guards.with_gradients) for index, *_ in guards.tensors),
        "constants": tuple((index, leaf.value, None) for index, leaf in guards.constants),
        "gradients": tuple(_gradients(guards)),
        "tables": (),
        "lists": (),
        "empty": (),
        "classes": (),
        "lengths": (),
        "marks": (),
        "attributes": (),
        "state": (),
    }
    readers: list[tuple[Callable[[], Any], Any]] = list(_ambient(call))
    covered: set[int] = set()
    if call._watch is not None:
        seen = call._watch._seen
        slots += [(vars(call._watch), "_seen", seen), *zip(seen.owners, seen.keys, seen.values, strict=True)]
        covered = {id(table) for table in seen.tree.tables if type(table) is dict}
        spec |= _of_module(seen)
        if not _all_told(seen):
            readers.append((call._watch.check, None))
    if type(call._state) is ModuleState:
        of_state = call._state._seen
        slots.append((vars(call._state), "_seen", of_state))
        slots += [
            (owner, key, tensor)
            for (owner, key), tensor in zip(call._state._slots, of_state.tensors, strict=True)
            if id(owner) not in covered
        ]
        spec["state"] = tuple(zip(of_state.tensors, of_state.pointers, of_state.aliases, strict=True))
    else:
        readers.append((call._state.take, state))
    numbers = {
        "positional": sum(kind in ("positional", "either") for kind in kinds),
        "grad": int(guards.asked.get("grad", -1)),  # type: ignore[arg-type]
        "inference": int(guards.asked.get("inference", -1)),  # type: ignore[arg-type]
        "of_input": int(OF_INPUT in guards.asked),
        "variants": len(call._libraries),
        "gpu": call.device.index if call.device.type == "cuda" else -1,
    }
    return {**spec, **numbers, "slots": tuple(slots), "readers": tuple(readers)}


def _ambient(call: CompiledCall) -> list[tuple[Callable[[], Any], Any]]:
    """What the thread's dispatch keys do not tell of `Ambient`; that autocast is on, they do."""
    ambient = call._guards.ambient
    readers: list[tuple[Callable[[], Any], Any]] = [
        (torch.get_default_dtype, dtype_of(ambient.default_dtype)),
        (matmul_precision, ambient.float32_matmul_precision),
        (torch.are_deterministic_algorithms_enabled, ambient.deterministic),
    ]
    if ambient.num_threads is not None:
        readers.append((torch.get_num_threads, ambient.num_threads))
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


_IN_STEP = (dict, OrderedDict, defaultdict)
"""Classes of dicts that are equal where they hold the same objects in the same order."""


def _all_told(seen: Seen) -> bool:
    """Whether C compares all that `ModuleWatch.check` does; else that is asked."""
    return not seen.bound and not seen.arrays and all(type(each) in (*_IN_STEP, list) for each in _containers(seen))


def _containers(seen: Seen) -> list[Any]:
    return [*seen.dicts, *seen.others, *seen.tree.tables]


def _of_module(seen: Seen) -> dict[str, tuple[Any, ...]]:
    tree, count = seen.tree, len(seen.tensors)
    copies = zip(_containers(seen), [*seen.copies, *tree.copies], strict=True)
    pairs = [(now, copy) for now, copy in copies if type(now) in (*_IN_STEP, list)]
    return {
        "tables": tuple(pair for pair in pairs if type(pair[0]) is not list),
        "lists": tuple(pair for pair in pairs if type(pair[0]) is list),
        "empty": tuple(seen.empty),
        "classes": tuple(zip(tree.holders, tree.classes, strict=True)),
        "lengths": tuple(zip(tree.own, tree.lengths, strict=True)),
        "marks": tuple(zip(seen.tensors, seen.marks[:count], seen.marks[count:], strict=True)),
        "attributes": tuple(zip(seen.objects, seen.names, seen.of_objects, strict=True)),
    }
