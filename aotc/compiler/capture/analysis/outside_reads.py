"""What forward reads outside of its module and its arguments: global variables, attributes of classes, functions, the
environment, modes of the process, clocks.

The model runs in eager, where a profile function sees every call. The names are those in the code of the functions that
ran: the model's own, and the forwards of `torch.nn`. The record holds each value that they read
(`aotc.reads.outside`). Values that these functions themselves change, and clocks, are reported instead.
"""

from __future__ import annotations

import ast
import builtins
import datetime
import dis
import functools
import gc
import inspect
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from aotc.compiler.explain_failure import is_installed, is_model_code, lines_shown, stack_of
from aotc.errors import BuildError
from aotc.reads.attributes import TORCHS_OWN, is_anothers, is_torchs, objects_in, own_attributes
from aotc.reads.modes import ASKED, OF_INPUT, OF_STATE, default_device
from aotc.reads.outside import ENVIRONMENT, name_of_class
from aotc.reads.sources import public_name
from aotc.reads.tensors import named_state
from aotc.records import Scalar

_CLOCKS = {
    getattr(time, name): f"time.{name}"
    for name in (*("time", "monotonic", "perf_counter", "process_time", "thread_time"), "time_ns", "monotonic_ns")
}
_OF_DATES = (datetime.datetime, datetime.date)
_CHANGING = frozenset(
    {*("append", "extend", "insert", "pop", "remove", "clear", "update", "add", "setdefault", "discard", "popitem")}
)
_SEEDS: tuple[Callable[..., Any], ...] = (torch.manual_seed, torch.seed, torch.cuda.manual_seed, torch.set_rng_state)
_SEEDING = {inspect.unwrap(function).__code__ for function in _SEEDS if isinstance(function, FunctionType)}
_SEED_MODULES = ("torch.random", "torch.cuda.random", "torch._compile", "torch._dynamo.eval_frame")
_READS_VARIABLE = type(os.environ).__getitem__.__code__
_TORCH_FORWARDS = tuple(str(Path(nn.__file__).parent / name) for name in ("modules", "utils", "functional.py"))
_CALLED = ("__call__", "__getattr__", "__getattribute__")
"""What Python looks up in a class at each call and each attribute of a module."""
_COMPILERS = tuple(
    f"{Path(found.origin).parent}/" for name in ("triton", "sympy") if (found := find_spec(name)) and found.origin
)
_MODES = {torch.is_grad_enabled: "grad", torch.is_inference_mode_enabled: "inference"}
_DEFAULT_DEVICE = frozenset({*_device_constructors(), torch.get_default_device})


