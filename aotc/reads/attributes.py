"""The Python attributes of a module as plain data, as far as forward may read them: values, forwards, hooks."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
import sys
import types
from array import array
from collections import ChainMap, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aotc.digest import canonical_json, sha256_bytes, sha256_json
from aotc.reads.sources import public_name
from aotc.reads.tensors import dtype_name, named_state, tensor_digest, tensor_digests
from aotc.tensors.layouts import has_memory

TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that every module has: tensors, submodules and hooks are looked at by themselves."""

_MODULE_ORIGINS = ("hf_device_map", "name_or_path")
CONFIG_ORIGINS = ("architectures", "dtype", "name_or_path", "transformers_version", "use_cache")
"""What transformers writes on a module, and in its configuration, about where its weights came from and were put;
and whether calls that do not say so return a cache.

A module that was made from a configuration and one from a checkpoint differ in nothing else, so these are compared only
where capture read them (`Variant.origins`). What a constructor made of them is in tensors, classes, attributes."""

_ORIGIN = "origin "


def module_origins(module: nn.Module) -> tuple[str, ...]:
    """The attributes of a module that say where its weights came from; of one of diffusers, with which scale adapters
    were fused last, which stays when they are gone."""
    if any(cls.__qualname__ == "PeftAdapterMixin" and cls.__module__ == _ADAPTERS for cls in type(module).__mro__):
        return ("lora_scale",)
    return _MODULE_ORIGINS if has_origins(module) else ()


_ADAPTERS = "diffusers.loaders.peft"


def has_origins(value: Any) -> bool:
    """Whether it is of a class of transformers, or of one that inherits from such a class."""
    return any(cls.__module__.partition(".")[0] == "transformers" for cls in type(value).__mro__)


def origin_of(attribute: str) -> str:
    """Which origin an attribute of `module_attributes` is; "" for any other attribute."""
    return attribute.rpartition(".")[2].removeprefix(_ORIGIN) if attribute.startswith(_ORIGIN) else ""


def module_attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """The parts of each submodule that a capture may have baked in: its class, its plain attributes, and which of its
    parameters, buffers and children it has, or has as None.

    Plain are None, bool, numbers of any kind, str, bytes, enums, ranges, dtypes, layouts, memory formats, devices (but
    not which of a kind), tensors other than buffers (by their bytes), functions, methods and classes (by their names; a
    function also by its defaults and its closure), lists, tuples, sets, slices, dicts, namespaces and partial functions
    of these, and what a dataclass (a model's configuration) holds that is plain. Private attributes (`_x`) and anything
    else are left out: they are torch's own, or hold no value that can be compared. A module, parameter or buffer that
    is also registered stands by its name, and a view of one by its layout: their values live.
    Origins stand under names of their own: `origin config.dtype`. A forward in the place of the class's is always
    there, if only by the name of its own class.
    """
    name_of = _registered_names(module)
    parts = module.named_modules(remove_duplicate=False)
    return {name: dict(_attributes(submodule, name_of)) for name, submodule in parts}


ORDERED = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that run their parts, or give them, in order."""
ORDER = "order of parts"

NOT_READ = "_aotc_not_read"
"""A module's own attribute: the names of those on which its results do not depend. `aotc.adapters` writes it."""

OTHER_MODE = "_aotc_other_mode"
"""A submodule's own attribute: it is in another training mode than the module. `aotc.compile`'s builds write it."""

NameOf = Callable[[Any], str]


def _registered_names(module: nn.Module) -> NameOf:
    """The name of a value that is registered with the module, or is a view of such a tensor; "" for any other."""
    known = {id(part): f"module {name}" for name, part in reversed(list(module.named_modules()))}
    state = named_state(module)
    known |= {id(tensor): f"state {name}" for name, tensor in reversed(state.items())}

    @functools.cache
    def by_memory() -> dict[int, str]:
        return {_memory(tensor): name for name, tensor in reversed(state.items()) if _is_plain_tensor(tensor)}

    def name_of(value: Any) -> str:
        if (name := known.get(id(value))) is not None:
            return name
        if _is_plain_tensor(value) and (name := by_memory().get(_memory(value))) is not None:
            begins = value.storage_offset() - state[name].storage_offset()
            return f"view {name} {dtype_name(value.dtype)} {list(value.shape)} {list(value.stride())} at {begins}"
        return ""

    return name_of


