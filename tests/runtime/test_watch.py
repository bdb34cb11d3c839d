"""What is set in a module after the load, and what of that a call notices. Eager's result would be another one."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import sys
from array import array
from collections import ChainMap, UserDict
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hand_built import CPU, FakeLibrary, attach_fakes, make_artifact, tensor
from torch import nn

from aotc.digest import canonical_json, sha256_json
from aotc.errors import BindError, MissError
from aotc.reads.attributes import module_attributes, read_attributes
from aotc.reads.module_check import check_module, watch_module
from aotc.reads.sources import source_digests
from aotc.reads.watch import ModuleWatch
from aotc.records import Artifact, File, ModuleGuard, Reads
from aotc.runtime.call import BoundModule, CompiledCall
from aotc.runtime.state.binding import bind_state

X = torch.ones(1)


@dataclasses.dataclass
class Config:
    act: str = "relu"

    def __post_init__(self) -> None:
        self._kernel = "fast"


class State:
    def __init__(self) -> None:
        self.active, self.unread = "a", 1


class Layer(nn.Module):
    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._active, self.scaling, self.gain, self.unread = ["a"], {"a": 1.0}, 2.0, 0
        self._merged: list[str] = []
        self.options = SimpleNamespace(eps=1.0)
        self.config, self.states = Config(), {"one": [State()]}
        self.drop = nn.Dropout(0.5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()


READS = (
    *(f"Layer.{name}" for name in ("_active", "_merged", "gain", "scaling", "shared", "config", "states", "options")),
    *("Config._kernel", "Config.act", "State.active", "Dropout.p", "Dropout.training"),
)


def built(module: nn.Module) -> tuple[Artifact, Callable[[File], bytes]]:
    """An artifact of it, whose capture read all of READS, and the function that reads its files."""
    files = {"attributes.json": module_attributes(module), "reads.json": Reads(read_attributes(module, READS))}
    first, second = (File(name, sha256_json(value), 1, "", 0) for name, value in files.items())
    sources = source_digests(module)
    guard = ModuleGuard(type(module).__qualname__, module.training, sources, first.digest, first)
    artifact = make_artifact([tensor("x", 1)], module=guard)
    variant = msgspec.structs.replace(artifact.variants[0], reads=READS, read_values=second)
    artifact = msgspec.structs.replace(artifact, variants=(variant,))
    return artifact, lambda file: canonical_json(files[file.name])


def loaded(module: nn.Module) -> CompiledCall:
    artifact, read_file = built(Model().eval())
    check_module(artifact, module, (), read_file)
    bound = BoundModule(
        module,
        bind_state(artifact, module, CPU),
        watch_module(artifact, module, (), read_file),
        check_again=lambda: check_module(artifact, module, (), read_file),
    )
    return CompiledCall(artifact, [FakeLibrary(lambda x: x)], bound, CPU, "error")


def hooked(*_: Any) -> None:
    pass


CHANGES: list[tuple[str, Callable[[Any], object], Callable[[Any], object]]] = [
    ("layer._active", lambda m: setattr(m.layer, "_active", ["b"]), lambda m: setattr(m.layer, "_active", ["a"])),
    ("layer._active", lambda m: m.layer._active.append("b"), lambda m: m.layer._active.pop()),
    ("layer._merged", lambda m: m.layer._merged.append("a"), lambda m: m.layer._merged.clear()),
    ("layer.scaling", lambda m: m.layer.scaling.update(a=2.0), lambda m: m.layer.scaling.update(a=1.0)),
    (
        "layer.scaling",
        lambda m: m.layer.scaling.update(a=torch.ones(2)),
        lambda m: m.layer.scaling.update(a=1.0),
    ),
    ("layer.gain", lambda m: setattr(m.layer, "gain", 3.0), lambda m: setattr(m.layer, "gain", 2.0)),
    ("layer.gain", lambda m: setattr(m.layer, "gain", torch.ones(2)), lambda m: setattr(m.layer, "gain", 2.0)),
    ("layer.shared", lambda m: setattr(m.layer, "shared", 2.0), lambda m: delattr(m.layer, "shared")),
    ("layer.config.act", lambda m: setattr(m.layer.config, "act", "b"), lambda m: setattr(m.layer, "config", Config())),
    (
        "layer.config._kernel",
        lambda m: setattr(m.layer.config, "_kernel", "slow"),
        lambda m: setattr(m.layer.config, "_kernel", "fast"),
    ),
    (
        "layer.states.one.0.active",
        lambda m: setattr(m.layer.states["one"][0], "active", "b"),
        lambda m: m.layer.states.update(one=[State()]),
    ),
    (
        "layer.options",
        lambda m: setattr(m.layer.options, "eps", 2.0),
        lambda m: setattr(m.layer, "options", SimpleNamespace(eps=1.0)),
    ),
    ("layer.drop.p", lambda m: setattr(m.layer.drop, "p", 0.1), lambda m: setattr(m.layer.drop, "p", 0.5)),
    (
        "layer.drop.forward",
        lambda m: setattr(m.layer.drop, "forward", MethodType(lambda self, x: 2 * x, m.layer.drop)),
        lambda m: delattr(m.layer.drop, "forward"),
    ),
    ("layer.drop", lambda m: m.layer.drop.register_forward_hook(hooked), lambda m: m.layer.drop._forward_hooks.clear()),
    ("layer", lambda m: m.layer.register_forward_pre_hook(hooked), lambda m: m.layer._forward_pre_hooks.clear()),
    ("hooks", lambda m: m.register_forward_hook(hooked), lambda m: m._forward_hooks.clear()),
    (
        "all modules",
        lambda m: nn.modules.module.register_module_forward_hook(hooked),
        lambda m: nn.modules.module._global_forward_hooks.clear(),
    ),
]


@pytest.mark.parametrize(("where", "change", "undo"), CHANGES, ids=[f"{n} {c[0]}" for n, c in enumerate(CHANGES)])
def test_a_change_is_refused_before_and_after_the_load_until_it_is_undone(where: str, change: Any, undo: Any) -> None:
    module: Any = Model().eval()
    compiled = loaded(module)
    assert compiled(X) is X
    change(module)
    try:
        for action in (lambda: compiled(X), compiled.refresh):
            with pytest.raises(BindError) as caught:
                action()
            assert where in str(caught.value)
        other: Any = Model().eval()
        if where not in ("all modules", "layer.shared"):  # of which the one is there now, and the other is set by value
            change(other)
        elif where == "layer.shared":
            other.layer.shared = 2.0
        with pytest.raises(BindError):
            loaded(other)
    finally:
        undo(module)
    assert compiled(X) is X
    compiled.refresh()
    change(module)
    try:
        with pytest.raises(BindError):
            compiled(X)
    finally:
        undo(module)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.layer, "unread", 1),
        lambda m: setattr(m.layer, "_unread", 1),
        lambda m: setattr(m.layer.states["one"][0], "unread", 2),
        lambda m: setattr(m.layer, "scaling", {"a": 1.0}),
        lambda m: setattr(m.layer, "config", Config()),
        lambda m: setattr(m.layer, "gain", float("2.0")),
        lambda m: m.eval(),
    ],
)
def test_what_was_not_read_or_is_equal_changes_nothing(change: Any) -> None:
    module = Model().eval()
    compiled = loaded(module)
    change(module)
    assert compiled(X) is X
    module.layer.scaling["a"] = 5.0  # also in what was put in a dict's place
    with pytest.raises(BindError, match="scaling"):
        compiled(X)


def test_the_training_flag_of_a_submodule_is_a_miss_as_the_modules_own() -> None:
    module = Model().eval()
    compiled = loaded(module)
    module.layer.drop.train()
    with pytest.raises(MissError, match=r"module\.layer\.drop: its training flag was False at the load"):
        compiled(X)
    module.eval()
    assert compiled(X) is X
    module.layer.train()
    module.layer.drop.eval()  # the only one that was read
    assert compiled(X) is X


def test_another_hook_in_the_place_of_one_is_refused_as_well() -> None:
    artifact = make_artifact([tensor("x", 1)])
    module = Model().eval()
    first = module.layer.register_forward_hook(hooked)
    watch = ModuleWatch(module, artifact.reads, {}, "model")
    watch.check()
    first.remove()
    module.layer.register_forward_hook(lambda *_: None)
    with pytest.raises(BindError, match="layer: 1 hooks at the load, 1 now"):
        watch.check()


def test_refresh_goes_on_with_equal_submodules_in_the_place_of_others() -> None:
    module = Model().eval()
    compiled = loaded(module)
    module.layer = Layer().eval()
    compiled.refresh()
    assert compiled(X) is X
    module.layer.gain = 3.0
    with pytest.raises(BindError, match=r"layer\.gain"):
        compiled(X)


def test_an_artifact_without_reads_and_a_module_that_was_not_checked_are_served_as_they_are() -> None:
    module = Model().eval()
    compiled = attach_fakes(make_artifact([tensor("x", 1)]), lambda x: x, module=module)
    module.layer.gain = 3.0
    assert compiled(X) is X


class Slotted:
    __slots__ = ("amount",)

    def __init__(self) -> None:
        self.amount = 1.0


class Doubling:
    def __init__(self, value: float) -> None:
        self.value = value

    def __get__(self, owner: Any, cls: type) -> float:
        return self.value * 2


class Adder:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Subtracter(Adder):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1


class Negated(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return -super().__torch_function__(function, types, args, kwargs)


def closed_over(factor: float, by: float = 2.0) -> Callable[[float], float]:
    def scale(x: float, *, by: float = by) -> float:
        return x * by * factor

    return scale


class Holder(nn.Module):
    doubled = Doubling(0.5)

    def __init__(self) -> None:
        super().__init__()
        self.function, self.partly = closed_over(2.0), functools.partial(closed_over(3.0), 1.0)
        self.unregistered, self.nested = [nn.LeakyReLU(0.5)], ({"a": nn.Linear(1, 1)},)
        self.slotted, self.adder, self.array = Slotted(), Adder(), np.array([1.0, 2.0])
        self.chain, self.user, self.numbers = ChainMap({"a": 1.0}), UserDict(a=1.0), array("d", [1.0])
        self.by_default = collections.defaultdict(float, a=1.0)
        self.none, self.half = None, 0.5
        self.layers = nn.Sequential(nn.Tanh(), nn.ReLU())
        self.register_buffer("shift", torch.ones(1))
        nn.init.constant_(self.nested[0]["a"].weight, 1.0)
        nn.init.constant_(self.nested[0]["a"].bias, 0.0)


def assigned(path: str, value: Any) -> Callable[[Holder], None]:
    owner, _, name = path.rpartition(".")
    return lambda module: setattr(operator.attrgetter(owner)(module) if owner else module, name, value)


OTHERS: dict[str, Callable[[Holder], object]] = {
    "a closure": lambda module: setattr(module.function.__closure__[0], "cell_contents", 4.0),
    "defaults": lambda module: module.function.__kwdefaults__.update(by=3.0),
    "a partial function's defaults": lambda module: module.partly.func.__kwdefaults__.update(by=3.0),
    "a module in a list": lambda module: module.unregistered.__setitem__(0, nn.Tanh()),
    "its attribute": lambda module: setattr(module.unregistered[0], "negative_slope", 0.25),
    "a weight in a dict in a tuple": lambda module: nn.init.constant_(module.nested[0]["a"].weight, 7.0),
    "an attribute deleted": lambda module: delattr(module, "unregistered"),
    "None deleted": lambda module: delattr(module, "none"),
    "a slot": assigned("slotted.amount", 2.0),
    "a class of an object": assigned("adder.__class__", Subtracter),
    "an array": lambda module: module.array.fill(3.0),
    "a chain of maps": lambda module: module.chain.maps[0].update(a=2.0),
    "a user's dict": lambda module: module.user.update(a=2.0),
    "an array of Python's": lambda module: module.numbers.append(2.0),
    "what a dict gives by default": assigned("by_default", collections.defaultdict(int, a=1.0)),
    "an attribute in a method's place": assigned("half", 0.25),
    "the order of parts": lambda module: module.layers._modules.update({"0": module.layers._modules.pop("0")}),
    "parts that torch's own methods exchange": lambda module: module.layers.insert(0, module.layers.pop(1)),
    "what it asks for in vain": assigned("extra", 1.0),
    "what it asks an object for in vain": assigned("adder.extra", 1.0),
    "an attribute of a class's descriptor": lambda module: setattr(vars(Holder)["doubled"], "value", 4.0),
    "a class of tensors": assigned("shift", torch.ones(1).as_subclass(Negated)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_code_reads_is_noticed_by_the_load_and_by_the_call(what: str) -> None:
    """Each changes what eager computes with it."""
    vars(Holder)["doubled"].value = 0.5
    module = Holder().eval()
    names = [
        "Slotted.amount",
        "Holder.extra",
        "Adder.extra",
        *(f"Holder.{name}" for name in (*vars(module), "doubled") if not name.startswith("_")),
    ]
    watch = ModuleWatch(module, names, {}, "model")
    watch.check()
    before = canonical_json([module_attributes(module), read_attributes(module, names)])
    assert before == canonical_json([module_attributes(again := Holder().eval()), read_attributes(again, names)])
    OTHERS[what](module)
    with pytest.raises(BindError, match="no longer as it was at the load"):
        watch.check()
    assert canonical_json([module_attributes(module), read_attributes(module, names)]) != before


class CacheLayer:
    def __init__(self) -> None:
        self.keys, self.scale = torch.zeros(2), torch.ones(2)


class Caching(nn.Module):
    """As transformers exports a decoder: the cache's tensors are buffers, too."""

    keys: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = [CacheLayer()]
        self.register_buffer("keys", self.layers[0].keys, persistent=False)