class OutsideReads:
    """What calls of the model read; complete at the end of the block.

    names: as `aotc.reads.outside` names them, without those that the functions that ran change.
    attributes: `Class.method` of each method that ran, which an object of the class may get as its own; `Class.name` of
        each attribute of an object whose `__dict__` was looked into.
    asked: as `Variant.asked`.
    notes: a sentence for each clock, and for each global variable that is left out of `names`.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.asked: dict[str, Scalar] = {}
        self.notes: list[str] = []


@contextmanager
def outside_reads(module: nn.Module) -> Iterator[OutsideReads]:
    """While active, note what calls of the module read. At the end, raises BuildError where forward has seeded a
    generator."""
    reads, ran = OutsideReads(), dict[CodeType, _Ran]()
    clocks: dict[str, None] = {}
    seeded: list[BuildError] = []
    # Asked at each call of a function, thousands of times for a few files.
    counts, is_of_model = functools.cache(_counts), functools.cache(_is_of_model)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code not in ran and counts(code.co_filename):
                ran[code] = _Ran(code, frame.f_globals, _first_argument(frame))
            elif code is _READS_VARIABLE and _is_models(_outer(frame, ("os", "collections.abc"))):
                reads.names.add(f"{ENVIRONMENT}{frame.f_locals['key']}")
            elif code in _SEEDING and _is_models(caller := _outer(frame, _SEED_MODULES)):
                seeded.append(_seeds(caller))
        elif event == "c_call" and is_of_model(frame.f_code.co_filename):
            if name := _clock(argument):
                clocks[f"`{name}` at {_place(frame.f_code.co_filename, frame.f_lineno)}"] = None
            elif getattr(argument, "__name__", "") == "manual_seed":
                seeded.append(_seeds(frame))
            elif (mode := _known(_MODES, argument)) is not None:
                reads.asked[mode] = ASKED[mode]()

    before, watching_garbage = sys.getprofile(), gc.callbacks[:]
    gc.callbacks.clear()  # they would run within the model's functions, as Hypothesis's does, which reads a clock
    sys.setprofile(profile)
    try:
        with _Asked(module, reads.asked):
            yield reads
    finally:
        sys.setprofile(before)
        gc.callbacks[:0] = watching_garbage
    if seeded:
        raise seeded[0]
    reads.notes += [
        f"the model reads {clock}: the time of the build is compiled in; pass it as an input" for clock in clocks
    ]
    classes = {type(part) for part in module.modules() if is_anothers(type(part))} | {nn.Module}
    reads.names |= {f"{name_of_class(cls)}.{name}" for cls in classes for name in _CALLED if hasattr(cls, name)}
    firsts = {cls for one in ran.values() for cls in (one.first, type(one.first)) if isinstance(cls, type)}
    objects: dict[int, str] = {}
    methods = _methods(
        firsts | {type(holder) for part in module.modules() for _, holder in (("", part), *objects_in(part))}
    )
    for one in ran.values():
        for asked, cls, name in methods.get(one.code, ()):
            reads.names.add(f"{name_of_class(cls)}.{name}")
            # A forward is compared by itself, and what a property reads is read.
            if is_anothers(cls) and name != "forward" and callable(getattr(cls, name)):
                reads.attributes.add(f"{asked.__qualname__}.{name}")
        if _looks_into(one.code) and (own := own_attributes(one.first)):
            reads.attributes |= {f"{type(one.first).__qualname__}.{name}" for name in own if name not in TORCHS_OWN}
        for name, value, place in _names_in(one.code, one.variables):
            objects[id(value)] = name
            if _is_changed(name, ran):
                reads.notes.append(
                    f"the model reads the global variable `{name.partition(':')[2]}` at {place}, which it also "
                    "changes: its value at the build is compiled in, and a change is not noticed; keep it in an "
                    "attribute of the module, which is compared"
                )
            else:
                reads.names.add(name)
    steps = (step for code in ran for step in dis.get_instructions(code))
    stored = {step.argval for step in steps if step.opname in ("STORE_ATTR", "DELETE_ATTR")}
    reads.names.update(name for one in ran.values() for name in _attributes_read(one, objects, stored))
    reads.notes[:] = dict.fromkeys(reads.notes)


class _Ran(NamedTuple):
    """A function that ran: its code, its module's variables, and what its first argument was."""

    code: CodeType
    variables: dict[str, Any]
    first: Any


def _looks_into(code: CodeType) -> bool:
    return "__dict__" in code.co_names or "vars" in code.co_names


def _attributes_read(one: _Ran, objects: Mapping[int, str], stored: Collection[str]) -> Iterator[str]:
    """The names of those attributes that a function's code reads of its first argument, where this is a class, or an
    object that a global variable holds, and no function that ran sets an attribute of that name."""
    holder, of_class = one.first, isinstance(one.first, type)
    path = name_of_class(holder) if of_class else objects.get(id(holder), "")
    if not path or isinstance(holder, nn.Module | Tensor) or not is_anothers(holder if of_class else type(holder)):
        return
    if is_installed(one.code.co_filename):
        return
    first, before = one.code.co_varnames[0], ""
    for step in dis.get_instructions(one.code):
        is_read = step.opname == "LOAD_ATTR" and before == first and step.argval not in stored
        if is_read and isinstance(_attribute(holder, step.argval), _SCALARS):
            yield f"{path}.{step.argval}"
        loaded = step.argval if step.opname.startswith("LOAD_FAST") else ""
        before = loaded[-1] if isinstance(loaded, tuple) else loaded


