"""What the CUDA graphs of a callable write to, as far as it can be seen without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hand_built import CPU, FakeLibrary, attach_regions, make_artifact, tensor
from hypothesis import given
from hypothesis import strategies as st
from test_attached_regions import artifact_of, made
from torch import Tensor

from aotc.call_table.dispatch import Dispatcher
from aotc.errors import LibraryError
from aotc.runtime.cuda.captures import run_captured
from aotc.runtime.cuda.graphs import Captured, Graph, GraphPool, graphs_of
from aotc.runtime.options import Graphs
from aotc.runtime.state.call_state import State
from aotc.runtime.variant import Attached
from aotc.tensors.overlaps import sharing_groups
from aotc.tensors.sharing import sharing


class Stream:
    """One of CUDA's, which notes what it waits for."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """A CUDA that records nothing and does at once what it is told; the last of these streams is the current one."""
    streams = [Stream(0)]
    for name, fake in {
        "cuda.current_stream": lambda device=None: streams[-1],
        "cuda.graph_pool_handle": lambda: None,
        "cuda.device": lambda device: nullcontext(),
        "cuda.stream": lambda stream: nullcontext(),
        "cuda.CUDAGraph": lambda **_: SimpleNamespace(instantiate=lambda: None, replay=lambda: None),
        "_C._cuda_getCurrentRawStream": lambda index: streams[-1].cuda_stream,
    }.items():
        monkeypatch.setattr(f"torch.{name}", fake, raising=False)
    for name, fake in {
        "make_stream": lambda owner, device: Stream(100),
        "capturing": lambda graph, pool: nullcontext(),
        "clear_by_kernels": lambda graph: 0,
    }.items():
        monkeypatch.setattr(f"aotc.runtime.cuda.graphs.{name}", fake)
    return streams


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_calls_in_any_mode_write_to_static_leaves_that_were_made_in_inference_mode(layout: Any) -> None:
    signature = make_artifact([tensor("x", 1, 2, 2, 2, layout=layout)]).signature
    with torch.inference_mode():
        (leaf,) = GraphPool(CPU).memory(signature, [8]).static_leaves([(1, 2, 2, 2)], [None])
        leaf.copy_(torch.ones(1, 2, 2, 2))
    with torch.no_grad():
        leaf.copy_(torch.ones(1, 2, 2, 2))
    assert leaf.unique().tolist() == [1]


def test_a_graph_is_recorded_on_zeros_whatever_another_one_s_call_has_left() -> None:
    """A last position of a longer sequence, which a shorter one has not: on a GPU it would end the process."""

    def last_of(leaves: Sequence[Any], _: State) -> list[Tensor]:
        tokens, position = leaves
        return [tokens[position]]

    artifact = make_artifact([tensor("tokens", "seq"), tensor("position", 1, dtype="int64")], [{"seq": 2}, {"seq": 8}])
    pool = GraphPool(CPU)
    memory = pool.memory(artifact.signature, [8, 1])
    short, long = (
        Graph(last_of, variant, memory.static_leaves([(seq,), (1,)], [None, None]), {}, pool, "copy")
        for variant, seq in zip(artifact.variants, (2, 8), strict=True)
    )
    for generation, state in enumerate((State(), State())):
        state.generation = generation
        for graph in (short, long):
            graph.prepare(state)
        long.launch([torch.arange(8.0), torch.tensor([7])], state)
        short.launch([torch.arange(2.0), torch.tensor([1])], state)
        long.launch([torch.arange(8.0), torch.tensor([7])], state)


def test_the_first_call_waits_until_the_static_leaves_are_filled(streams: list[Stream]) -> None:
    pool = GraphPool(CPU)
    pool.memory(make_artifact([tensor("x", 1)]).signature, [1])
    streams.append(Stream(1))
    with pool.turn.lock:
        pool.turn.follow()
        assert streams[1].waited_for == streams[:1]


