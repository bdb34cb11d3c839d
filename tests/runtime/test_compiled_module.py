"""The compiled module stands where the module stood: in a parent, a pipeline, for whoever asks it what it is."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hand_built import CPU, FakeLibrary, make_artifact, specs_of, tensor
from torch import Tensor, nn

from aotc.errors import BindError, MissError
from aotc.runtime.call import BoundModule, CompiledCall
from aotc.runtime.compiled import HOOKS, Compiled
from aotc.runtime.load import compiled_module
from aotc.runtime.state.binding import bind_state

X = torch.ones(2, 3)


class Base(nn.Module):
    scale = 1.0

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))  # type: ignore[no-any-return]


class Encoder(Base):
    """Adds 1 in eager, while the compiled code of these tests adds 10: what ran shows in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.inner = nn.Linear(3, 3)
        self.config = SimpleNamespace(hidden_size=3)

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def twice(self, x: Tensor) -> Tensor:
        self.used = True
        return super().twice(x)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return x + 1


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]


def compile_by_hand(module: nn.Module | None, on_miss: Any = "error", method: str = "") -> Any:
    names = ["weight"] if module is not None else []
    state = specs_of(module, names) if module is not None else ()
    artifact = make_artifact([tensor("x", 2, 3)], state=state, method=method)
    library = FakeLibrary(lambda x, *_: x + 10)
    bound = BoundModule(module, bind_state(artifact, module, CPU))
    return compiled_module(CompiledCall(artifact, [library], bound, CPU, on_miss))


@pytest.fixture
def parent() -> Parent:
    return Parent().eval().requires_grad_(False)


def test_a_child_is_replaced_and_no_name_changes(parent: Parent) -> None:
    names, parameters = list(parent.state_dict()), list(parent.named_parameters())
    paths = [path for path, _ in parent.named_modules()]
    parent.encoder = compile_by_hand(parent.encoder)
    assert torch.equal(parent(X), X + 10)
    assert list(parent.state_dict()) == names
    after = [(name, id(parameter)) for name, parameter in parent.named_parameters()]
    assert after == [(name, id(parameter)) for name, parameter in parameters]
    assert [path for path, _ in parent.named_modules()] == paths
    parent.load_state_dict(Parent().state_dict())
    assert torch.equal(parent(X), X + 10)


def test_it_is_one_of_the_models_class_and_has_its_attributes(parent: Parent) -> None:
    module = parent.encoder
    compiled = compile_by_hand(module)
    assert isinstance(compiled, Compiled) and isinstance(compiled, Encoder)
    assert (type(compiled).__name__, type(compiled).__module__) == ("Encoder", __name__)
    assert compiled.config is module.config and compiled.dtype is torch.float32 and compiled.scale == 1.0
    compiled.scale = 2.0
    module.name = "one"
    assert (module.scale, compiled.name) == (2.0, "one")
    assert compiled.module is module and type(compile_by_hand(module)) is type(compiled)


def test_methods_of_the_model_call_compiled_code(parent: Parent) -> None:
    assert torch.equal(compile_by_hand(parent.encoder).twice(X), X + 20) and parent.encoder.used


def test_a_method_that_changes_the_module_returns_what_it_was_called_on(parent: Parent) -> None:
    module = parent.encoder
    compiled = compile_by_hand(module)
    for method in (lambda: compiled.to("cpu"), compiled.eval, lambda: compiled.requires_grad_(True), compiled.train):
        assert method() is compiled
    assert module.training and module.inner.training and module.weight.requires_grad
    parent.encoder = compiled
    parent.requires_grad_(False).eval().half()
    assert not module.training and module.weight.dtype is torch.float16
    with pytest.raises(BindError, match="float16"):
        compiled(X)


def test_it_has_the_signature_of_the_models_forward(parent: Parent) -> None:
    compiled = compile_by_hand(parent.encoder)
    for shown in (compiled, compiled.forward, compiled.__call__):
        assert inspect.signature(shown) == inspect.signature(parent.encoder.forward)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_on_it_is_refused(parent: Parent, hook: str) -> None:
    with pytest.raises(BindError, match="hook"):
        getattr(compile_by_hand(parent.encoder), f"register_{hook}")(print)


ASSIGNED: list[Callable[[Any], Any]] = [lambda compiled: compiled, lambda compiled: compiled.forward]


