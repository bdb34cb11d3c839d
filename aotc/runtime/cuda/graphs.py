"""CUDA graphs: a variant's kernels recorded once and launched as one.

A graph reads and writes fixed addresses, so:

- inputs are copied into static buffers before each replay; one buffer for each leaf serves all graphs of a callable;
- the module's tensors are used where they are; where one was replaced, the graph is captured anew before it is used,
  and where all are to be replaced at once (`update_weights`), before that is done;
- outputs are copied out after each replay (`outputs="copy"`), or given as views that the next call overwrites
  (`outputs="view"`), which is what `torch.compile`'s CUDA graphs give.

All graphs of a model, also those of its regions, share one memory pool, so only one may run at a time: a `Turn` orders
calls from several threads and on several streams.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aotc.call_table.dispatch import Dispatcher, Shape
from aotc.errors import LibraryError
from aotc.machine.cuda_capture import capturing
from aotc.reads.tensors import dtype_of
from aotc.records import Signature, TensorLeaf, Variant, bucket_name, tuned_dims
from aotc.runtime.conversions.written import write_into
from aotc.runtime.cuda.driver import make_stream
from aotc.runtime.cuda.memset_nodes import clear_by_kernels
from aotc.runtime.options import Graphs, OutputMode
from aotc.runtime.state.call_state import State, TakeState
from aotc.runtime.variant import Attached, Launch
from aotc.tensors.overlaps import sharing_groups
from aotc.tensors.strides import strides_in

_log = logging.getLogger("aotc")


class Turn:
    """Who may use the shared pool: one thread at a time, which holds `lock`, and the device work of one stream after
    that of the last, which `follow` sees to.

    A lock of C is held for as long as its `with` lasts, whatever a signal's handler raises; a `__enter__` of Python's
    may be left between taking the lock and being inside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.lock = threading.RLock()
        self._last: torch.cuda.Stream | None = None

    def follow(self) -> None:
        last = self._last
        # The bare handle costs a tenth of a stream object.
        if last is None or torch._C._cuda_getCurrentRawStream(self._device.index) != last.cuda_stream:
            stream = torch.cuda.current_stream(self._device)
            if last is not None:
                stream.wait_stream(last)
            self._last = stream


class OneThread:
    """The thread that may call where outputs are overwritten by the next call: the first that does, until it ends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Raises LibraryError in another thread."""
        thread, owner = threading.current_thread(), self._thread
        if thread is owner:
            return
        if owner is not None and owner.is_alive():
            raise LibraryError(
                f'with outputs="view" one thread may call, which is {owner.name!r}; {thread.name!r} called',
                hint='load with aotc.Graphs(outputs="copy"), or load once for each thread',
            )
        self._thread = thread


_freed: list[torch.device] = []
"""The devices of pools that were freed with their models. A service that switches releases would hold the pools of all
of them, so the next pool returns these to the GPU: while a model is loaded, no call is waited for."""


class GraphPool:
    """The memory pool and the turn that all graphs of a model share; those of one region share static buffers, too."""

    def __init__(self, device: torch.device) -> None:
        if _freed:  # torch keeps the memory of a pool without graphs, which no other pool takes
            _freed.clear()
            torch.cuda.empty_cache()
        weakref.finalize(self, _freed.append, device).atexit = False
        self.device = device
        self.turn = Turn(device)
        self.one_thread = OneThread()
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = make_stream(self, device)
        self._memories: list[GraphMemory] = []

    def memory(self, signature: Signature, largest: Sequence[int]) -> GraphMemory:
        """The static buffers for these leaves: the same ones for each callable of one signature and sizes."""
        for memory in self._memories:
            if memory.signature is signature and memory.largest == largest:
                return memory
        self._memories.append(GraphMemory(signature, largest, self))
        return self._memories[-1]


class GraphMemory:
    """A static buffer for each leaf, in which all graphs of a callable find their inputs."""

    def __init__(self, signature: Signature, largest: Sequence[int], pool: GraphPool) -> None:
        """`largest` is the number of elements that each leaf has at most; 0 for a leaf that is not a tensor."""
        self.signature, self.largest = signature, largest
        # The first call may be on another stream; and outside of the mode it writes to them.
        with pool.turn.lock, torch.inference_mode(False):
            pool.turn.follow()
            self._buffers = [
                torch.zeros(count, dtype=dtype_of(leaf.dtype), device=pool.device)
                if isinstance(leaf, TensorLeaf)
                else None
                for leaf, count in zip(signature.leaves, largest, strict=True)
            ]

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer for buffer in self._buffers if buffer is not None]

    def static_leaves(self, shapes: Sequence[Shape | None], constants: Sequence[Any]) -> list[Any]:
        """Views of the buffers in these shapes and the leaves' layouts, constants between them."""
        return [
            constant if buffer is None or shape is None else _view(buffer, shape, leaf)
            for buffer, shape, leaf, constant in zip(
                self._buffers, shapes, self.signature.leaves, constants, strict=True
            )
        ]


