"""`update_weights`: all or nothing, for every later call, while calls go on."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hand_built import CPU, FakeLibrary, make_artifact, specs_of, tensor
from safetensors.torch import save_file
from torch import Tensor, nn

from aotc.checkpoints.checkpoint_forms import mistyped
from aotc.errors import BindError
from aotc.runtime.call import BoundModule, CompiledCall
from aotc.runtime.checkpoints import module_swap, swap
from aotc.runtime.checkpoints.checkpoint_files import open_weights
from aotc.runtime.checkpoints.state import bind_checkpoint
from aotc.runtime.checkpoints.swap import Streams
from aotc.runtime.state import read_write_lock
from aotc.runtime.state import weights as weights_module
from aotc.runtime.state.binding import bind_state

X = torch.ones(1)
DEADLOCK = 60
"""Seconds after which a thread that waits for itself is given up."""


class Net(nn.Module):
    """`unused` is in the module, and no variant takes it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.unused = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.layers[0].weight
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.fill(value)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer.weight.sum() for layer in self.layers])


TAKEN = [f"layers.{index}.{name}" for index in range(4) for name in ("weight", "bias")]
WAYS = ["module", "checkpoint"]


def weights_of(value: float) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in Net(value).named_parameters()}


def values(x: Tensor, *state: Tensor) -> Tensor:
    """Every value of every tensor, slowly, so that a swap falls between two of them."""
    found = []
    for each in state:
        found.append(each.detach().flatten().clone())
        time.sleep(0)
    return torch.cat(found)


def serve(way: str, function: Callable[..., Any] = values, value: float = 1.0, on_miss: Any = "error") -> Any:
    module = Net(value).eval()
    unused = ("unused.bias", "unused.weight")
    artifact = make_artifact([tensor("x", 1)], state=specs_of(module, TAKEN), unused=unused)
    if way == "module":
        state: Any = bind_state(artifact, module, CPU)
    else:
        state = bind_checkpoint(artifact, open_weights(weights_of(value)), dict, CPU)
    library = FakeLibrary(function)
    bound = BoundModule(module if way == "module" else None, state)
    compiled: Any = CompiledCall(artifact, [library], bound, CPU, on_miss)
    compiled.library = library
    return compiled


def served(compiled: Any) -> set[float]:
    return set(compiled(X).tolist())


def refused(action: Callable[[], object]) -> BindError:
    with pytest.raises(BindError) as caught:
        action()
    return caught.value


@pytest.mark.parametrize("way", WAYS)
def test_the_next_call_uses_the_new_weights(way: str) -> None:
    compiled = serve(way)
    assert served(compiled) == {1}
    compiled.update_weights(weights_of(2))
    assert served(compiled) == {2}


@pytest.mark.parametrize("way", WAYS)
def test_weights_may_come_from_a_file(way: str, tmp_path: Path) -> None:
    save_file(weights_of(2), tmp_path / "model.safetensors")
    compiled = serve(way)
    compiled.update_weights(tmp_path)
    assert served(compiled) == {2}


@pytest.mark.parametrize("form", ["file", "mapping"])
def test_an_update_in_inference_mode_leaves_the_module_fit_to_train(form: str, tmp_path: Path) -> None:
    save_file(weights_of(2), tmp_path / "model.safetensors")
    compiled = serve("module")
    with torch.inference_mode():
        compiled.update_weights(tmp_path if form == "file" else weights_of(2))
    assert served(compiled) == {2}
    assert not any(each.is_inference() for each in compiled.module.parameters())
    compiled.module(X).sum().backward()
    compiled.module.fill(3)
    assert served(compiled) == {3}


@pytest.mark.parametrize("way", WAYS)
def test_a_mapping_is_copied_so_a_trainer_may_go_on(way: str) -> None:
    compiled, trained = serve(way), Net(2)
    compiled.update_weights(dict(trained.named_parameters()))
    trained.fill(3)
    assert served(compiled) == {2}


@pytest.mark.parametrize("way", WAYS)
def test_some_names_are_enough(way: str) -> None:
    compiled = serve(way)
    compiled.update_weights({"layers.1.weight": torch.full((2, 2), 5.0)})
    assert compiled(X).tolist() == [1] * 6 + [5] * 4 + [1] * 14
    compiled.update_weights({"layers.2.bias": torch.full((2,), 6.0)})
    assert compiled(X).tolist() == [1] * 6 + [5] * 4 + [1] * 6 + [6, 6] + [1] * 6