def test_a_buffer_that_an_object_holds_too_may_be_written_to() -> None:
    """Each call gives it to the code. What is not a buffer may not, nor may the object hold another tensor."""
    module = Caching()
    watch = ModuleWatch(module, ["Caching.layers", "CacheLayer.keys", "CacheLayer.scale"], {}, "model")
    seen = watch._seen
    module.keys.add_(1)
    watch.check()
    assert watch._seen is seen, "nothing differs, so nothing is recorded anew"
    module.layers[0].scale.add_(1)
    with pytest.raises(BindError, match=r"layers\.0\.scale"):
        watch.check()
    watch.refresh()
    module.layers[0].keys = torch.zeros(2)
    with pytest.raises(BindError, match=r"layers\.0\.keys"):
        watch.check()


class Registry(dict[str, float]):
    def get(self, name: str, default: float = 1.0) -> float:  # type: ignore[override]
        return super().get(name, default)


REGISTRY = Registry()


def test_a_method_of_a_dict_is_no_entry_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ModuleWatch(Holder(), (), {f"{__name__}:REGISTRY.get": None}, "model")
    seen = watch._seen
    watch.check()
    assert watch._seen is seen, "nothing differs, so nothing is recorded anew"
    monkeypatch.setattr(Registry, "get", lambda self, name: 3.0)
    with pytest.raises(BindError, match="no longer as it was at the load"):
        watch.check()


