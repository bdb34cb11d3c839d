"""`aotc.compile` of a method, of a function that takes its module, and as a decorator."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from remembered_nets import Coder, Net
from torch import nn

import aotc
from aotc.tools.remembering.methods import RememberedMethod

X = torch.ones(2, 8)

ABOVE = """
import copy
from torch import nn

SHIFT = 1.0

class Own(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x)

@aotc.compile(build="exit")
def scored(model, x, factor: float = 2.0):
    return model(x).sum(-1) * factor + SHIFT

@aotc.compile(regions=["blocks.*"], train=True, build="exit")
def doubled(model, x):
    return model(x) * 2

def methods():
    net = Coder().eval()
    own = net.encode
    net.encode = aotc.compile(net.encode, build="exit")
    decorated = Decorated().eval()
    x, right = torch.randn(2, 8), True
    with torch.no_grad():
        for _ in range(2):
            right &= torch.allclose(net.encode(x, 2.0), own(x, 2.0), atol=1e-6)
            right &= torch.allclose(net(x), own(x, 1.0).tanh(), atol=1e-6)
            right &= torch.allclose(decorated(x), x * 3, atol=1e-6)
    each_of = (net.encode._remembering, decorated.forward._remembering)
    stats = [call.stats().calls for each in each_of for call in each.known.compiled]
    other = Decorated(factor=4).eval()
    with torch.no_grad():
        right &= torch.equal(other(x), x * 4)
    told = net.encode.explain()
    loaded = [told.models, decorated.forward.explain().models]
    return {"right": right, "ran": stats, "name": told.name, "loaded": loaded, "notes": told.notes}

def functions():
    global SHIFT
    own, coder = Own().eval(), Coder().eval()
    x, right = torch.randn(2, 8), True
    with torch.no_grad():
        for net in (own, coder, own, coder):
            right &= torch.allclose(scored(net, x), net(x).sum(-1) * 2 + 1, atol=1e-6)
        right &= torch.allclose(scored(x=x, factor=3.0, model=own), own(x).sum(-1) * 3 + 1, atol=1e-6)
        own.linear.bias += 1
        right &= torch.allclose(scored(own, x), own(x).sum(-1) * 2 + 1, atol=1e-6)
        states = [scored.explain(net) for net in (own, coder)]
        ran = [sum(each.stats().calls for each in scored._of(net).known.compiled) for net in (own, coder)]
        SHIFT = 5.0
        changed = torch.allclose(scored(own, x), own(x).sum(-1) * 2 + 5, atol=1e-6)
    return {"right": right, "ran": ran, "changed": changed, "names": [each.name for each in states],
            "loaded": [each.models for each in states], "notes": [each.notes for each in states]}

def blocks():
    net = Branches().train()
    eager, x = copy.deepcopy(net), torch.randn(2, 8)
    doubled(net, x).square().sum().backward()
    (eager(x) * 2).square().sum().backward()
    ours, theirs = (each.blocks[0].linear.weight.grad for each in (net, eager))
    regions = [each for code in doubled._of(net).training.known.regions for each in code.call.regions.values()]
    return {"right": torch.allclose(ours, theirs, rtol=1e-4), "ran": sum(each.stats().calls for each in regions),
            "notes": doubled.explain(net).notes}
"""
"""What `aotc.compile` compiles but whole modules: the three functions tell of two runs, the first of which builds."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, programs: Any) -> list[dict[str, Any]]:
    program = programs(tmp_path_factory.mktemp("methods"))
    program.above = ABOVE
    parts = "methods=methods(), functions=functions(), blocks=blocks()"
    told = [program.run(f"tell(aotc.compile(Net(), build='never'), {parts})") for _ in range(2)]
    return [{**each, "memory": program.memory} for each in told]


@pytest.mark.compile
def test_a_method_and_a_decorated_forward_are_compiled_in_the_second_run(runs: list[dict[str, Any]]) -> None:
    first, second = (each["methods"] for each in runs)
    assert (first["right"], first["ran"]) == (True, [])
    name = second["name"]
    assert (second["right"], second["notes"], runs[1]["compilers"]) == (True, [], [])
    assert second["loaded"][0] == [name, f"{name}-2"] and len(second["loaded"][1]) == 1
    assert second["ran"] == [2, 2, 2]
    assert runs[1]["memory"](name)["asked"]["method"] == "encode"


@pytest.mark.compile
def test_a_function_is_compiled_for_each_module_that_it_takes(runs: list[dict[str, Any]]) -> None:
    first, second = (each["functions"] for each in runs)
    assert (first["right"], first["ran"], first["changed"]) == (True, [0, 0], True)
    own, coder = second["names"]
    assert (second["right"], second["changed"], second["notes"]) == (True, True, [[], []])
    assert second["loaded"] == [[own, f"{own}-2"], [coder]]
    assert second["ran"] == [4, 2]
    assert own.startswith("scored-") and coder.startswith("scored-")