@pytest.mark.parametrize("assigned", ASSIGNED, ids=["compiled", "compiled.forward"])
def test_it_stands_in_the_place_of_a_forward(parent: Parent, assigned: Callable[[Any], Any]) -> None:
    names, paths = list(parent.state_dict()), [path for path, _ in parent.named_modules()]
    compiled = compile_by_hand(parent.encoder, on_miss="eager")
    parent.encoder.forward = assigned(compiled)
    assert torch.equal(parent(X), X + 10) and torch.equal(parent.encoder(X), X + 10)
    assert (list(parent.state_dict()), [path for path, _ in parent.named_modules()]) == (names, paths)
    assert torch.equal(parent(X[:1]), X[:1] + 1), "a miss runs the forward of the class"
    assert inspect.signature(compiled) == inspect.signature(Encoder().forward)
    del parent.encoder.forward
    assert torch.equal(parent(X), X + 1)


def test_a_compiled_method_stands_in_the_place_of_the_method(parent: Parent) -> None:
    module = parent.encoder
    compiled = compile_by_hand(module, method="twice", on_miss="eager")
    parent.encoder = compiled
    assert torch.equal(parent.encoder.twice(X), X + 10)
    assert torch.equal(parent.encoder.twice(X[:1]), X[:1] + 2), "a miss runs the method, with the module's own forward"
    with pytest.raises(BindError, match=r"the method `twice`(.|\n)*compiled.twice"):
        parent(X)
    parent.encoder = module
    module.twice = compiled
    assert torch.equal(module.twice(X), X + 10) and torch.equal(parent(X), X + 1)
    assert list(parent.state_dict()) == list(Parent().state_dict())
    assert torch.equal(compile_by_hand(None, method="twice").twice(X), X + 10)


@pytest.mark.parametrize("forward", [print, compile_by_hand(None)], ids=["function", "compiled"])
def test_its_own_forward_cannot_be_replaced(parent: Parent, forward: Any) -> None:
    compiled = compile_by_hand(parent.encoder)
    with pytest.raises(BindError, match="cannot be replaced"):
        compiled.forward = forward
    assert torch.equal(compiled(X), X + 10)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_it_nor_its_parent_can_be_copied(parent: Parent, copied: Callable[[Any], Any]) -> None:
    compiled = compile_by_hand(parent.encoder)
    with pytest.raises(TypeError, match=r"neither copied nor pickled"):
        copied(compiled)
    if copied is not copy.copy:
        parent.encoder = compiled
        with pytest.raises(TypeError, match=r"neither copied nor pickled"):
            copied(parent)


def test_it_is_freed_without_the_garbage_collector(parent: Parent) -> None:
    compiled = compile_by_hand(parent.encoder)
    call = weakref.ref(compiled.forward)
    gc.disable()
    try:
        del compiled
        assert call() is None
    finally:
        gc.enable()


class Registry(type):
    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any]) -> Any:
        assert "key" in names, "every model is registered under its key"
        return super().__new__(cls, name, bases, names)


class Registered(Encoder, metaclass=Registry):
    key = "registered"

    def __init_subclass__(cls, *, key: str) -> None:
        raise AssertionError


class Slotted(Encoder):
    __slots__ = ("extra",)


@pytest.mark.parametrize("model", [Registered, Slotted, nn.Identity], ids=lambda model: model.__name__)
def test_what_the_models_class_does_for_subclasses_is_not_done(model: type[nn.Module]) -> None:
    module = model()
    module.weight = nn.Parameter(torch.ones(3), requires_grad=False)
    compiled = compile_by_hand(module.eval())
    assert torch.equal(compiled(X), X + 10) and compiled.weight is module.weight


def test_without_a_module_it_has_no_attributes_and_says_why() -> None:
    compiled = compile_by_hand(None)
    parent = nn.ModuleDict({"encoder": compiled})
    assert torch.equal(parent["encoder"](X), X + 10) and not parent.state_dict()
    assert parent.to("cpu").eval()["encoder"] is compiled and list(inspect.signature(compiled).parameters) == ["x"]
    with pytest.raises(AttributeError, match="loaded without a module"):
        _ = compiled.config
    for change, match in (
        (lambda: parent.half(), "float16"),
        (lambda: parent.to("meta"), "meta"),
        (parent.train, "eval"),
    ):
        with pytest.raises(BindError, match=match):
            change()
    with pytest.raises(MissError):
        compiled(X[:1])