def test_outputs_that_share_memory_share_it_in_each_call_s_results() -> None:
    """As in eager, where a later write to one shows in the other."""

    def forward(leaves: Sequence[Any], _: State) -> list[Tensor]:
        logits = leaves[0] * 2
        return [logits.t(), logits, logits.view(torch.int32), logits[1:], leaves[0] * 3, logits[:0]]

    pool, artifact = GraphPool(CPU), make_artifact([tensor("x", 2, 4)])
    static = pool.memory(artifact.signature, [8]).static_leaves([(2, 4)], [None])
    graph, state = Graph(forward, artifact.variants[0], static, {}, pool, "copy"), State()
    x = torch.arange(8.0).view(2, 4)
    held = graph.capture(state).outputs
    held[1].copy_(x * 2), held[4].copy_(x * 3)  # what a replay would compute
    first, second = (graph.launch([x], state) for _ in range(2))
    for turned, logits, bits, row, other, empty in (first, second):
        assert logits.equal(x * 2) and turned.equal((x * 2).t()) and row.equal(x[1:] * 2) and other.equal(x * 3)
        assert bits.equal((x * 2).view(torch.int32)) and empty.shape == (0, 4)
        turned[2, 1] = 7
        assert logits[1, 2] == row[0, 2] == 7 and bits[1, 2] == 0x40E00000 and other.equal(x * 3)
    assert first[1].data_ptr() != second[1].data_ptr() and held[1].equal(x * 2)


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(0, 3), st.integers(0, 3), st.integers(1, 4)),
        max_size=6,
    )
)
def test_copies_share_what_the_outputs_share(drawn: list[tuple[int, int, int, int, int]]) -> None:
    """Views of two storages: any sizes, steps and offsets."""
    storages = [torch.arange(32.0), torch.arange(32.0) + 100]
    outputs = [
        storages[one].as_strided((rows, columns), (step * max(columns, 1), step), offset)
        for one, offset, rows, columns, step in drawn
        if offset + rows * columns * step <= 32
    ]
    graph: Any = None
    copies = Captured(graph, State(), outputs, sharing_groups(outputs)).copies()
    assert [one.equal(other) for one, other in zip(outputs, copies, strict=True)] == [True] * len(outputs)
    before, after = ({str(at): each for at, each in enumerate(tensors)} for tensors in (outputs, copies))
    assert sharing(after, {}) == sharing(before, {})
    assert not any(
        key[1].startswith("storage") for key in sharing(after, {"storage 0": storages[0], "storage 1": storages[1]})
    )


def test_outputs_that_the_next_call_overwrites_are_one_thread_s() -> None:
    """Until it has ended: then another one may call."""
    pool, artifact = GraphPool(CPU), make_artifact([tensor("x", 2)])
    static = pool.memory(artifact.signature, [2]).static_leaves([(2,)], [None])
    graph = Graph(lambda leaves, _: [leaves[0]], artifact.variants[0], static, {}, pool, "view")
    leaves, state = [torch.ones(2)], State()

    def call() -> None:
        graph.launch(leaves, state)

    with ThreadPoolExecutor(1, "first") as one, ThreadPoolExecutor(1, "second") as other:
        one.submit(call).result()
        with pytest.raises(LibraryError, match="'first_0'; 'second_0' called") as caught:
            other.submit(call).result()
        assert "copy" in caught.value.hint
        one.submit(call).result()
    call()


def test_each_instance_of_a_region_has_a_graph_and_all_are_captured_anew_for_weights_that_are_swapped() -> None:
    module = made()
    compiled = attach_regions(
        artifact_of(module),
        [FakeLibrary(lambda x, weight: x * weight)],
        module,
        graphs=Graphs(use="always"),
    )
    launches = [one.launch for call in compiled.regions.values() for one in call._attached]
    graphs = [graph for launch in launches for graph in graphs_of(launch)]
    states = [call._state for call in compiled.regions.values()]
    assert [graph._captured.state for graph in graphs] == [state.take() for state in states]
    assert (
        graphs[0]._pool is graphs[1]._pool and graphs[0]._copied[0][1].data_ptr() == graphs[1]._copied[0][1].data_ptr()
    )
    compiled.update_weights({name: each + 1 for name, each in module.state_dict().items()})
    captured = [graph._captured for graph in graphs]
    assert all(one.state is state.take() for one, state in zip(captured, states, strict=True))
    compiled(torch.ones(2, 4))
    assert [graph._captured for graph in graphs] == captured
    compiled.update_weights({"outside": torch.ones(4), "blocks.1.weight": torch.ones(4)})
    assert graphs[0]._captured is captured[0] and graphs[1]._captured is not captured[1]
    assert [graph._captured.state[0] for graph in graphs] == [block.weight for block in module.blocks]


def test_a_call_while_the_caller_captures_is_launched_directly_and_its_first_one_refused() -> None:
    artifact = make_artifact([tensor("x", 2)])
    plan = Dispatcher(artifact.signature, artifact.variants).plan(())
    assert plan is not None
    ran: list[str] = []

    def direct(leaves: Sequence[Any], _: State) -> list[Tensor]:
        ran.append("direct")
        return [leaves[0] * 2]

    attached = Attached(artifact.variants[0], direct, [])
    attached.launch = lambda leaves, state: ran.append("graph") or direct(leaves, state)
    leaves = [torch.ones(2)]
    with pytest.raises(LibraryError, match="while a CUDA graph is captured, and loads kernels"):
        run_captured(attached, leaves, State(), plan, leaves)
    assert not ran
    attached.run(leaves, State(), plan, leaves)
    assert run_captured(attached, leaves, State(), plan, leaves).tolist() == [2, 2]
    assert ran == ["graph", "direct", "direct"]


def test_the_pools_of_freed_models_return_to_the_gpu_with_the_next_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps a pool whose graphs are gone: ten releases in turn would hold ten. Not in a finalizer, which may run
    while a graph is captured."""
    returned: list[str] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: returned.append("now"))
    monkeypatch.setattr("aotc.runtime.cuda.graphs._freed", [])
    serving = GraphPool(CPU)
    other = GraphPool(CPU)
    assert returned == []
    del serving
    assert returned == []
    serving = GraphPool(CPU)
    assert returned == ["now"]
    third = GraphPool(CPU)
    assert returned == ["now"]
    del other, serving, third
