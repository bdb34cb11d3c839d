"""Calls on a GPU, looked at by the extension and launched by Python, beside those that Python makes alone."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from gpu_runs import Gpu, close, inputs
from torch import nn

import aotc

pytestmark = pytest.mark.cuda


def both_ways(gpu: Gpu, model: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[tuple[Any, nn.Module]]:
    made = []
    for switch in "10":
        monkeypatch.setenv("AOTC_NATIVE_CALL", switch)
        module = gpu.module(model)
        made.append((gpu.load(model, module, **options), module))
    (native, _), (python, _) = made
    assert native.forward.native is not None and python.forward.native is None
    return made


def untimed(call: Any) -> aotc.Stats:
    """The counters, without how long calls took: each was timed."""
    stats: aotc.Stats = call.stats()
    for bucket in stats.buckets.values():
        assert sum(bucket.spans) == bucket.calls and bucket.seconds > 0
        bucket.seconds, bucket.spans = 0.0, ()
    return stats


def by_extension(call: Any) -> int:
    return sum(row[0] for row in call.forward.native.counts())


@pytest.mark.parametrize(
    ("model", "launch", "shapes"),
    [
        ("mlp", "never", [(4, 64), (3, 64), (16, 64)]),
        ("mlp", "always", [(4, 64), (3, 64), (16, 64)]),
        ("ranged", "picked", [(8, 512), (9, 512)]),
        ("mlp-fp16", "never", [(4, 64)]),
    ],
)
def test_results_are_those_of_python(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, model: str, launch: str, shapes: list[tuple[int, ...]]
) -> None:
    (native, _), (python, _) = both_ways(gpu, model, monkeypatch, graphs=aotc.Graphs(use=launch))
    half = torch.float16 if model == "mlp-fp16" else torch.float32
    for count in range(4):
        for shape in shapes:
            (x,) = inputs(1, *shape)
            x = x.to(half) + count
            assert torch.equal(native(x), python(x))
    assert by_extension(native) == 4 * len(shapes)
    assert untimed(native) == untimed(python)


def test_what_is_written_is_written_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made = both_ways(gpu, "stateful", monkeypatch)
    (x,) = inputs(1, 1, 8)
    totals = [torch.zeros(1, 8, device="cuda:0") for _ in made]
    for position in range(4):
        at = torch.tensor(position, device="cuda:0")
        results = [call(x, at, total) for (call, _), total in zip(made, totals, strict=True)]
        assert all(map(torch.equal, *(torch.utils._pytree.tree_leaves(each) for each in results)))
    assert torch.equal(*totals)
    assert all(map(torch.equal, *(module.state_dict().values() for _, module in made)))
    assert by_extension(made[0][0]) == 4


def test_a_tensor_on_the_host_is_a_miss(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made = both_ways(gpu, "mlp", monkeypatch, on_miss="error")
    (x,) = inputs(1, 4, 64)
    told = []
    for call, _ in made:
        call(x), call(x)
        with pytest.raises(Exception) as raised:
            call(x.cpu())
        told.append((type(raised.value), str(raised.value)))
    assert told[0] == told[1]


@pytest.mark.parametrize("launch", ["never", "always"])
def test_replaced_weights_are_freed_before_the_next_call(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, launch: str
) -> None:
    ((call, module), _) = both_ways(gpu, "ranged", monkeypatch, graphs=aotc.Graphs(use=launch))
    (x,) = inputs(1, 8, 512)
    for _ in range(3):
        call(x)
    assert by_extension(call) == 3
    other = {name: each.detach().cpu() * 2 for name, each in module.named_parameters()}
    old = weakref.ref(call.forward._state._seen.state)
    call.update_weights(other)
    assert old() is None
    assert close(call(x), module(x)) and close(call(x), module(x))


def test_a_call_within_a_graph_of_the_caller_s_is_recorded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    ((call, module), _) = both_ways(gpu, "mlp", monkeypatch, graphs=aotc.Graphs(use="always"))
    x, other = inputs(2, 4, 64)
    for _ in range(3):
        call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(x)
    x.copy_(other)
    graph.replay()
    assert close(result, module(other))


def test_a_call_notes_its_stream(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that it reads there are not given to others before it has read them."""
    ((call, _), _) = both_ways(gpu, "mlp", monkeypatch, graphs=aotc.Graphs(use="never"))
    (x,) = inputs(1, 4, 64)
    for _ in range(2):
        call(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(x)
    assert by_extension(call) == 3
    assert stream.cuda_stream in call.forward._streams._seen