def _methods(classes: set[type]) -> dict[CodeType, list[tuple[type, type, str]]]:
    """By the code of a function: the class that was asked, the one of its bases whose attribute it is, and the name."""
    found: dict[CodeType, list[tuple[type, type, str]]] = {}
    for asked in classes:
        for cls in asked.__mro__[:-1]:
            if cls is not nn.Module and (is_anothers(cls) or issubclass(cls, nn.Module)):
                for name, held in vars(cls).items():
                    for code in _codes(held):
                        found.setdefault(code, []).append((asked, cls, name))
    return found


def _codes(held: Any) -> Iterator[CodeType]:
    """The code of a class's attribute: of a function, bare or within a decorator or a property, and of a descriptor of
    the model's own."""
    if is_anothers(type(held)) and isinstance(get := getattr(type(held), "__get__", None), FunctionType):
        yield get.__code__
    for _ in range(8):
        if isinstance(code := getattr(held, "__code__", None), CodeType):
            yield code
        inner = (getattr(held, name, None) for name in ("__func__", "fget", "func", "__wrapped__"))
        if (held := next((each for each in inner if each is not None), None)) is None:
            return


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _counts(filename: str) -> bool:
    """Whether names in the code of that file count: a model's, and that of the forwards in `torch.nn`."""
    return _is_of_model(filename) or (filename.startswith(_TORCH_FORWARDS) and not filename.endswith("module.py"))


def _is_of_model(filename: str) -> bool:
    """Whether what the code of that file reads is the model's. A compiler that runs while a kernel is launched in eager
    does not run in a service."""
    return is_model_code(filename) and not filename.startswith(_COMPILERS)


def _is_models(frame: FrameType | None) -> bool:
    return frame is not None and _is_of_model(frame.f_code.co_filename)


def _outer(frame: FrameType | None, modules: tuple[str, ...]) -> FrameType | None:
    """The innermost frame that is not of these modules."""
    while frame is not None and frame.f_globals.get("__name__") in modules:
        frame = frame.f_back
    return frame


def _seeds(frame: FrameType | None) -> BuildError:
    return BuildError(
        "forward seeds a generator of random numbers, and compiled code would not: each call would draw other numbers",
        hint="draw the numbers once, in the factory, into a buffer; or let forward take them, or a seed's noise, as an "
        "input",
        stage="export",
        source=lines_shown(stack_of(frame)) if frame is not None else "",
    )


class _Asked(TorchFunctionMode):
    """Notes which tensors of the module and of the inputs forward asks whether they require a gradient, and whether it
    makes tensors on the default device."""

    def __init__(self, module: nn.Module, asked: dict[str, Scalar]) -> None:
        super().__init__()
        self._names = {id(tensor): f"{OF_STATE}{name}" for name, tensor in reversed(named_state(module).items())}
        self._asked = asked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is _REQUIRES_GRAD and _is_models(_outer(sys._getframe(1), _HERE)):
            if (name := self._names.get(id(args[0]))) is not None:
                self._asked[name] = bool(args[0].requires_grad)
            else:  # an input, or what is computed from inputs
                self._asked[OF_INPUT] = False
        elif _known(_DEFAULTS, func) and kwargs.get("device") is None and _is_models(_outer(sys._getframe(1), _HERE)):
            self._asked["device"] = default_device()
        return func(*args, **kwargs)


_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"]
_DEFAULTS = dict.fromkeys(_DEFAULT_DEVICE, True)
_HERE = (__name__, "torch.overrides", "torch.utils._device", "torch._tensor")


def _known(table: Mapping[Any, Any], function: Any) -> Any:
    try:
        return table.get(function)
    except TypeError:  # bound to an object that has no hash
        return None


def _clock(function: Any) -> str:
    if (name := _known(_CLOCKS, function)) is not None:
        return str(name)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and owner in _OF_DATES and function.__name__ in ("now", "utcnow", "today"):
        return f"{owner.__name__}.{function.__name__}"
    return ""


