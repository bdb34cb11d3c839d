"""Models of pytorch_tests.py: what PyTorch's own tests export, with the inputs that they hand over.

A source is `exportdb` (`torch._export.db`), `hop_db` (`torch.testing._internal.hop_db`), both in torch's wheel, or the
path of a test file. The tests of a file are run, and taken from them is what they give to `check_model`,
`check_model_with_multiple_inputs`, `torch.export.export`, and to what `torch.compile` returns, which runs in eager. An
export ends a test.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import itertools
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.tools.recording.seen_calls import SeenTensor, bound_arguments, inputs_of_calls, kind_in, look_at
from tests.benchmarks.op_db_models import do_without_expecttest

Call = tuple[tuple[Any, ...], dict[str, Any]]
IN_THE_WHEEL = ("exportdb", "hop_db")
MOST_SIZES = 4
"""A range goes to so many times the size of the test."""


class Case(NamedTuple):
    """A model, the calls of a test, and `dynamic_shapes` as `torch.export.export` takes them."""

    module: nn.Module
    calls: list[Call]
    dynamic_shapes: Any = None


def names_of(source: str, device: str) -> list[str]:
    """The names of a source's cases."""
    return [name for name, _ in _cases(source, None, device)]


def case_of(source: str, name: str, device: str) -> Case:
    """The same at each call, with weights and inputs of seed 0, on a device."""
    test = name.rpartition("#")[0]
    case = next(case for each, case in _cases(source, test, device) if each == name)
    calls = [pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), call) for call in case.calls]
    return case._replace(module=case.module.to(device), calls=calls)


def module_of(source: str, name: str, device: str) -> nn.Module:
    """The factory of the manifest."""
    return case_of(source, name, device).module


def _cases(source: str, test: str | None, device: str) -> Iterator[tuple[str, Case]]:
    """Those of all tests, or of one, by `TEST#N`."""
    do_without_expecttest()
    _seed()  # `exportdb` draws tensors when it is imported
    in_the_wheel = {"exportdb": _exportdb, "hop_db": functools.partial(_hop_db, device)}
    tests = in_the_wheel.get(source, functools.partial(_of_file, Path(source), device))()
    for name, cases in tests.items():
        if test in (None, name):
            _seed()
            yield from ((f"{name}#{number}", case) for number, case in enumerate(cases()))


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


# -- sources ----------------------------------------------------------------------------------------------------------

Tests = dict[str, Callable[[], list[Case]]]


def _exportdb() -> Tests:
    from torch._export.db.examples import all_examples

    def case_of(example: Any) -> list[Case]:
        more = [] if example.extra_args is None else [(example.extra_args, {})]
        calls = [(example.example_args, example.example_kwargs), *more]
        return [Case(example.model, calls, example.dynamic_shapes)]

    return {name: functools.partial(case_of, example) for name, example in all_examples().items()}


def _hop_db(device: str) -> Tests:
    from torch.testing._internal.hop_db import hop_db

    def cases(operator: Any) -> list[Case]:
        sample = next(iter(operator.sample_inputs(device, torch.float32, False)))
        leaves, tree = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tests = [isinstance(leaf, Tensor) for leaf in leaves]
        return [Case(Called(operator.op, tests, others, tree), [((tensors,), {})])]

    return {each.full_name: functools.partial(cases, each) for each in hop_db}


class Called(nn.Module):
    """A function, called with these tensors among other arguments."""

    def __init__(self, function: Callable[..., Any], are_tensors: list[bool], others: list[Any], tree: Any) -> None:
        super().__init__()
        self.function, self.are_tensors, self.others, self.tree = function, are_tensors, others, tree

    def forward(self, tensors: list[Tensor]) -> Any:
        given = iter(tensors)
        pairs = zip(self.are_tensors, self.others, strict=True)
        args, kwargs = pytree.tree_unflatten(
            [next(given) if is_tensor else other for is_tensor, other in pairs], self.tree
        )
        return self.function(*args, **kwargs)


# -- the tests of a file ----------------------------------------------------------------------------------------------


class Exported(BaseException):
    """Ends a test that has exported a module, which goes on with what was exported."""