def _view(buffer: Tensor, shape: Shape, leaf: Any) -> Tensor:
    return buffer.as_strided(shape, strides_in(leaf.layout, shape))


class Captured(NamedTuple):
    """A graph, the tensors of the module whose addresses it holds, and the tensors that it writes its outputs to.
    `shared` has the positions of those that share memory, as `sharing_groups` gives them."""

    graph: torch.cuda.CUDAGraph
    state: State
    outputs: list[Tensor]
    shared: list[list[int]]

    def copies(self) -> list[Tensor]:
        """Of the outputs. Those that share memory do so in the copies, too: a later write to one shows in the other."""
        if not self.shared:
            return [output.clone() for output in self.outputs]
        storages: dict[int, torch.UntypedStorage] = {}
        for positions in self.shared:
            storage = self.outputs[positions[0]].untyped_storage().clone()  # type: ignore[no-untyped-call]
            storages.update((position, storage) for position in positions)
        return [_copy(output, storages.get(position)) for position, output in enumerate(self.outputs)]


def _copy(output: Tensor, storage: torch.UntypedStorage | None) -> Tensor:
    """A copy of its own, or a tensor in that copy of its storage."""
    if storage is None:
        return output.clone()
    made = torch.empty(0, dtype=output.dtype, device=output.device)
    return made.set_(storage, output.storage_offset(), output.shape, output.stride())


class Graph:
    """The captured graph of one variant at one set of shapes, and, while weights are swapped, its successor."""

    def __init__(
        self,
        launch: Launch,
        variant: Variant,
        static: list[Any],
        state_index: Mapping[str, int],
        pool: GraphPool,
        outputs: OutputMode,
    ) -> None:
        self._launch = launch
        self._static = static
        self._pool = pool
        self._copies = outputs == "copy"
        self._copied = [
            (argument.leaf, static[argument.leaf])
            for argument in variant.arguments
            if argument.leaf is not None and isinstance(static[argument.leaf], Tensor)
        ]
        self._mutated = variant.mutated_leaves
        self._mutated_state = [state_index[name] for name in variant.mutated_state]
        self._captured: Captured | None = None
        self._next: Captured | None = None

    def capture(self, state: State) -> Captured:
        """Record the graph for these tensors of the module, to be used from now on.

        Raises LibraryError where the model does something that a graph cannot hold.
        """
        self._captured = captured = self._record(state)
        return captured

    def prepare(self, state: State) -> None:
        """Record a successor, if the graph was ever captured, and use it from the first call with `state` on, or from
        `adopt`. Raises LibraryError; then, and after `discard`, all is as before."""
        if self._captured is not None:
            self._next = self._record(state)

    def adopt(self) -> None:
        """Let go of the old graph, and so of the old tensors."""
        with self._pool.turn.lock:
            self._pool.turn.follow()
            self._captured, self._next = self._next or self._captured, None

    def discard(self) -> None:
        with self._pool.turn.lock:
            self._pool.turn.follow()
            self._next = None

    def _record(self, state: State) -> Captured:
        """The model runs once before, on inputs of zeros and copies of what it writes to; while it is recorded it does
        not run. Values left there by another graph may be invalid inputs of this one, like an index out of bounds.

        Its outputs serve calls in any mode: they are inference tensors only where the model writes to such a buffer,
        which it may do within `torch.inference_mode()` alone.
        """
        inference = any(state[index].is_inference() for index in self._mutated_state)
        mode = torch.inference_mode(inference)
        with self._pool.turn.lock, torch.cuda.device(self._pool.device), mode, torch.no_grad():
            self._pool.turn.follow()
            stream = self._pool.stream
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            try:
                for _, destination in self._copied:
                    destination.zero_()
                # Loads kernels and libraries, and gives this thread its handles, which a capture cannot.
                self._launch(self._static, self._scratch(state))
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    with capturing(graph, self._pool.handle):
                        outputs = self._launch(self._static, state)
                    clear_by_kernels(graph)
                graph.instantiate()
                torch.cuda.current_stream().wait_stream(stream)
            except BaseException as error:
                self._pool.handle = torch.cuda.graph_pool_handle()  # torch 2.11 takes no further graph into this one
                if not isinstance(error, RuntimeError):  # raised by a signal's handler
                    raise
                raise LibraryError(
                    f"the model cannot be captured as a CUDA graph: {error}",
                    hint="set `cuda_graphs: never` for it; a graph holds no host synchronisation and no CPU operator",
                ) from error
            return Captured(graph, state, outputs, sharing_groups(outputs))

    def _scratch(self, state: State) -> State:
        """The same tensors, with copies of those that the model writes to."""
        scratch = State(state)
        for index in self._mutated_state:
            scratch[index] = state[index].clone()
        return scratch

    def launch(self, leaves: list[Any], state: State) -> list[Tensor]:
        """Copy in, replay, copy out; captures first where that was not done for these tensors of the module."""
        with self._pool.turn.lock:
            if not self._copies:
                self._pool.one_thread.check()
            self._pool.turn.follow()
            captured = self._captured
            if captured is None or state is not captured.state:
                if captured is not None and state.generation < captured.state.generation:
                    return self._launch(leaves, state)  # a call that began before the weights were swapped
                captured = self._next if self._next is not None and self._next.state is state else self._record(state)
                self._captured = captured
            # One by one: each is a memory copy, which needs no kernel, and kernels take milliseconds to load at first.
            for leaf, destination in self._copied:
                destination.copy_(leaves[leaf], non_blocking=True)
            captured.graph.replay()
            for leaf in self._mutated:
                write_into(leaves[leaf], self._static[leaf])
            return captured.copies() if self._copies else list(captured.outputs)


