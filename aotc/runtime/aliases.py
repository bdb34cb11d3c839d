"""Whether a call's inputs share memory with one another or with the module, for a model that writes to either.

Imported only for such models: compiled code was made for tensors that do not overlap.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aotc.call_table.refusals import overlapping_elements_issue, shared_memory_issue, weight_memory_issue
from aotc.errors import Issue
from aotc.tensors.overlaps import Places, overlapping
from aotc.tensors.strides import overlaps_itself

if TYPE_CHECKING:
    from aotc.records import Artifact
    from aotc.runtime.guards import Guards
    from aotc.runtime.state.call_state import State


def input_alias_issues(guards: Guards, leaves: Sequence[Any]) -> list[Issue]:
    """Why inputs as they came, dense or not, must not be written to by the model."""
    tensors = [leaves[index] for index, *_ in guards.tensors]
    paths = [leaf.path for _, leaf, *_ in guards.tensors]
    written = {position for position, (index, *_) in enumerate(guards.tensors) if index in guards.mutated}
    found = []
    for pair in sorted(overlapping(tensors, written)):
        other, one = pair if pair[0] in written else pair[::-1]
        found.append(shared_memory_issue(f"`{paths[other]}`", paths[one]))
    return found + [
        overlapping_elements_issue(tensor.stride(), paths[position])
        for position, tensor in enumerate(tensors)
        if position in written and tensor.numel() and overlaps_itself(tensor.shape, tensor.stride())
    ]


def meeting_inputs(guards: Guards) -> Callable[[Sequence[Any]], bool]:
    """A function: whether inputs, which are dense, share memory with one that the model writes to.

    Memory is told by its addresses, as others than torch make several tensors of one buffer.
    """
    written_of = [(index, index in guards.mutated) for index, *_ in guards.tensors]

    def meet(leaves: Sequence[Any]) -> bool:
        spans = []
        for index, written in written_of:
            tensor = leaves[index]
            first = tensor.data_ptr()
            spans.append((first, first + tensor.nbytes, written))
        spans.sort()
        read_end = written_end = 0
        for first, end, written in spans:
            if first < end:  # an empty one may lie anywhere
                if first < written_end or (written and first < read_end):
                    return True
                if written:
                    written_end = max(written_end, end)
                else:
                    read_end = max(read_end, end)
        return False

    return meet


class Owned:
    """Named tensors, searched for the one whose memory an input shares."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names, self._places = list(tensors), Places(list(tensors.values()))

    def of(self, tensor: Tensor) -> list[str]:
        """The first that shares memory with the tensor, if one does."""
        return [self._names[index] for index in self._places.overlapped_by(tensor)[:1]]


class StateAliases:
    """Inputs in the memory of the module's tensors, where the model writes to one of the two."""

    def __init__(self, guards: Guards, artifact: Artifact) -> None:
        written = {name for variant in artifact.variants for name in variant.mutated_state}
        live = artifact.state if artifact.weights == "live" else ()
        self._state_names = [spec.name for spec in live]
        self._written_state = [
            (index, spec.name) for index, spec in enumerate(live) if {spec.name, *spec.aliases} & written
        ]
        self._tensors, self._mutated = guards.tensors, guards.mutated
        self._written_inputs = [(index, leaf.path) for index, leaf, *_ in self._tensors if index in self._mutated]
        self._owners: tuple[Callable[[], State | None], Owned, Owned] = (lambda: None, Owned({}), Owned({}))

    def issues(self, leaves: Sequence[Any], state: State) -> list[Issue]:
        """Inputs that share memory with the module, as what a call returned may, where the model writes to either."""
        known, written, read = self._owners
        if known() is not state:
            names = {index: f"the buffer `{name}`" for index, name in self._written_state}
            others = {index: name for index, name in enumerate(self._state_names) if index not in names}
            written = Owned({name: state[index] for index, name in names.items()})
            read = Owned({name: state[index] for index, name in others.items()} if self._mutated else {})
            self._owners = weakref.ref(state), written, read
        shared = (
            shared_memory_issue(name, leaf.path)
            for index, leaf, *_ in self._tensors
            for name in written.of(leaves[index])
        )
        return [
            *shared,
            *(
                weight_memory_issue(name, path)
                for index, path in self._written_inputs
                for name in read.of(leaves[index])
            ),
        ]