@pytest.mark.compile
def test_a_function_runs_the_blocks_of_its_module_where_it_cannot_be_captured_whole(runs: list[dict[str, Any]]) -> None:
    first, second = (each["blocks"] for each in runs)
    assert (first["right"], first["ran"]) == (True, 0)
    assert (second["right"], second["ran"], second["notes"]) == (True, 3, [])


def test_a_method_s_place_is_the_module_s_and_a_copy_has_its_own(tmp_path: Path) -> None:
    net = Coder().eval()
    net.encode = aotc.compile(net.encode, store=tmp_path, build="never")  # type: ignore[method-assign]
    assert list(net.state_dict()) == list(Coder().state_dict())
    copied, pickled = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    assert type(copied.encode) is RememberedMethod and copied.encode.module is copied
    assert pickled.encode.__self__ is pickled
    for each in (copied, pickled):
        assert torch.equal(each.encode(X, 2.0), net.encode(X, 2.0))
    again: Any = aotc.compile(net.encode, store=tmp_path, build="never")
    assert again.module is net
    assert again.__wrapped__.__func__ is Coder.encode
    of_result: Any = aotc.compile(
        aotc.compile(net, store=tmp_path, build="never").encode, store=tmp_path, build="never"
    )
    assert of_result.module is net


def test_a_decorated_method_has_a_memory_for_each_module(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    Own.forward.__qualname__ = "Own.forward"  # as of a class of a file
    aotc.compile(store=tmp_path, build="never")(Own.forward).__set_name__(Own, "forward")

    class Further(Own):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    one, two = Own(2.0), Own(3.0)
    assert torch.equal(one(X) + two(X), X * 5)
    assert [each.forward.module for each in (one, two)] == [one, two]
    copied = copy.deepcopy(one)
    assert copied.forward.module is copied and copied.forward.__wrapped__.__func__ is Own.forward
    assert "forward" not in vars(Further(2.0))
    assert torch.equal(Further(2.0)(X), X * 2 + 1)


def test_what_is_known_of_a_function_s_calls_lives_as_long_as_its_module(tmp_path: Path) -> None:
    compiled: Any = aotc.compile(shifted, store=tmp_path, build="never")
    assert (compiled.__name__, compiled.__doc__) == ("shifted", "Of a module.")
    net = Coder().eval()
    remembered = aotc.compile(net, store=tmp_path, build="never")
    for _ in range(2):
        assert torch.equal(compiled(net, X), net(X) + 1)
        assert torch.equal(compiled(x=X, net=remembered), net(X) + 1)
    assert compiled._of(remembered) is compiled._of(net) is not compiled._of(Coder())
    assert list(net.state_dict()) == list(Coder().state_dict())
    for copied in (copy.copy(net), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert compiled._of(copied) is not compiled._of(net)
        assert torch.equal(compiled(copied, X), net(X) + 1)
    assert compiled._of(net.train()).module.training is True
    gone = weakref.ref(net)
    del net, remembered, copied
    gc.collect()
    assert gone() is None


def test_a_function_without_its_module_runs_in_eager(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiled: Any = aotc.compile(shifted, store=tmp_path, build="never")
    assert torch.equal(compiled(torch.tanh, X), X.tanh() + 1)
    assert "shifted runs in eager: its first argument is builtin_function_or_method, no module" in caplog.text


def shifted(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Of a module."""
    y: torch.Tensor = net(x)
    return y + 1


def test_what_a_build_would_not_find_is_refused_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def local(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    class Cell(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    for function in (lambda x: x, local, len, Cell.forward, 3):
        with pytest.raises(aotc.BindError, match=r"is not a module.*\n.*a function of a file"):
            aotc.compile(function, store=tmp_path)
    net = Coder()
    net.shorter = local.__get__(net)
    with pytest.raises(aotc.BindError, match="local is not a method of the class Coder"):
        aotc.compile(net.shorter, store=tmp_path)
    with pytest.raises(aotc.BindError, match=r"another decorator stands above @aotc.compile of Coder.encode"):
        torch.no_grad()(aotc.compile(Coder.encode))(net, X)
    monkeypatch.setenv("AOTC_COMPILE", "off")
    assert aotc.compile(Net.forward) is Net.forward
    assert aotc.compile(mode="default")(Net.forward) is Net.forward


@torch.no_grad()
@aotc.compile(build="never")
def undisturbed(model, x):  # type: ignore[no-untyped-def]
    return model(x)


def test_a_decorator_above_a_compiled_function_keeps_what_it_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path))
    net = Coder().eval()
    assert torch.equal(undisturbed(net, X), net(X))
    assert undisturbed.stats(net).eager == 1
    assert undisturbed.explain(net).name.startswith("undisturbed-")
    assert undisturbed.wait(net) is False