@pytest.mark.parametrize("way", WAYS)
def test_any_name_of_tied_weights_stands_for_all(way: str) -> None:
    compiled = serve(way)
    compiled.update_weights({"tied.weight": torch.full((2, 2), 5.0)})
    assert compiled(X).tolist()[:4] == [5] * 4
    error = refused(
        lambda: compiled.update_weights({"tied.weight": torch.zeros(2, 2), "layers.0.weight": torch.ones(2, 2)})
    )
    assert "tied" in error.message
    assert compiled(X).tolist()[:4] == [5] * 4


@pytest.mark.parametrize("name", ["layers.1.weight", "layers.2.weight", "unused.weight"])
def test_any_name_stands_for_all_of_weights_that_the_module_ties_and_the_build_did_not(name: str) -> None:
    compiled = serve("module")
    layers, unused = compiled.module.layers, compiled.module.unused
    layers[2].weight = unused.weight = layers[1].weight
    new = torch.full((2, 2), 5.0)
    compiled.update_weights({name: new})
    assert compiled(X).tolist() == [1] * 6 + [5] * 4 + [1] * 2 + [5] * 4 + [1] * 8
    assert layers[1].weight is layers[2].weight is unused.weight
    compiled.update_weights({"layers.1.weight": new, "layers.2.weight": new.clone(), "unused.weight": new})
    assert layers[1].weight is layers[2].weight is unused.weight
    error = refused(lambda: compiled.update_weights({"layers.1.weight": new, "layers.2.weight": new + 1}))
    assert "`layers.1.weight`" in error.issues[0].message
    assert error.issues[0].where == "layers.2.weight"
    assert layers[1].weight.unique().tolist() == [5]


@pytest.mark.parametrize("name", ["layers.1.weight", "layers.2.weight", "copy", "unused.weight"])
def test_any_name_stands_for_all_of_weights_that_are_tied_by_their_memory_alone(name: str) -> None:
    """As `load_state_dict` does, which writes to that memory."""
    compiled = serve("module")
    module = compiled.module
    weight = module.layers[1].weight
    module.layers[2].weight = nn.Parameter(weight.detach(), requires_grad=False)
    module.unused.weight.data = weight.detach()
    module.register_buffer("copy", weight.detach())
    compiled.update_weights({name: torch.full((2, 2), 5.0)})
    after = [module.layers[1].weight, module.layers[2].weight, module.unused.weight, module.copy]
    assert [each.tolist() for each in after] == [[[5.0, 5.0]] * 2] * 4
    assert len({each.data_ptr() for each in after}) == 1
    assert [type(each) for each in after] == [nn.Parameter, nn.Parameter, nn.Parameter, Tensor]
    assert [each.requires_grad for each in after] == [True, False, True, False]
    assert compiled(X).tolist().count(5.0) == 8
    error = refused(lambda: compiled.update_weights({"copy": torch.zeros(2, 2), "unused.weight": torch.ones(2, 2)}))
    assert {error.issues[0].where} <= {"copy", "unused.weight"}
    with torch.no_grad():
        module.copy.fill_(6)
    assert compiled(X).tolist().count(6.0) == 8


def test_weights_of_which_others_are_a_part_are_replaced_with_these_or_not_at_all() -> None:
    compiled = serve("module")
    module = compiled.module
    module.register_buffer("row", module.layers[1].weight.detach()[1])
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    new = torch.full((2, 2), 5.0)
    for given, left in (("layers.1.weight", "row"), ("row", "layers.1.weight")):
        value = {"layers.1.weight": new, "row": new[1]}[given]
        error = refused(lambda given=given, value=value: compiled.update_weights({given: value}))  # type: ignore[misc]
        assert [issue.where for issue in error.issues] == [left]
        assert f"`{given}`" in error.issues[0].message
    assert module.layers[1].weight.tolist() == [[1, 1]] * 2
    compiled.update_weights({"layers.1.weight": new, "row": new[1]})
    assert compiled(X).tolist() == [1] * 6 + [5] * 4 + [1] * 14
    assert module.row.tolist() == [5, 5]


def test_the_module_agrees_afterwards_also_where_no_variant_looks() -> None:
    compiled = serve("module")
    module, names = compiled.module, list(dict(compiled.module.named_parameters()))
    compiled.update_weights(weights_of(2))
    assert all(bool((each == 2).all()) for each in module.parameters())
    assert module.unused.weight[0, 0] == 2
    assert list(dict(module.named_parameters())) == names
    assert all(isinstance(each, nn.Parameter) and each.requires_grad for each in module.parameters())
    assert module.tied.weight is module.layers[0].weight
    module.layers[0].weight.data.fill_(4)  # still the library's own tensor
    assert compiled(X).tolist()[:4] == [4] * 4


def test_a_buffer_stays_a_buffer() -> None:
    compiled = serve("module")
    compiled.update_weights({"table": torch.ones(2)})
    assert "table" in dict(compiled.module.named_buffers())
    assert type(compiled.module.table) is Tensor


