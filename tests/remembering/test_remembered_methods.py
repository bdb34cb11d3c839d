"""`aotc.compile` of a method, and as a decorator."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from remembered_nets import Coder, Net
from torch import nn

import aotc

X = torch.ones(2, 8)


@pytest.mark.compile
def test_a_method_and_a_decorated_forward_are_compiled_in_the_second_run(program: Any) -> None:
    code = (
        "net = Coder().eval()\n"
        "own = net.encode\n"
        "net.encode = aotc.compile(net.encode, build='exit')\n"
        "decorated = Decorated().eval()\n"
        "x, right = torch.randn(2, 8), True\n"
        "with torch.no_grad():\n"
        "    for _ in range(2):\n"
        "        right &= torch.allclose(net.encode(x, 2.0), own(x, 2.0), atol=1e-6)\n"
        "        right &= torch.allclose(net(x), own(x, 1.0).tanh(), atol=1e-6)\n"
        "        right &= torch.allclose(decorated(x), x * 3, atol=1e-6)\n"
        "methods = (net.encode, decorated.forward)\n"
        "stats = [call.stats().calls for each in methods for call in each._remembering._compiled]\n"
        "other = Decorated(factor=4).eval()\n"
        "with torch.no_grad(): right &= torch.equal(other(x), x * 4)\n"
        "tell(net.encode, right=right, stats=stats, of_decorated=decorated.forward.explain().models)"
    )
    first = program.run(code)
    assert (first["right"], first["stats"]) == (True, [])
    second = program.run(code)
    name = second["name"]
    assert (second["right"], second["notes"], second["compilers"]) == (True, [], [])
    assert second["models"] == [name, f"{name}-2"]
    assert len(second["of_decorated"]) == 1
    assert second["stats"] == [2, 2, 2]
    assert program.memory(name)["asked"]["method"] == "encode"


def test_a_method_s_place_is_the_module_s_and_a_copy_has_its_own(tmp_path: Path) -> None:
    net = Coder().eval()
    net.encode = aotc.compile(net.encode, store=tmp_path, build="never")  # type: ignore[method-assign]
    assert list(net.state_dict()) == list(Coder().state_dict())
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert copied.encode.__self__ is copied
        assert torch.equal(copied.encode(X, 2.0), net.encode(X, 2.0))
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
    assert copy.deepcopy(one).forward.__func__ is Own.forward
    assert "forward" not in vars(Further(2.0))
    assert torch.equal(Further(2.0)(X), X * 2 + 1)


def test_what_a_build_would_not_find_is_refused_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def local(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    class Cell(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    for function in (lambda x: x, local, len, Cell.forward, 3):
        with pytest.raises(aotc.BindError, match=r"is not a module.*\n.*decorate a method in its class"):
            aotc.compile(function, store=tmp_path)
    net = Coder()
    net.shorter = local.__get__(net)
    with pytest.raises(aotc.BindError, match="local is not a method of the class Coder"):
        aotc.compile(net.shorter, store=tmp_path)
    monkeypatch.setenv("AOTC_COMPILE", "off")
    assert aotc.compile(Net.forward) is Net.forward
    assert aotc.compile(mode="default")(Net.forward) is Net.forward
