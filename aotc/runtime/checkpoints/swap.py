"""Other weights in the place of those that are served: all or nothing, while calls go on.

The new tensors lie beside the old ones before any call sees them, graphs are captured for them, and then one assignment
lets later calls take the new `State`. Nothing is written to what a running call reads.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from aotc.errors import BindError, LibraryError
from aotc.machine.cuda_capture import is_captured
from aotc.runtime.checkpoints.checkpoint_files import Checkpoint, Weights, open_weights
from aotc.runtime.cuda.captures import run_captured
from aotc.runtime.cuda.graphs import Graph, graphs_of

if TYPE_CHECKING:
    from aotc.runtime.call import CompiledCall
    from aotc.runtime.state.call_state import State, Swap, TakeState
    from aotc.runtime.state.state_source import Bound
    from aotc.runtime.variant import Attached


class Streams:
    """The CUDA streams on which calls have launched work: who may still read what is replaced.

    Those of torch's own are kept by their handles, of which there are some dozens; none is ever destroyed. One that
    others made may be gone when it is asked for, and another one may have its handle. So there the GPU is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: set[int] = set()
        self._others = False
        self._waiting: list[Tensor] = []
        self._in_graphs: list[State] = []

    def note(self) -> None:
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        if handle not in self._seen:
            self._note_new(handle)

    def _note_new(self, handle: int) -> None:
        if _is_torchs_own(self._device):
            self._seen.add(handle)
        else:
            self._others = True

    def noted(self, take: TakeState) -> TakeState:
        """`take`, which also notes the stream that the call runs on."""
        seen, current, index = self._seen, torch._C._cuda_getCurrentRawStream, self._device.index

        def take_noted() -> State:
            handle = current(index)
            if handle not in seen:
                self._note_new(handle)
            return take()

        return take_noted

    def retire(self, swap: Swap) -> None:
        """Keep what was replaced until no call holds the old state, and then until the work on every stream is done.

        What lies on another device, around regions, no compiled code reads.
        """
        pairs = zip(swap.base, swap.state, strict=True)
        replaced = [old for old, new in pairs if old is not new and old.device == self._device]
        weakref.finalize(swap.base, self._release, replaced).atexit = False

    def keep(self, owner: object, tensors: Callable[[], Sequence[Tensor]]) -> None:
        """Keep `tensors()` until `owner` is gone, and then until the work on every stream is done."""
        weakref.finalize(owner, lambda: self._release(tensors())).atexit = False

    def keep_for_replays(self, state: State) -> None:
        """A CUDA graph of the caller's reads these tensors for as long as it is replayed, also after a swap."""
        if not any(kept is state or [*map(id, kept)] == [*map(id, state)] for kept in self._in_graphs):
            self._in_graphs.append(state)

    def recorded(self, attached: Attached, state: State) -> Callable[..., Any]:
        """How a call runs that the caller records into a CUDA graph."""
        self.keep_for_replays(state)
        return functools.partial(run_captured, attached)

    def is_captured(self) -> bool:
        """Whether what this thread launches now is recorded into a CUDA graph."""
        return is_captured(self._device)

    def _release(self, tensors: Sequence[Tensor]) -> None:
        """The allocator gives the memory of a tensor away at once, unless it knows of other streams that read it."""
        if self._others:
            self._release_all(tensors)
            return
        for handle in list(self._seen):
            stream = _stream(handle, self._device)
            for tensor in tensors:
                tensor.record_stream(stream)

    def _release_all(self, tensors: Sequence[Tensor]) -> None:
        """A GPU cannot be waited for while a CUDA graph is captured; then they are kept until the next release."""
        self._waiting += tensors
        if not self.is_captured():
            torch.cuda.synchronize(self._device)
            self._waiting.clear()


def _is_torchs_own(device: torch.device) -> bool:
    """Whether the current stream is the default one, or of torch's pools: those have odd ids (CUDAStream.cpp)."""
    number: int = torch.cuda.current_stream(device).stream_id
    return number == 0 or number % 2 == 1


def _stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]


def update_weights(compiled: CompiledCall, weights: Weights) -> None:
    """As `Compiled.update_weights`."""
    if compiled._streams and compiled._streams.is_captured():
        raise BindError(
            f"the weights of `{compiled.artifact.model}` cannot be replaced while a CUDA graph is captured",
            hint="replace them before or after; the captured graph goes on reading those of its capture",
        )
    if cast(Any, compiled._updating)._is_owned():
        raise BindError(
            f"`{compiled.artifact.model}` is being updated by this very thread, as where a signal interrupts it",
            hint="let a signal's handler set a flag, and update where the flag is read",
        )
    with compiled._updating:
        bound, parts = compiled._replaceable()
        graphs = [[graph for one in part for graph in graphs_of(one.launch)] for part in parts]
        replace_weights(bound, compiled._part_of(open_weights(weights)), graphs, compiled._streams, compiled.device)
    for call in compiled.parts():
        call.forget()  # the extension holds the old tensors


def replace_weights(
    bound: Bound,
    checkpoint: Checkpoint,
    graphs: Sequence[Sequence[Graph]],
    streams: Streams | None,
    device: torch.device,
) -> None:
    """Read, check, prepare, switch. `graphs` are those of each part of a swap; of the whole, where it has no parts.

    Raises BindError, LibraryError; then nothing has changed.
    """
    with _typed_memory_error():
        tensors = bound.replacements(checkpoint)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # calls on other streams read them
        committed = False
        while not committed:  # the module's owner may have replaced tensors meanwhile
            swap = bound.swap(tensors)
            if streams is not None:  # before: a signal's handler may raise as soon as it is committed
                streams.retire(swap)
            with ExitStack() as undo:
                for part, own in zip(swap.parts or (swap,), graphs, strict=True):
                    for graph in own if part.state is not part.base else ():
                        undo.callback(graph.discard)
                        graph.prepare(part.state)
                committed = bound.commit(swap)
                if committed:
                    undo.pop_all()
    for graph in chain.from_iterable(graphs):
        graph.adopt()


@contextmanager
def _typed_memory_error() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise LibraryError(
            f"the GPU has no room for the old and the new weights side by side: {error}",
            hint="give fewer tensors at once, or load the new weights in a new process",
        ) from error