@pytest.mark.parametrize("way", WAYS)
def test_everything_that_is_wrong_is_listed_and_nothing_has_changed(way: str) -> None:
    compiled = serve(way)
    wrong = {
        **weights_of(2),
        "layers.1.weight": torch.zeros(3, 2),
        "layers.2.bias": torch.zeros(2, dtype=torch.float16),
        "layers.9.bias": torch.zeros(2),
    }
    error = refused(lambda: compiled.update_weights(wrong))
    assert {issue.where for issue in error.issues} == {"layers.1.weight", "layers.2.bias", "layers.9.bias"}
    assert served(compiled) == {1}
    if way == "module":
        assert all(bool((each == 1).all()) for each in compiled.module.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_an_update_that_fails_while_it_reads_changes_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, read = serve(way), 0

    def failing(*shape: Any, **fields: Any) -> Tensor:
        nonlocal read
        read += 1
        if read == 3:
            raise RuntimeError("no room")
        return make(*shape, **fields)

    make = torch.empty_strided
    monkeypatch.setattr("torch.empty_strided", failing)
    with pytest.raises(BindError, match="no room"):
        compiled.update_weights(weights_of(2))
    assert served(compiled) == {1}
    monkeypatch.undo()
    compiled.update_weights(weights_of(2))
    assert served(compiled) == {2}


@pytest.mark.parametrize("way", WAYS)
def test_an_update_that_replaces_nothing_is_refused(way: str) -> None:
    compiled = serve(way)
    with pytest.raises(BindError, match="the mapping has none of the model's tensors"):
        compiled.update_weights({})


def test_frozen_weights_cannot_be_replaced() -> None:
    artifact = make_artifact([tensor("x", 1)], weights="frozen", state=specs_of(Net(1), digests=True))
    compiled = CompiledCall(
        artifact, [FakeLibrary(values)], BoundModule(None, bind_state(artifact, None, CPU)), CPU, "error"
    )
    assert "frozen weights" in refused(lambda: compiled.update_weights(weights_of(2))).message


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_has_begun_finishes_on_the_old_weights(way: str) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(x: Tensor, *state: Tensor) -> Tensor:
        if not inside.is_set():
            inside.set()
            assert go_on.wait(30)
        return values(x, *state)

    compiled, results = serve(way, slow), []
    thread = threading.Thread(target=lambda: results.append(served(compiled)))
    thread.start()
    assert inside.wait(30)
    compiled.update_weights(weights_of(2))
    assert served(compiled) == {2}
    go_on.set()
    thread.join()
    assert results == [{1}]


def hammered(compiled: Any, call: Callable[[], set[float]], updates: int = 60) -> list[set[float]]:
    """What three threads see while the weights go to and fro."""
    seen: list[set[float]] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            seen.append(call())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(updates):
            compiled.update_weights(weights_of(2 + number % 2))
            assert served(compiled) == {2 + number % 2}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_no_call_ever_sees_a_mixture(way: str) -> None:
    compiled = serve(way, value=2)
    seen = hammered(compiled, lambda: served(compiled))
    assert {frozenset(each) for each in seen} == {frozenset({2.0}), frozenset({3.0})}


def test_no_eager_call_sees_a_mixture_either() -> None:
    compiled = serve("module", value=2, on_miss="eager")
    wrong = torch.ones(1, dtype=torch.float64)
    seen = hammered(compiled, lambda: {float(each) / 4 for each in compiled(wrong).detach()}, updates=20)
    assert {frozenset(each) for each in seen} == {frozenset({2.0}), frozenset({3.0})}


def test_updates_at_once_take_turns() -> None:
    compiled = serve("checkpoint")
    names = sorted(TAKEN)
    threads = [
        threading.Thread(target=compiled.update_weights, args=({name: torch.full_like(weights_of(1)[name], 7.0)},))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served(compiled) == {7}


@contextmanager
def no_deadlock() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(DEADLOCK)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_what_a_signals_handler_calls_amid_an_update_of_its_thread_sees_no_mixture() -> None:
    """At any line of the update: the handler is called by a trace function."""
    compiled, values, eager, messages = serve("module", on_miss="eager"), set(), set(), set()

    def handle(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            sys.settrace(None)
            values.add(frozenset(served(compiled)))
            messages.add(refused(lambda: compiled.update_weights(weights_of(3))).message)
            eager.add(frozenset(compiled(torch.ones(2)).tolist()))
            sys.settrace(trace)
        return handle

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        begun = compiled._updating._is_owned()
        files = (swap.__file__, weights_module.__file__, module_swap.__file__, read_write_lock.__file__)
        return handle if begun and frame.f_code.co_filename in files else None

    with no_deadlock():
        sys.settrace(trace)
        try:
            compiled.update_weights(weights_of(2))
        finally:
            sys.settrace(None)
    assert values == {frozenset({1.0}), frozenset({2.0})}
    assert eager == {frozenset({4.0}), frozenset({8.0})}
    assert all("this very thread" in message for message in messages)
    assert served(compiled) == {2.0}


def test_an_update_within_an_eager_call_of_its_own_thread_is_refused() -> None:
    compiled = serve("module", on_miss="eager")
    with no_deadlock():
        error = compiled._state.run_eagerly(lambda: refused(lambda: compiled.update_weights(weights_of(2))))
    assert "runs the module eagerly" in error.message
    compiled.update_weights(weights_of(2))
    assert served(compiled) == {2.0}


class Interrupted(Exception):
    pass


def test_an_exception_at_one_line_after_another_of_an_update_leaves_all_weights_old_or_all_new() -> None:
    """As a signal's handler may raise it; the module and the compiled code agree."""
    compiled, left, before = serve("module", on_miss="eager"), 0, 1.0

    def interrupt(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise Interrupted
        return interrupt

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return (
            interrupt
            if frame.f_code.co_filename in (swap.__file__, weights_module.__file__, read_write_lock.__file__)
            else None
        )

    seen = set()
    for number in range(1, 2000, 3):
        left, after = number, 3.0 - before
        sys.settrace(trace)
        try:
            compiled.update_weights(weights_of(int(after)))
        except Interrupted:
            pass
        finally:
            sys.settrace(None)
        (value,) = served(compiled)
        assert value in (before, after)
        assert set(compiled(torch.ones(2)).tolist()) == {4 * value}
        assert all(bool((each == value).all()) for each in compiled.module.parameters())
        seen.add(value == after)
        before = value
        if left > 0:
            break
    assert left > 0 and seen == {False, True}


def test_a_tensor_that_its_owner_replaces_between_two_updates_is_kept() -> None:
    compiled = serve("module")
    compiled.update_weights({"layers.1.bias": torch.full((2,), 5.0)})
    compiled.module.layers[2].bias = nn.Parameter(torch.full((2,), 6.0))
    compiled.update_weights({"layers.3.bias": torch.full((2,), 7.0)})
    assert compiled(X).tolist() == [1] * 10 + [5, 5] + [1] * 4 + [6, 6] + [1] * 4 + [7, 7]


def test_the_old_weights_are_let_go() -> None:
    import weakref

    compiled = serve("checkpoint")
    old = weakref.ref(compiled._take_state())
    compiled.update_weights(weights_of(2))
    compiled.library.seen.clear()
    assert old() is None


class Owner:
    """Whose tensors are kept."""


class Kept:
    """A tensor, as far as the allocator asks it which streams read it."""

    def __init__(self) -> None:
        self.read_on: set[int] = set()

    def record_stream(self, handle: int) -> None:
        self.read_on.add(handle)


def test_what_is_a_callable_s_own_is_kept_for_every_stream_once_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is then: weights may have been swapped since it was made."""
    handles = iter((7, 9, 7))
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda index: next(handles), raising=False)
    monkeypatch.setattr("aotc.runtime.checkpoints.swap._stream", lambda handle, device: handle)
    monkeypatch.setattr("aotc.runtime.checkpoints.swap._is_torchs_own", lambda device: True)
    streams, owner, old, new = Streams(CPU), Owner(), Kept(), Kept()
    own: list[Any] = [old]
    streams.keep(owner, lambda: own)
    for _ in range(3):
        streams.note()
    own[:] = [new]
    assert not new.read_on
    del owner
    assert (old.read_on, new.read_on) == (set(), {7, 9})


def test_a_stream_of_others_is_not_asked_later_and_the_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be gone by then; while a CUDA graph is captured the GPU cannot be waited for."""
    waited: list[Any] = []
    captured = [True]
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr("aotc.runtime.checkpoints.swap._is_torchs_own", lambda device: False)
    monkeypatch.setattr("aotc.runtime.checkpoints.swap.is_captured", lambda device: captured[0])
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    streams, owners = Streams(CPU), [Owner(), Owner()]
    for index in range(2):
        streams.keep(owners[index], lambda: [torch.ones(1)])
    streams.note()
    owners.pop()
    assert (waited, len(streams._waiting)) == ([], 1)
    captured[0] = False
    owners.pop()
    assert (waited, streams._waiting) == ([CPU], [])


def test_a_mistyped_name_is_answered_with_the_one_that_was_meant() -> None:
    assert mistyped(["head.weigth", "other"], {"head.weight", "head.bias"}) == ["did you mean `head.weight`?", ""]
    assert mistyped(["model.head.weight"], {"head.weight"}) == [""], "a prefix has a hint of its own"