def _is_plain_tensor(value: Any) -> bool:
    """Whether it is a tensor with memory of its own: a subclass may hold its elements in other tensors."""
    return type(value) in (Tensor, nn.Parameter, nn.Buffer) and has_memory(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _attributes(module: nn.Module, name_of: NameOf) -> Iterator[tuple[str, Any]]:
    yield "class", type(module).__qualname__
    if hooks := forward_hooks(module):
        yield "forward hooks", [plain_or_type(hook, name_of=name_of) for hook in hooks]
    for kind, table in (("parameter", module._parameters), ("buffer", module._buffers), ("module", module._modules)):
        for name, held in table.items():
            yield name, kind_of(kind, held)
    if isinstance(module, ORDERED) and len(module._modules) > 1:
        yield ORDER, list(module._modules)
    not_read, origins = vars(module).get(NOT_READ, ()), module_origins(module)
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name == "training" or name in not_read:
            continue
        if getattr(value, "is_compiled_code", False) is True:  # in the place of a method
            continue
        plain = _plain(value, name_of=name_of) if name != "forward" else plain_forward(module, value, name_of)
        if plain is not _SKIP:
            yield (_ORIGIN if name in origins else "") + name, plain
        for path, origin in _origins(value, name):
            yield _ORIGIN + path, origin
    for name, by in hidden_entries(module):
        yield name, ["hidden by", *by]


def kind_of(kind: str, held: Any) -> str:
    """The kind of an entry of a module's tables: whether there is one, and its class if tensors of that class compute
    in their own way (`__torch_function__`), which a capture has traced."""
    return f"no {kind}" if held is None else kind_of_class(kind, type(held))


def kind_of_class(kind: str, cls: type) -> str:
    """As `kind_of`, of an entry of that class."""
    function = getattr(cls, "__torch_function__", None)
    of_torch = None, torch._C._disabled_torch_function_impl, vars(Tensor)["__torch_function__"].__func__
    is_plain = getattr(cls, "__torch_dispatch__", None) is torch._C._disabled_torch_dispatch_impl
    own = is_plain and getattr(function, "__func__", function) not in of_torch  # the state has the class of others
    return f"{kind} {public_name(cls.__module__)}.{cls.__qualname__}" if own else kind


def hidden_entries(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The names of the parameters, buffers and children that `module.name` does not give, since an attribute of the
    object or of its class comes first; and what comes first, as plain data."""
    of_object, of_classes = vars(module), [vars(cls) for cls in type(module).__mro__[:-1]]
    for name in (*module._parameters, *module._buffers, *module._modules):
        by_class = next((held[name] for held in of_classes if name in held), NO_VALUE)
        if name in of_object and not hasattr(type(by_class), "__set__"):
            yield name, ["an attribute", plain_or_type(of_object[name])]
        elif by_class is not NO_VALUE:
            yield name, ["an attribute of the class", plain_or_type(by_class)]


def forward_hooks(module: nn.Module) -> list[Any]:
    """The hooks on a module's forward, without those by which transformers records hidden states and attentions. The
    first call that asks for these registers them for good. They act only where a call's configuration asks for them,
    and the configuration is compared."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [hook for hook in hooks if getattr(hook, "__module__", "") != "transformers.utils.output_capturing"]


def hooks_on_all_modules(trains: bool) -> list[dict[int, Any]]:
    """The hooks that `torch.nn.modules.module.register_module_forward_hook` and its like have registered; where code is
    trained, those on the backward, too."""
    of = nn.modules.module
    backward = [of._global_backward_hooks, of._global_backward_pre_hooks] if trains else []
    return [of._global_forward_hooks, of._global_forward_pre_hooks, *backward]


def backward_hooks(parts: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """The tables of the hooks on the backward of these modules."""
    return [table for part in parts for table in (part._backward_hooks, part._backward_pre_hooks)]


def training_differs(module: nn.Module) -> tuple[str, ...]:
    """The paths of the submodules whose training flag is not the module's own, in order."""
    training = module.training
    return tuple(sorted(path for path, part in module.named_modules() if part.training is not training))


def plain_value(value: Any) -> Any:
    """As in `module_attributes`; NO_VALUE for what cannot be compared."""
    return _plain(without_origins(value))


def own_forward(module: nn.Module, method: str = "") -> Callable[..., Any]:
    """The forward, or that method, of the module's class."""
    return types.MethodType(getattr(type(module), method or "forward"), module)


def plain_forward(module: nn.Module, forward: Any, name_of: NameOf) -> Any:
    """The name, or the class's name, of a forward that replaces the class's own. Nothing for compiled code of a region,
    for a method that a manifest names, and for the class's forward itself, which a copy of an attached module has."""
    if getattr(forward, "is_compiled_code", False) is True or getattr(forward, "is_entry_point", False) is True:
        return _SKIP
    function = forward
    if isinstance(forward, types.MethodType):
        function = forward.__func__
        if function is type(module).forward and forward.__self__ is module:
            return _SKIP
    plain = _plain(function, name_of=name_of)
    return _plain(type(forward)) if plain is _SKIP else plain


def _origins(value: Any, path: str, depth: int = 4) -> Iterator[tuple[str, Any]]:
    """The origins of a configuration and of those within it, by their paths."""
    for name, member in parts_of(value).items() if depth else ():
        if name in CONFIG_ORIGINS and has_origins(value):
            yield f"{path}.{name}", _plain(member)
        else:
            yield from _origins(member, f"{path}.{name}", depth - 1)


def read_attributes(module: nn.Module, names: Collection[str]) -> dict[str, dict[str, Any]]:
    """The values of those attributes called `names` (as `Class.attribute`) that `module_attributes` leaves out: private
    ones, those of classes, methods, and those of objects of classes of the model's own; of what is not plain, its type.
    By submodule, then by path from there."""
    if not names:
        return {}
    name_of, parts = _registered_names(module), module.named_modules(remove_duplicate=False)
    found = {path: dict(_read_attributes(part, names, name_of)) for path, part in parts}
    return {path: attributes for path, attributes in found.items() if attributes}


def _read_attributes(module: nn.Module, names: Collection[str], name_of: NameOf) -> Iterator[tuple[str, Any]]:
    for path, holder in (("", module), *objects_in(module)):
        for name in attributes_in(holder, names):
            value = getattr(holder, name, None)
            if name == "forward" and not path and getattr(value, "is_entry_point", False) is True:  # in a build alone
                yield name, plain_or_type(own_forward(module), name_of=name_of)
                continue
            plain = _plain(without_origins(value), name_of=name_of)
            if path or name.startswith("_") or name not in vars(module) or plain is _SKIP:
                yield f"{path}.{name}".removeprefix("."), plain_or_type(value, name_of=name_of)


def attributes_in(holder: Any, names: Collection[str]) -> list[str]:
    """Of `names` (`Class.attribute`), those of the holder's class, without modes (`training`) and unread ones."""
    prefixes = {f"{cls.__qualname__}." for cls in type(holder).__mro__[:-1]}  # a class may stand for its base
    left_out = ("training", *getattr(holder, NOT_READ, ()))
    own = {name.removeprefix(prefix) for prefix in prefixes for name in names if name.startswith(prefix)}
    return sorted(name for name in own if "." not in name and name not in left_out)


def without_origins(value: Any) -> Any:
    """The configuration of a model of diffusers', which is a dict, without what says where the model came from."""
    if isinstance(value, dict) and type(value).__module__.partition(".")[0] == "diffusers":
        return {key: item for key, item in value.items() if not str(key).startswith("_")}
    return value


def objects_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The objects of classes of others than Python and torch among a module's attributes, in lists and dicts there, and
    within one another, four deep, each once with the path to it. Compiled code does not belong to the model."""
    seen: set[int] = set()
    left_out = {*TORCHS_OWN, *vars(module).get(NOT_READ, ())}
    waiting = [(name, value, 4) for name, value in vars(module).items() if name not in left_out]
    while waiting:
        path, value, left = waiting.pop(0)
        if isinstance(value, nn.Module | Tensor | type | enum.Enum) or not left or id(value) in seen:
            continue
        if getattr(value, "is_compiled_code", False) is True:
            continue
        inner = dict(parts_of(value))
        if is_anothers(type(value)) and (own := own_attributes(value)) is not None:
            yield path, value
            inner.update(own)
        if inner:
            seen.add(id(value))
            waiting += [(f"{path}.{name}", item, left - 1) for name, item in inner.items()]


def own_attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object's own, in its `__dict__` and its slots; None where it has neither."""
    own, slots = getattr(value, "__dict__", None), [name for cls in type(value).__mro__ for name in slots_in(cls)]
    if not isinstance(own, dict) and not slots:
        return None
    return {**(own or {}), **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


def slots_in(cls: type) -> tuple[str, ...]:
    """The names of a class's own slots."""
    members = [name for name, value in vars(cls).items() if isinstance(value, types.MemberDescriptorType)]
    return tuple(members) if is_anothers(cls) else ()


def is_anothers(cls: type) -> bool:
    """Whether a class is neither Python's nor torch's nor NumPy's."""
    return cls.__module__.partition(".")[0] not in _LIBRARIES


_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy"})


def parts_of(value: Any) -> dict[str, Any]:
    """The items of a list, a tuple, a dict or a configuration, by their names there."""
    value = container_of(value)
    if isinstance(value, list | tuple | deque):
        return {str(index): item for index, item in enumerate(value)}
    if isinstance(value, dict):
        return {key_text(key): item for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name, None) for name in _members(value)}
    return {}


def key_text(key: Any) -> str:
    """A key of a dict as a text that another process finds, too: of an object without a plain value, its type."""
    return str(key if isinstance(key, str | numbers.Number | enum.Enum | None) else plain_or_type(key, 2))


NO_VALUE = _SKIP = object()


def container_of(value: Any) -> Any:
    """The list or the dict in which an object of Python's library keeps what it holds; any other value as it is."""
    if isinstance(value, UserDict | UserList):
        return value.data
    is_chain, is_space = isinstance(value, ChainMap), isinstance(value, types.SimpleNamespace)
    return value.maps if is_chain else vars(value) if is_space else value


def _plain(value: Any, depth: int = 4, name_of: NameOf = lambda value: "") -> Any:
    if name := name_of(value):
        return name
    value = container_of(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):  # numpy's too
        return int(value) if abs(int(value)) < 2**63 else str(int(value))
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, numbers.Number | range):
        return f"{type(value).__name__} {value}"
    if isinstance(value, bytes | bytearray):
        return f"bytes {sha256_bytes(bytes(value))}"
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.device):
        return f"device {value.type}"
    if isinstance(value, torch.layout | torch.memory_format):
        return str(value)
    if type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
        return f"tensor {dtype_name(value.dtype)} {list(value.shape)} {tensor_digest(value)}"
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        return f"array {value.dtype} {list(value.shape)} {sha256_bytes(value.tobytes())}"
    if isinstance(value, property | functools.cached_property):
        return _plain(["property", value.fget if isinstance(value, property) else value.func], depth, name_of)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        name = f"{public_name(str(value.__module__))}.{value.__qualname__}"
        if isinstance(value, types.FunctionType) and (code := value.__code__.co_qualname) != value.__qualname__:
            name = f"{name} by {code}"  # a decorator's, or the code of another function
        held = held_by(value) if depth and isinstance(value, types.FunctionType) else {}
        return [name, {key: plain_or_type(item, depth - 1, name_of) for key, item in held.items()}] if held else name
    if isinstance(value, types.MethodType):
        return _plain(value.__func__, depth, name_of)
    if depth and isinstance(value, slice):
        return _plain(["slice", value.start, value.stop, value.step], depth, name_of)
    if depth and isinstance(value, partial):
        return _plain([value.func, *value.args, value.keywords], depth, name_of)
    if depth and isinstance(value, list | tuple | deque | array):
        items = [_plain(item, depth - 1, name_of) for item in value]
        return _SKIP if any(item is _SKIP for item in items) else items
    if depth and isinstance(value, set | frozenset):
        items = [_plain(item, depth - 1, name_of) for item in value]
        return _SKIP if any(item is _SKIP for item in items) else ["set", *sorted(items, key=canonical_json)]
    if depth and isinstance(value, dict | types.MappingProxyType):
        pairs = {key_text(key): _plain(item, depth - 1, name_of) for key, item in value.items()}
        if isinstance(value, defaultdict):
            pairs["by default"] = plain_or_type(value.default_factory)
        return _SKIP if any(item is _SKIP for item in pairs.values()) else pairs
    if depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        left_out = CONFIG_ORIGINS if has_origins(value) else ()
        members = {
            name: _plain(item, depth - 1, name_of) for name, item in parts_of(value).items() if name not in left_out
        }
        return {name: item for name, item in members.items() if item is not _SKIP}
    return _SKIP


def held_by(function: types.FunctionType) -> dict[str, Any]:
    """The values of a function beside its code, by name: its defaults and the variables of its closure. Of torch's own
    functions nothing: they come with the version."""
    if is_torchs(function):
        return {}
    code, defaults, closure = function.__code__, function.__defaults__ or (), function.__closure__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    cells = {name: contents_of(cell) for name, cell in zip(code.co_freevars, closure, strict=True)}
    return {**cells, **dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}


def contents_of(cell: types.CellType) -> Any:
    """The value of a variable of a closure; None for one that is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def is_torchs(value: Any) -> bool:
    """Whether a function or a class is one of torch's."""
    return str(getattr(value, "__module__", None)).partition(".")[0] == "torch"


def plain_or_type(value: Any, depth: int = 4, name_of: NameOf = lambda value: "") -> Any:
    """As `plain_value`; of what cannot be compared, its type and what it holds, as a container or a descriptor; of a
    module that is not in the tree, what is in it."""
    plain = _plain(without_origins(value), depth, name_of)
    if plain is not _SKIP:
        return plain
    if isinstance(value, types.ModuleType):
        return f"Python module {public_name(value.__name__)}"
    if isinstance(value, nn.Module):
        return ["module", *digests_of(value)]
    cls = type(value)
    held = own_attributes(value) if is_descriptor(value) else {} if dataclasses.is_dataclass(value) else parts_of(value)
    items = {key: plain_or_type(item, depth - 1, name_of) for key, item in (held or {}).items() if depth}
    return ["type", f"{public_name(cls.__module__)}.{cls.__qualname__}", *([items] if items else ())]


def is_descriptor(value: Any) -> bool:
    return hasattr(type(value), "__get__") and is_anothers(type(value)) and not callable(value)


def digests_of(module: nn.Module) -> tuple[str, str]:
    """Of the attributes and of the tensors of a module that is not part of the model's."""
    return sha256_json(module_attributes(module)), sha256_json(tensor_digests(named_state(module)))


def _members(value: Any) -> list[str]:
    """A dataclass's fields, and its other attributes, as configurations have, without those equal in all objects."""
    own = getattr(value, "__dict__", {})
    more = [name for name in own if not name.startswith("_") and not _is_of_class(type(value), name, own[name])]
    return list(dict.fromkeys([*(part.name for part in dataclasses.fields(value)), *more]))


def _is_of_class(cls: type, name: str, value: Any) -> bool:
    return isinstance(value, str) and getattr(cls, name, None) == value
