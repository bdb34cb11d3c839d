"""A seeded sample of `native_calls.py`, and what no random call shows: references, threads, forks, another Python."""

from __future__ import annotations

import ast
import gc
import importlib
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from fuzzing.native_calls import CLASSES, Both, build, natives, ran, untimed, usual_arguments
from fuzzing.native_models import Called, Pair
from processes import ROOT, finish, start
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import aotc
from aotc.runtime import native

STEPS = 1000


@pytest.fixture(scope="module")
def store(shared_folder: Path) -> Path:
    folder = shared_folder / "native-calls"
    with filelock.FileLock(shared_folder / "native-calls.lock"):
        if not (folder / "index.json").exists():
            folder.mkdir(exist_ok=True)
            build(folder)
    return folder


def inputs(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(batch, 4), torch.rand(batch, 2)


@pytest.mark.every_torch
def test_a_sample_gives_the_same_both_ways(store: Path) -> None:
    found = finish(start(ROOT / "tests" / "fuzzing" / "native_calls.py", STEPS, 7, "--store", store))
    assert found.returncode == 0, found.stdout + found.stderr
    counted = ast.literal_eval(found.stdout)
    assert counted["extension"] > STEPS / 4, counted
    assert counted["refused"] > STEPS / 4, counted
    assert 0 < counted["Python"] < STEPS / 20, counted


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in ("blocks", "trained")])
def test_the_extension_makes_each_call_from_the_first_on(store: Path, name: str) -> None:
    """Keywords, containers, result classes of libraries, writes, pads, operators of Python's, frozen weights: all."""
    both = Both(store, name)
    made = 0
    with torch.no_grad():
        for batch in (2, 5, 2, 5):
            args, kwargs = usual_arguments(name, batch)
            copies = [pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs)) for _ in both.calls]
            results = [call(*args, **kwargs) for call, (args, kwargs) in zip(both.calls, copies, strict=True)]
            assert type(results[0]) is type(results[1])
            leaves = [pytree.tree_leaves(result) for result in results]
            assert all(torch.equal(one, other) for one, other in zip(*leaves, strict=True))
            made += 1
            assert ran(both.calls[0]) == made
    assert untimed(both.calls[0]) == untimed(both.calls[1])


def test_views_with_other_strides_of_single_elements_run_in_the_extension(store: Path) -> None:
    """A batch of one element, sliced: torch takes it for contiguous, the code was compiled for other strides."""
    both = Both(store, "single")
    whole = torch.rand(6, 4)
    with torch.no_grad():
        for given in (whole[:1], whole[::6], whole.T.contiguous().T[1:2].clone(), whole[2:3]):
            assert torch.equal(*(call(given) for call in both.calls))
    assert ran(both.calls[0]) == 4


def test_each_region_is_called_by_its_own(store: Path) -> None:
    both = Both(store, "blocks")
    assert len(natives(both.calls[0])) == 2
    for call in (both.calls[0], both.modules[0], both.calls[0].forward, both.modules[0]):
        given = inputs()
        with torch.no_grad():
            assert torch.equal(call(*given)[0], both.calls[1](*given)[0])
    assert ran(both.calls[0]) == 2 * 4
    with torch.no_grad():
        both.modules[0].blocks[1].linear.weight.mul_(2)
        both.modules[1].blocks[1].linear.weight.mul_(2)
    both.calls[0].update_weights({"blocks.0.linear.bias": torch.ones(4)})
    both.calls[1].update_weights({"blocks.0.linear.bias": torch.ones(4)})
    given = inputs()
    results = [call(*given)[0] for call in both.calls]
    assert torch.equal(*results)
    assert untimed(both.calls[0]) == untimed(both.calls[1])


