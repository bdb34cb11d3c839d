"""From a manifest's factories to modules: imports, calls, and what can go wrong in the user's code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import machinery
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from aotc.errors import Issue, ManifestError
from aotc.manifest.findings import did_you_mean, nearest
from aotc.manifest.inputs import TensorInput, nested_factory, parse_inputs
from aotc.manifest.types import Manifest, ModelSpec
from aotc.models.auto_inputs import with_inputs
from aotc.models.casting import cast
from aotc.models.dummy_weights import fill, parameters_on_meta
from aotc.models.fake_ranks import NO_GROUP, PARALLEL, become_rank, parallel_of, rank_arguments, variables_of_rank
from aotc.models.signature import NAMED
from aotc.reads.attributes import OTHER_MODE
from aotc.tensors.caches import register_caches

_AOTC_FOLDER = Path(__file__).resolve().parents[1]


# -- imports ----------------------------------------------------------------------------------------------------------


def import_object(reference: str, folder: Path) -> Any:
    """What `package.module:name` or `path/to/file.py:name` names; `name` may be dotted.

    Looked up in `folder` (the manifest's) first, then in the working folder; both go to the front of `sys.path`. A file
    that could also be imported by a dotted name gets that name, so its classes are the same ones that a service
    imports. Raises ManifestError where the module cannot be imported or lacks the name; no module that failed half-way
    stays in `sys.modules`.
    """
    module_name, _, attributes = reference.partition(":")
    if not (module_name and attributes):
        hint = "write package.module:name, or path/to/file.py:name"
        raise ManifestError(f"{reference[:200]!r} does not name an object of a module", hint=hint)
    _put_on_path(folder)
    try:
        with _whole_modules_only():
            module = _import_file(module_name, folder) if module_name.endswith(".py") else _import(module_name)
        return _attribute(module, attributes, reference)  # which a lazy package imports only now
    except ManifestError:
        raise
    except (Exception, SystemExit) as error:
        raise _import_error(reference, error) from error


def _put_on_path(folder: Path) -> None:
    wanted = list(dict.fromkeys([str(folder.absolute()), str(Path.cwd())]))
    sys.path[:] = [*wanted, *(entry for entry in sys.path if entry not in wanted)]
    importlib.invalidate_caches()
    for entry in wanted:  # as sys.path_hooks would fill it
        if not isinstance(sys.path_importer_cache.get(entry), _UsersFolder):
            sys.path_importer_cache[entry] = _UsersFolder(
                entry,
                (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
                (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
                (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
            )


OURS = frozenset({"aotc", "torch", "torchgen", "functorch", "triton", "sympy", "mpmath", "numpy", "networkx", "jinja2"})
"""Packages that a folder of the user's beside a manifest does not replace, whatever it is called."""


class _UsersFolder(machinery.FileFinder):
    """A folder of the user's on `sys.path`, which has no modules called like those that torch and aotc import."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> machinery.ModuleSpec | None:
        return None if fullname in OURS else super().find_spec(fullname, target)


@contextlib.contextmanager
def _whole_modules_only() -> Iterator[None]:
    """If an import fails, remove the modules of the same package that it imported from `sys.modules`, so that a retry
    starts afresh."""
    before = set(sys.modules)
    try:
        yield
    except BaseException as error:
        roots = {name.partition(".")[0] for name in _user_modules(error)}
        for name in [name for name in sys.modules if name not in before and name.partition(".")[0] in roots]:
            del sys.modules[name]
        raise


def _user_modules(error: BaseException) -> Iterator[str]:
    """The names of the user's modules that the exception went through."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if _is_user_file(frame.f_code.co_filename):
            yield str(frame.f_globals.get("__name__", ""))


def _import(name: str) -> ModuleType:
    return importlib.import_module(name)


def _import_file(relative: str, folder: Path) -> ModuleType:
    file = _find_file(relative, folder)
    name = file.stem if ".." in relative else relative[:-3].replace("/", ".").strip(".")
    if _origin_of(name) == file:
        return _import(name)
    if name in sys.modules or _origin_of(name) is not None:
        # Another module has the name already, perhaps one of Python's own. No absolute path may get into the new one.
        content = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
        name = f"{name.replace('.', '_')}_{content}"
        if name in sys.modules:
            return sys.modules[name]
    return _execute(name, file)


def _find_file(relative: str, folder: Path) -> Path:
    places = list(dict.fromkeys([folder.absolute(), Path.cwd()]))
    for place in places:
        if (place / relative).is_file():
            return (place / relative).resolve()
    looked = " and ".join(str(place) for place in places)
    raise ManifestError(f"there is no file `{relative}`", hint=f"looked in {looked}")


def _origin_of(name: str) -> Path | None:
    """The file that `import name` would run, or has run."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin).resolve() if spec and spec.origin and spec.has_location else None


def _execute(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _import_error(reference: str, error: BaseException) -> ManifestError:
    module = reference.partition(":")[0]
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        hint = "modules are looked up in the manifest's folder and in the working folder"
        return ManifestError(f"`{reference}` cannot be imported: there is no module `{error.name}`", hint=hint)
    return ManifestError(f"`{reference}` cannot be imported: {told(error)}")


def _attribute(module: ModuleType, attributes: str, reference: str) -> Any:
    value: Any = module
    for name in attributes.split("."):
        if not hasattr(value, name):
            owner = f"`{value.__name__}`" if isinstance(value, ModuleType) else f"`{reference}`"
            known = [other for other in dir(value) if not other.startswith("_")]
            raise ManifestError(f"{owner} has no `{name}`", hint=did_you_mean(name, known) if known else "")
        value = getattr(value, name)
    return value


# -- modules ----------------------------------------------------------------------------------------------------------


made_before: dict[str, torch.nn.Module] = {}
"""Modules by model that the process made from which this one was forked: the first to ask for one gets it."""


def build_module(
    spec: ModelSpec, folder: Path, *, dummy_weights: bool = False, rank: int = 0, unsharded: bool = False
) -> torch.nn.Module:
    """Call the factory: a module in eval mode, or in train mode to train it, cast to the spec's dtype.

    Of a parallel model, it is the part of `rank`, and this process is that rank from now on (`aotc.models.fake_ranks`);
    with `unsharded`, it is the whole model.

    Random weights are the same in every process, and the caller's random state is left as it was. With `dummy_weights`,
    parameters get values of `aotc.models.dummy_weights` in place of the factory's, and need no memory. Raises
    ManifestError where a factory cannot be imported, raises, or gives something else than a Module whose tensors all
    have values, and for frozen weights, whose values are compiled, with `dummy_weights`.
    """
    if (made := made_before.pop(spec.name, None)) is not None:
        return made
    if dummy_weights and spec.weights == "frozen":
        raise ManifestError(
            f"`weights: frozen` compiles the values of `{spec.name}`'s weights, and dummy weights have none",
            hint=f"leave out {DUMMY_WEIGHTS}, or use `weights: live`",
        )
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices), contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        if dummy_weights:
            stack.enter_context(parameters_on_meta())
        arguments = None
        if (parallel := parallel_of(spec.parallel)) and not unsharded:
            become_rank(parallel, rank)
            arguments = partial(rank_arguments, parallel=parallel)
            stack.enter_context(variables_of_rank())
        module = _call(spec.factory, spec.kwargs, folder, dummy_weights, arguments)
    if not isinstance(module, torch.nn.Module):
        raise ManifestError(
            f"`{spec.factory}` gave {type(module).__name__}; expected a torch.nn.Module",
            hint="name a class of modules, or a function that returns a module",
        )
    _check_filled(module, spec.factory, dummy_weights)
    _set_mode(module, spec.train, spec.factory)
    for part in module.modules():
        if OTHER_MODE in vars(part):
            part.training = not spec.train
    if spec.dtype:
        module = cast(module, getattr(torch, spec.dtype))
    if dummy_weights:
        fill(module)
        _check_attributes(module, spec.factory)
    if spec.method:
        enter_by(module, spec.method)
    register_caches(module)
    return module


def _set_mode(module: torch.nn.Module, train: bool, reference: str) -> None:
    try:
        module.train(train)
    except NotImplementedError as error:  # a graph of torch.export has the mode in which it was exported
        if train:
            raise ManifestError(
                f"`train: true`, but `{reference}` gives a module of torch.export, whose mode cannot be changed",
                hint="let the factory return the module that was exported, or write `train: false`",
            ) from error


def _check_filled(module: torch.nn.Module, reference: str, dummy_weights: bool) -> None:
    """Raises ManifestError where a parameter or buffer has no values; with `dummy_weights`, parameters get some."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise ManifestError(
                f"`{reference}` gave a module whose `{name}` has no shape yet",
                hint="lazy modules get their shapes from a first call: let the factory call the module once",
            )
        if dummy_weights and tensor.is_meta and type(tensor) is torch.nn.Parameter:
            continue
        if tensor.is_meta and dummy_weights:
            raise _computed(reference, name)
        if tensor.is_meta:
            raise ManifestError(
                f"`{reference}` gave a module whose `{name}` lies on the meta device and has no values",
                hint="let the factory make it on the CPU, or call `module.to_empty(device='cpu')` and load its weights",
            )