class ByText(dict[str, Any]):
    """Its `copy.copy` has other keys, as that of transformers' registry of what can be recorded."""

    def __setitem__(self, key: object, value: Any) -> None:
        super().__setitem__(f"text of {key}", value)


KEYED = ByText()
KEYED["a"] = 1.0


def test_a_dict_that_is_not_equal_to_its_copy_is_not_looked_at_anew_in_each_call() -> None:
    watch = ModuleWatch(Holder(), (), {f"{__name__}:KEYED": None}, "model")
    seen = watch._seen
    watch.check()
    assert watch._seen is seen
    KEYED["b"] = 2.0
    with pytest.raises(BindError, match="no longer as it was at the load"):
        watch.check()


LATER = {"imported_later:LIMIT": 4, "imported_later:UNKNOWN": ["absent"]}


@pytest.mark.parametrize("limit", [4, 5])
def test_a_name_that_is_imported_after_the_load_is_compared_with_the_build(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Holder()
    watch = ModuleWatch(module, ["Holder.layers"], LATER, "model")
    watch.check()
    monkeypatch.setitem(sys.modules, "imported_later", SimpleNamespace(LIMIT=limit))
    if limit == 5:
        with pytest.raises(
            BindError, match="imported_later:LIMIT: imported after the load, as 5; at the build it was 4"
        ):
            watch.check()
        return
    seen = watch._seen
    watch.check()
    assert watch._seen is not seen, "what was imported is looked at from now on"
    sys.modules["imported_later"].LIMIT = 5
    with pytest.raises(BindError, match="imported_later:LIMIT: 4 at the load, 5 now"):
        watch.check()


def test_a_name_that_was_imported_later_is_not_blamed_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Holder()
    watch = ModuleWatch(module, ["Holder.layers"], LATER, "model")
    monkeypatch.setitem(sys.modules, "imported_later", SimpleNamespace(LIMIT=4))
    module.layers = nn.ModuleList([nn.Linear(1, 1)])
    with pytest.raises(BindError) as caught:
        watch.check()
    assert caught.value.issues and not any("imported_later" in issue.where for issue in caught.value.issues)


def wrapped(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return type(part).forward(part, x)


def test_a_forward_may_hold_the_part_whose_it_is() -> None:
    """As accelerate's hooks have it."""
    module = Holder().eval()
    part = module.layers[0]
    part.forward = functools.partial(wrapped, part)
    before = canonical_json(module_attributes(module))
    watch = ModuleWatch(module, (), {}, "model")
    watch.check()
    part.forward = functools.partial(wrapped, module.layers[1])
    with pytest.raises(BindError, match=r"layers\.0\.forward"):
        watch.check()
    assert canonical_json(module_attributes(module)) != before