class Handed:
    """What the test that runs has handed over."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        instead = {
            "torch.export.export": self.export,
            "torch._export.aot_compile": self.export,
            "torch.compile": self.compile,
            "torch.library.Library._destroy": lambda library: None,  # a model may call operators of its test
            "torch.testing._internal.triton_utils.requires_gpu": lambda test: test,
        }
        with contextlib.ExitStack() as stack:
            for name, function in instead.items():
                stack.enter_context(mock.patch(name, function))
            yield

    def over(self, module: Any, calls: list[Call], dynamic_shapes: Any = None) -> None:
        if isinstance(module, nn.Module):
            self.cases.append(Case(module, [*map(_copied, calls)], dynamic_shapes))

    def check_model(self, model: Any, example_inputs: Any, *_: Any, dynamic_shapes: Any = None, **__: Any) -> None:
        self.over(model, [(example_inputs, {})], dynamic_shapes)

    def check_many(self, model: Any, inputs: Any, *_: Any, dynamic_shapes: Any = None, **__: Any) -> None:
        self.over(model, [(each, {}) for each in inputs], dynamic_shapes)

    def export(self, module: Any, args: Any = (), kwargs: Any = None, *, dynamic_shapes: Any = None, **_: Any) -> None:
        self.over(module, [(args, kwargs or {})], dynamic_shapes)
        raise Exported

    def compile(self, model: Any = None, **options: Any) -> Any:
        """`torch.compile`: what it gives runs in eager, and its calls are those of one case."""
        if model is None:
            return self.compile
        case = Case(model, [])

        def call(*args: Any, **kwargs: Any) -> Any:
            if isinstance(model, nn.Module):
                if not case.calls:
                    self.cases.append(case)
                case.calls.append(_copied((args, kwargs)))
            return model(*args, **kwargs)

        return call


def _copied(call: Call) -> Call:
    def copied(value: Any) -> Any:
        return value.detach().clone() if type(value) is Tensor else value

    args, kwargs = pytree.tree_map(copied, (call[0], call[1]))
    return tuple(args), dict(kwargs)


@functools.cache
def _of_file(path: Path, device: str) -> Tests:
    handed = Handed()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
        sys.meta_path.append(Neighbours())
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    with handed.taking():
        spec.loader.exec_module(module)
    tests: Tests = {}
    for own in list(vars(module).values()):
        if inspect.isclass(own) and own.__module__ == path.stem and any(key.startswith("test") for key in vars(own)):
            tests |= _tests_of(own, handed, device)
    return tests


class Neighbours(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for files beside a test file that the folder lacks: what they have is a mock."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.startswith("test_") else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = types.ModuleType(spec.name)
        made.__getattr__ = lambda name: mock.MagicMock(name=name)  # type: ignore[method-assign]
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _tests_of(own: type, handed: Handed, device: str) -> Tests:
    """The tests of a class, or of a template of classes, on a device."""
    from torch.testing._internal.common_utils import instantiate_parametrized_tests

    members = {
        "device": device,
        "device_type": device,
        "use_minimal_arrayref_interface": False,
        "check_model": staticmethod(handed.check_model),
        "check_model_with_multiple_inputs": staticmethod(handed.check_many),
        "code_check_count": lambda self, *_, **__: None,
    }
    if issubclass(own, unittest.TestCase):
        made = type(own.__name__, (own,), members)
    else:  # a template: the file gives its tests to other classes
        tests_of_own = {name: value for name, value in vars(own).items() if name.startswith("test")}
        made = type(own.__name__, (own, unittest.TestCase), {**tests_of_own, **members})
        instantiate_parametrized_tests(made)

    def run(name: str) -> list[Case]:
        handed.cases = []
        with handed.taking(), contextlib.suppress(Exception, Exported):  # of what comes after
            getattr(made(name), name)()
        return handed.cases

    tests = [name for name in dir(made) if name.startswith("test") and callable(getattr(made, name))]
    return {f"{own.__name__}.{name}": functools.partial(run, name) for name in tests}


# -- as a model of a manifest -----------------------------------------------------------------------------------------


def entry(source: str, name: str, device: str) -> dict[str, Any]:
    """The case as a model of a manifest, as `aotc.record` writes it, with the dims that the test names.

    Raises ManifestError for arguments that a manifest cannot hold.
    """
    case = case_of(source, name, device)
    given = [bound_arguments(case.module, *call) for call in case.calls]
    seen = [{key: look_at(value, key) for key, value in each.items()} for each in given]
    if case.dynamic_shapes is None:
        inputs, buckets, _ = inputs_of_calls([each for each in seen if kind_in(each, {}) == kind_in(seen[0], {})])
    else:
        dims = Dims()
        shapes = _by_name(case, seen[0])
        inputs = {key: dims.form(value, shapes.get(key)) for key, value in seen[0].items()}
        buckets = [dims.bucket]
    return {
        "factory": f"{__name__}:module_of",
        "kwargs": {"source": source, "name": name, "device": device},
        "targets": ["native" if device == "cpu" else device],
        "inputs": inputs,
        "buckets": buckets,
        "mode": "default",
    }


def _by_name(case: Case, seen: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(case.dynamic_shapes, Mapping):
        return case.dynamic_shapes
    return dict(zip(seen, case.dynamic_shapes, strict=False))


class Dims:
    """The dims of a test, as a bucket; those without a name have one by their size."""

    def __init__(self) -> None:
        self.bucket: dict[str, Any] = {}

    def form(self, seen: Any, shape: Any) -> Any:
        if isinstance(seen, SeenTensor):
            axes = dict(enumerate(shape)) if isinstance(shape, list | tuple) else shape or {}
            form = seen.form([self._size(size, axes.get(axis)) for axis, size in enumerate(seen.shape)])
            return {**form, "init": {"constant": seen.low}} if seen.low and seen.low == seen.high else form
        if isinstance(seen, Mapping):
            return {key: self.form(value, (shape or {}).get(key)) for key, value in seen.items()}
        if isinstance(seen, list):
            return [self.form(value, of) for value, of in itertools.zip_longest(seen, shape or [])]
        return seen

    def _size(self, size: int, dim: Any) -> int | str:
        if dim is None or isinstance(dim, int) or getattr(dim, "type", None) == torch.export.Dim.STATIC.type:
            return size
        if not isinstance(dim, torch.export.Dim):  # Dim.AUTO or Dim.DYNAMIC: by its size
            self._add(f"n{size}", size, 0, size * MOST_SIZES)
            return f"n{size}"
        if root := getattr(dim, "root", None):  # an expression
            self._add(root.__name__, next(n for n in range(size + 1) if dim.fn(n) == size), root.min, root.max)
        else:
            self._add(dim.__name__, size, dim.min, dim.max)
        return dim.__name__

    def _add(self, name: str, size: int, low: Any, high: Any) -> None:
        least, most = max(int(low), min(size, 2)), int(min(high, size * MOST_SIZES))
        self.bucket[name] = {"range": [least, most], "tune_at": size} if least < most else size