def _check_attributes(module: torch.nn.Module, reference: str) -> None:
    """Raises ManifestError where a module keeps a tensor without values as a plain attribute."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise _computed(reference, f"{path}.{name}".removeprefix("."))


def _computed(reference: str, name: str) -> ManifestError:
    return ManifestError(f"`{reference}` computes `{name}` from parameters, which have no values", hint=_REAL)


def _call(
    reference: str,
    kwargs: Mapping[str, Any],
    folder: Path,
    dummy_weights: bool,
    further: Callable[..., dict[str, Any]] | None = None,
) -> Any:
    """`further` gives arguments for the factory beside `kwargs`."""
    factory = import_object(reference, folder)
    if not callable(factory):
        raise ManifestError(
            f"`{reference}` is {type(factory).__name__}; expected a function or a class",
            hint="it is called with `kwargs`, and what it returns is used",
        )
    kwargs = {name: _made(value, folder, dummy_weights) for name, value in kwargs.items()}
    if further is not None:
        kwargs |= further(factory, kwargs=kwargs)
    try:
        return factory(**kwargs)
    except (Exception, SystemExit) as error:
        grouped = PARALLEL if NO_GROUP in str(error) else ""
        hint = grouped or _call_hint(factory, reference, kwargs) or (_REAL if dummy_weights else "")
        raise ManifestError(f"`{reference}` raised {told(error)}", hint=hint) from error


def _made(value: Any, folder: Path, dummy_weights: bool) -> Any:
    """A value of `kwargs`, with each `{factory: …, kwargs: …}` in it called."""
    if nested := nested_factory(value):
        return _call(*nested, folder, dummy_weights)
    if isinstance(value, Mapping):
        return {name: _made(item, folder, dummy_weights) for name, item in value.items()}
    return [_made(item, folder, dummy_weights) for item in value] if isinstance(value, list) else value


DUMMY_WEIGHTS = "--dummy-weights"
_REAL = f"leave out {DUMMY_WEIGHTS}: parameters then have the factory's values"


Visit = Callable[[ModelSpec, torch.nn.Module, float], None]
"""Takes a model's spec with its inputs, its module, and the seconds that its factory took."""