def test_calls_keep_nothing(store: Path) -> None:
    """Neither of inputs, results nor of the callable, whose libraries are closed when it is dropped."""
    module = Pair().eval()
    call = aotc.load(f"{store}#pair", module)
    given = inputs()
    with torch.no_grad():
        call(*given)
        call(*given)
        before = [sys.getrefcount(each) for each in (*given, module.linear.weight, None, NotImplemented)]
        for _ in range(200):
            call(*given)
            call.forward.native(*given, unknown=1)
        after = [sys.getrefcount(each) for each in (*given, module.linear.weight, None, NotImplemented)]
    assert all(abs(one - other) < 50 for one, other in zip(before, after, strict=True)), (before, after)
    assert before[:3] == after[:3]
    native, ours = weakref.ref(call.forward), weakref.ref(module)
    gc.disable()
    try:
        del call
        assert native() is None
        del module
        assert ours() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["pair", "padded"])
def test_replaced_weights_are_dropped_before_the_next_call(store: Path, name: str) -> None:
    both = Both(store, name)
    call, given = both.calls[0], inputs()
    with torch.no_grad():
        call(*given), call(*given)
        old = weakref.ref(call.forward._state._seen.state)
        call.update_weights({"linear.bias": torch.ones(4)})
        assert ran(call) == 2
        assert old() is None
        assert torch.equal(call(*given)[0], both.modules[0](*given)[0])


def test_a_tangent_is_refused_after_calls_without_one(store: Path) -> None:
    """Calls within the same level of forward-mode differentiation."""
    both, given = Both(store, "pair"), inputs()
    with torch.no_grad(), forward_ad.dual_level():
        for call in both.calls:
            call(*given), call(*given)
            with pytest.raises(aotc.MissError, match="has a tangent"):
                call(forward_ad.make_dual(given[0], torch.ones(2, 4)), given[1])


def test_threads_call_while_weights_are_replaced(store: Path) -> None:
    module = Pair().eval()
    call = aotc.load(f"{store}#pair", module, concurrency=2)
    given = inputs()
    with torch.no_grad():
        weights = [{"linear.weight": torch.full((4, 4), value), "linear.bias": torch.zeros(4)} for value in (1.0, 2.0)]
        call.update_weights(weights[0])
        expected = [given[0].sum(1, keepdim=True).expand(2, 4) * value for value in (1.0, 2.0)]

    def work(_: int) -> bool:
        with torch.no_grad():
            results = [call(*given)[0] for _ in range(300)]
        return all(any(torch.allclose(result, each) for each in expected) for result in results)

    with ThreadPoolExecutor(3) as pool:
        done = pool.map(work, range(3))
        for number in range(100):
            call.update_weights(weights[number % 2])
        assert all(done)
    assert call.stats().calls == 900
    assert ran(call) > 0


def test_a_forked_child_has_a_container_of_its_own(store: Path) -> None:
    script = f"""
import os, threading, torch, aotc
from fuzzing.native_models import Pair
call = aotc.load("{store}#pair", Pair().eval())
given = torch.rand(2, 4), torch.rand(2, 2)
waiting = threading.Event()
threading.Thread(target=waiting.wait, daemon=True).start()  # else the child shares it
with torch.no_grad():
    expected = [call(*given)[0] for _ in range(3)][-1]
    if (child := os.fork()) == 0:
        same = all(torch.equal(call(*given)[0], expected) for _ in range(4))
        os._exit(0 if same and sum(row[0] for row in call.forward.native.counts()) == 6 else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("name", ["INTERFACE", "open", "described", "modes"])
def test_a_door_that_reads_something_else_than_python_is_not_opened(
    store: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a torch whose tensors lie otherwise: Python makes every call, and the log says why."""
    core = importlib.import_module("aotc.core._evaluator")
    answers: dict[str, Any] = {
        "INTERFACE": 0,
        "open": lambda *_: (_ for _ in ()).throw(ImportError("torch exports no such name")),
        "described": lambda tensor: (0, [3], [1], 8, 1, -1, False),
        "modes": lambda: (0, 0, True, True),
    }
    monkeypatch.setattr(core, name, answers[name])
    caplog.set_level(logging.INFO, "aotc")
    native.open_core.cache_clear()
    try:
        call = aotc.load(f"{store}#called", Called().eval())
    finally:
        native.open_core.cache_clear()
    assert call.forward.native is None
    assert "calls are made by Python" in caplog.text
    with torch.no_grad():
        assert call(*inputs())["y"].shape == (2, 4)