def _names_in(code: CodeType, variables: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """The names that a function's code reads, each with its value and its place: global variables, and what follows
    them in dots, as far as these are of modules, classes and objects of the model's own."""
    of_torch, of_library = not is_model_code(code.co_filename), is_installed(code.co_filename)
    line, holder, path = code.co_firstlineno, None, ""
    local: dict[str, ModuleType] = {}
    imported: ModuleType | None = None
    for step in dis.get_instructions(code):
        line = (step.positions and step.positions.lineno) or line
        name, value = "", _MISSING
        if step.opname == "LOAD_GLOBAL":
            value = variables.get(step.argval, vars(builtins).get(step.argval, _MISSING))
            name = f"{public_name(str(variables.get('__name__')))}:{step.argval}"
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            holder = imported if step.opname == "IMPORT_FROM" else holder
            if isinstance(holder, ModuleType):
                value = vars(holder).get(step.argval, _MISSING)
                name = f"{public_name(holder.__name__)}:{step.argval}"
            elif path and _is_looked_into(holder):
                value, name = _attribute(holder, step.argval), f"{path}.{step.argval}"
            elif not of_torch and not step.argval.startswith("__") and hasattr(Tensor, step.argval):  # perhaps its
                value, name = getattr(Tensor, step.argval), f"torch:Tensor.{step.argval}"
        elif step.opname == "IMPORT_NAME":
            imported = _imported(step.argval, variables)
            if imported is not None and not of_torch:
                yield f"{public_name(imported.__name__)}:", imported, _place(code.co_filename, line)
            continue
        elif step.opname == "STORE_FAST" and imported is not None:
            local[step.argval], imported = imported, None
        elif step.opname.startswith("LOAD_FAST") and step.argval in local:
            holder, path = local[step.argval], ""
            continue
        is_told = value is not _MISSING and not _is_own_submodule(name, value)
        if is_told and (callable(value) or not (of_torch or (of_library and not isinstance(value, _SCALARS)))):
            yield name, value, _place(code.co_filename, line)
        holder, path = value, name


_MISSING: Any = object()
_SCALARS = (bool, int, float, str, type(None), torch.dtype, ModuleType)
"""The data of installed packages that counts: their version decides the rest, which may hold state of the process."""


def _is_own_submodule(name: str, value: Any) -> bool:
    """Whether it is a module that stands in its package only once it is imported."""
    return isinstance(value, ModuleType) and name.replace(":", ".") == value.__name__


def _imported(name: str, variables: dict[str, Any]) -> ModuleType | None:
    package = variables.get("__package__") or ""
    return sys.modules.get(name) or sys.modules.get(f"{package}.{name}")


def _is_looked_into(holder: Any) -> bool:
    cls = holder if isinstance(holder, type) else type(holder)
    if isinstance(holder, FunctionType):
        return not is_torchs(holder)
    return is_anothers(cls) and not isinstance(holder, nn.Module | Tensor)


def _attribute(holder: Any, name: str) -> Any:
    """The attribute, without running a property."""
    if isinstance(held := getattr(holder, "__dict__", None), Mapping) and name in held:
        return getattr(holder, name, _MISSING)
    found = getattr(type(holder), name, _MISSING)
    return _MISSING if isinstance(found, property) else getattr(holder, name, _MISSING)


def _is_changed(name: str, ran: Mapping[CodeType, _Ran]) -> bool:
    """Whether one of the functions that ran sets the global variable, or changes what it holds."""
    module_name, _, path = name.partition(":")
    if "." in path:
        return False
    for code, one in ran.items():
        if public_name(str(one.variables.get("__name__"))) != module_name or path not in code.co_names:
            continue
        function = _function(code.co_filename, code.co_name, code.co_firstlineno)
        for node in ast.walk(function) if function is not None else ():
            if (isinstance(node, ast.Global) and path in node.names) or _changes(node, path):
                return True
    return False


@functools.cache
def _function(file: str, name: str, line: int) -> ast.AST | None:
    tree = _tree(file)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == line:
                return node
    return None


@functools.cache
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _changes(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Subscript(value=ast.Name(id=found), ctx=ast.Store() | ast.Del()):
            return found == name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=found), attr=method)):
            return found == name and method in _CHANGING
    return False


def _place(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"