def build_modules(manifest: Manifest) -> dict[str, torch.nn.Module]:
    """Every model's module. Errors are as in `visit_modules`."""
    modules: dict[str, torch.nn.Module] = {}

    def keep(spec: ModelSpec, module: torch.nn.Module, seconds: float) -> None:
        modules[spec.name] = module

    visit_modules(manifest, keep)
    return modules


def visit_modules(manifest: Manifest, visit: Visit, *, dummy_weights: bool = False) -> None:
    """Build every model's module, each checked against its inputs, one after the other: a module is freed before the
    next one is built, unless `visit` keeps it. After a first mistake nothing is visited any more. `dummy_weights`: as
    in `build_module`.

    Raises one ManifestError with what is wrong in any of them: factories and init functions that cannot be imported or
    that raise, inputs that `forward` does not take, parameters without an input.
    """
    issues: list[Issue] = []
    for spec in manifest.models.values():
        issues += _visit(manifest, spec, None if issues else visit, dummy_weights)
    if issues:
        raise ManifestError(f"{manifest.path}: not every model can be built", issues=tuple(dict.fromkeys(issues)))


def _visit(manifest: Manifest, spec: ModelSpec, visit: Visit | None, dummy_weights: bool) -> list[Issue]:
    """Build the model's module. Without mistakes, it is visited; else the mistakes are returned."""
    issues, began = [*_init_issues(manifest, spec)], time.monotonic()
    try:
        module = build_module(spec, manifest.folder, dummy_weights=dummy_weights)
    except ManifestError as error:
        key = "method" if spec.method and "has no method" in error.message else "factory"
        return [*issues, Issue(error.message, where=manifest.where("models", spec.name, key), hint=error.hint)]
    seconds = time.monotonic() - began
    try:
        spec = with_inputs(manifest, spec, module)
    except ManifestError as error:
        return [*issues, *error.issues]
    issues += _forward_issues(manifest, spec, module)
    if visit is not None and not issues:
        visit(spec, module, seconds)
    return issues