CHANGES: dict[str, Callable[[Pair], Any]] = {
    "an attribute hides a parameter": lambda m: object.__setattr__(m.linear, "weight", torch.ones(4, 4)),
    "an attribute hides a child": lambda m: object.__setattr__(m, "linear", nn.Tanh()),
    "a class with a property": lambda m: setattr(m.linear, "__class__", WithProperty),
    "a tensor of another class": lambda m: setattr(m.linear.weight, "__class__", Doubling),
    "a negated view": lambda m: setattr(m.linear.weight, "data", torch._neg_view(m.linear.weight.data)),
}


class WithProperty(nn.Linear):
    weight = property(lambda self: torch.ones(4, 4))  # type: ignore[assignment]


class Doubling(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is nn.functional.linear else result


@pytest.mark.parametrize("native_calls", ["1", "0"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_hides_or_turns_a_tensor_is_refused_by_loads_and_by_calls(
    store: Path, what: str, native_calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTC_NATIVE_CALL", native_calls)
    with torch.no_grad():
        called = Pair().eval()
        call = aotc.load(f"{store}#pair", called)
        before = call(*inputs())
        CHANGES[what](called)
        for _ in range(2):
            with pytest.raises(aotc.BindError):
                call(*inputs())
        changed = Pair().eval()
        CHANGES[what](changed)
        with pytest.raises(aotc.BindError):
            aotc.load(f"{store}#pair", changed)
    assert ran(call) == (1 if native_calls == "1" else 0), before


def test_a_property_of_the_class_that_comes_later_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        call = aotc.load(f"{store}#pair", Pair().eval())
        call(*inputs())
        monkeypatch.setattr(nn.Linear, "weight", property(lambda self: torch.ones(4, 4)), raising=False)
        with pytest.raises(aotc.BindError, match="hid"):
            call(*inputs())
        monkeypatch.undo()
        call(*inputs())
    assert ran(call) == 1 + 1


@pytest.mark.parametrize("swap", ["swap_tensors", "load_state_dict"])
def test_tensors_that_ran_can_be_swapped(store: Path, swap: str) -> None:
    """torch refuses to swap a tensor to which C++ holds a reference."""
    module = Pair().eval()
    call, given = aotc.load(f"{store}#pair", module), inputs()
    with torch.no_grad():
        call(*given), call(*given)
        if swap == "swap_tensors":
            torch.utils.swap_tensors(module.linear.weight, nn.Parameter(torch.ones(4, 4)))
        else:
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                module.load_state_dict({"linear.weight": torch.ones(4, 4), "linear.bias": torch.ones(4)})
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
        assert torch.allclose(call(*given)[0], module(*given)[0], atol=1e-6)
        assert torch.allclose(call(*given)[0], module(*given)[0], atol=1e-6)


def test_no_thread_sees_half_of_a_swap(store: Path) -> None:
    """Threads call, replace a parameter, update all weights and refresh. After each change the next call is the new
    weights', whatever the evaluator was given meanwhile."""
    module = Pair().eval()
    call, given, failed = aotc.load(f"{store}#pair", module, concurrency=4), inputs(), list[str]()
    ended = threading.Event()

    def call_on() -> None:
        with torch.no_grad():
            while not ended.is_set():
                call(*given)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=call_on) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for number in range(150):
            weight = torch.full((4, 4), float(number))
            if number % 3 == 0:
                module.linear.weight = nn.Parameter(weight, requires_grad=False)
            elif number % 3 == 1:
                call.update_weights({"linear.weight": weight})
            else:
                module.linear.weight.data = weight
                call.refresh()
            with torch.no_grad():
                if not torch.allclose(call(*given)[0], module(*given)[0], atol=1e-4):
                    failed.append(f"step {number}")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not failed
    assert ran(call) > 0


def test_the_extension_is_for_every_python_and_names_no_folder_of_the_build() -> None:
    file = Path(importlib.import_module("aotc.core._evaluator").__file__ or "")
    assert file.name.endswith(".abi3.so")
    assert str(ROOT).encode() not in file.read_bytes()