class GraphLaunch:
    """The launch of one variant: a graph for each set of shapes that has one, the direct launch for all others."""

    def __init__(self, direct: Launch, graphs: Mapping[tuple[Shape | None, ...], Graph], fixed: bool) -> None:
        """`fixed`: the variant has one set of shapes, so there is nothing to look up."""
        self.direct = direct
        self.graphs = dict(graphs)
        self._only = next(iter(self.graphs.values())) if fixed else None

    def capture(self, state: State) -> None:
        for graph in self.graphs.values():
            graph.capture(state)

    def __call__(self, leaves: list[Any], state: State) -> list[Tensor]:
        if self._only is not None:
            return self._only.launch(leaves, state)
        shapes = tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves)
        graph = self.graphs.get(shapes)
        return graph.launch(leaves, state) if graph else self.direct(leaves, state)


def graphs_of(launch: Launch) -> list[Graph]:
    """The graphs of a launch; none if it is direct."""
    return list(launch.graphs.values()) if isinstance(launch, GraphLaunch) else []


def add_graphs(
    attached: Sequence[Attached],
    dispatcher: Dispatcher,
    state_names: Sequence[str],
    device: torch.device,
    options: Graphs,
    take_state: TakeState,
    pool: GraphPool | None = None,
) -> list[Tensor]:
    """Give the variants that are launched as graphs a `GraphLaunch`, captured now if `capture` is "eager".

    `pool` is that of the model's other regions. Returns the static buffers. Raises LibraryError where a capture fails.
    """
    shapes_of = {index: _graph_shapes(dispatcher, index, options.use) for index in range(len(attached))}
    if not any(shapes_of.values()):
        return []
    largest = [
        max((math.prod(shapes[leaf] or ()) for each in shapes_of.values() for shapes in each), default=0)
        if isinstance(spec, TensorLeaf)
        else 0
        for leaf, spec in enumerate(dispatcher.signature.leaves)
    ]
    pool = pool or GraphPool(device)
    memory = pool.memory(dispatcher.signature, largest)
    state_index = {name: position for position, name in enumerate(state_names)}
    constants = [None if isinstance(leaf, TensorLeaf) else leaf.value for leaf in dispatcher.signature.leaves]
    for index, all_shapes in shapes_of.items():
        one, direct = attached[index], attached[index].launch
        if not all_shapes:
            _log.debug("bucket %s is launched directly", bucket_name(one.variant.bucket))
            continue
        began = time.perf_counter()
        graphs = {
            shapes: Graph(
                direct, one.variant, memory.static_leaves(shapes, constants), state_index, pool, options.outputs
            )
            for shapes in all_shapes
        }
        launch = GraphLaunch(direct, graphs, fixed=not dispatcher.is_range(index))
        one.launch = launch
        if options.capture == "eager":
            launch.capture(take_state())
            one.has_run = True
        _log.debug(
            "bucket %s is launched as %d CUDA graphs, %s in %.1f ms",
            bucket_name(one.variant.bucket),
            len(graphs),
            "captured" if options.capture == "eager" else "made",
            1000 * (time.perf_counter() - began),
        )
    return memory.buffers


def _graph_shapes(dispatcher: Dispatcher, index: int, use: str) -> list[tuple[Shape | None, ...]]:
    """The shapes of the leaves for which a variant has a graph."""
    variant = dispatcher.variants[index]
    launch = variant.launch
    picked = launch is not None and launch.graph
    if use == "never" or (use == "picked" and not picked):
        return []
    if dispatcher.is_range(index):
        return [dispatcher.leaf_shapes(dims) for dims in (launch.sizes if launch else ())]
    return [dispatcher.leaf_shapes(tuned_dims(variant.bucket))]