def _call_hint(factory: Any, reference: str, kwargs: Mapping[str, Any]) -> str:
    """A hint, if kwargs do not fit the factory: the signature that it has."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(**kwargs)
    except TypeError:
        return f"kwargs must fit {reference.rpartition(':')[2]}{signature}"
    return ""


def _init_issues(manifest: Manifest, spec: ModelSpec) -> Iterator[Issue]:
    for leaf in parse_inputs(spec.inputs)[1]:
        for init in leaf.inits if isinstance(leaf, TensorInput) else ():
            if not isinstance(init, str) or ":" not in init:
                continue
            try:
                import_object(init, manifest.folder)
            except ManifestError as error:
                where = manifest.where("models", spec.name, "inputs", *_keys_of(leaf.path), "init")
                yield Issue(error.message, where=where, hint=error.hint)


def _keys_of(path: str) -> list[str | int]:
    """`batch.ids[0]` back to its keys."""
    parts = re.findall(r"\[(\d+)\]|([^.\[\]]+)", path)
    return [int(index) if index else name for index, name in parts]


def _forward_issues(manifest: Manifest, spec: ModelSpec, module: torch.nn.Module) -> Iterator[Issue]:
    inputs = manifest.where("models", spec.name, "inputs")
    called = f"{type(module).__name__}.{spec.method or 'forward'}"
    if isinstance(module, torch.jit.ScriptModule):
        yield Issue(
            "the factory gives a scripted or traced module, which torch.export does not capture",
            where=manifest.where("models", spec.name, "factory"),
            hint="give the module that it was made of",
        )
        return
    if type(module).forward is torch.nn.Module.forward and "forward" not in vars(module):
        yield Issue(f"{type(module).__name__} has no forward", where=manifest.where("models", spec.name, "factory"))
        return
    parameters = inspect.signature(module.forward).parameters
    named = {name: item for name, item in parameters.items() if item.kind in NAMED}
    takes_any = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
    for name in spec.inputs:
        if name not in named and not takes_any:
            yield Issue(
                f"{called} takes no input `{name}`",
                where=manifest.where("models", spec.name, "inputs", name),
                expected=", ".join(named),
                actual=name,
                hint=_input_hint(name, named, parameters),
            )
    # A mistyped name is one mistake: the parameter that it stands for is not missing too.
    meant = {nearest(name, sorted(named)) for name in spec.inputs if name not in named and not takes_any}
    for name, item in named.items():
        if item.default is inspect.Parameter.empty and name not in spec.inputs and name not in meant:
            hint = f"add `{name}: {{shape: […]}}` to the inputs"
            yield Issue(f"{called} needs `{name}`, and no input has that name", where=inputs, hint=hint)


def _input_hint(name: str, named: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> str:
    if name in parameters:
        return f"`*{name}` cannot be given by name; write a forward with a parameter for each input"
    return did_you_mean(name, named) if named else "it takes no inputs at all"


# -- errors in the user's code ----------------------------------------------------------------------------------------


def told(error: BaseException) -> str:
    """`TypeError: … (models.py:12)`: an exception with the innermost line of the user's own code."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    line = _user_line(error)
    return f"{text} ({line})" if line else text


def _user_line(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_file(frame.filename)]
    return f"{_shown(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _is_user_file(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_AOTC_FOLDER):
        return False
    return not path.is_relative_to(Path(sysconfig.get_path("stdlib")).resolve())


def _shown(filename: str) -> str:
    """A file's path, relative to the working folder if it lies within."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def enter_by(module: nn.Module, method: str) -> None:
    """Make calls of the module, or of a copy of it, run that method of its class. While it runs, the module has its own
    forward, which the method may call. Raises ManifestError where the class has no such method."""
    cls = type(module)
    own = getattr(cls, method, None)
    if not callable(own):
        names = [name for name in dir(cls) if not name.startswith("_") and name not in vars(nn.Module)]
        methods = [name for name in names if callable(getattr(cls, name, None))]
        raise ManifestError(f"{cls.__name__} has no method `{method}`", hint=did_you_mean(method, methods))

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        standing = vars(self).pop("forward")
        try:
            return own(self, *args, **kwargs)
        finally:
            vars(self)["forward"] = standing

    # `aotc.reads` knows it by this: it is not a forward that the module was given.
    forward.is_entry_point = True  # type: ignore[attr-defined]
    vars(module)["forward"] = MethodType(forward, module)
