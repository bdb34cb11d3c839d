"""Whether a call's arrays share memory with one another or with the module, for a model that writes to either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aotc.call_table.refusals import overlapping_elements_issue, shared_memory_issue, weight_memory_issue
from aotc.errors import Issue
from aotc.records import Artifact, TensorLeaf, names_of
from aotc.standalone.cpu_environment import open_cpu
from aotc.tensors.strides import overlaps_itself


def written_names(artifact: Artifact) -> frozenset[str]:
    """The names of the module's tensors that the model writes to."""
    return frozenset(name for variant in artifact.variants for name in variant.mutated_state)


class WrittenMemory:
    """What an artifact's code writes to: `inputs`, by their leaves' indices, and tensors of the module."""

    def __init__(self, artifact: Artifact) -> None:
        self.inputs = frozenset(index for variant in artifact.variants for index in variant.mutated_leaves)
        self._paths = {
            index: leaf.path for index, leaf in enumerate(artifact.signature.leaves) if isinstance(leaf, TensorLeaf)
        }
        names, live = written_names(artifact), artifact.state if artifact.weights == "live" else ()
        self._names = [spec.name for spec in live]
        self._written = [index for index, spec in enumerate(live) if not names.isdisjoint(names_of(spec))]
        self._read = [index for index in range(len(live)) if index not in self._written]
        self.anything = bool(self.inputs or self._written)

    def issues(self, leaves: Sequence[Any], state: Sequence[Any]) -> Iterator[Issue]:
        """Of tensors that are otherwise as they must be."""
        core, places = open_cpu(), list(self._paths)
        tensors, pairs = [leaves[index] for index in places], set()
        for index in self.inputs:
            met = [places[at] for at in core.overlapped(leaves[index], tensors)]
            pairs |= {(min(index, other), max(index, other)) for other in met if other != index}
        for pair in sorted(pairs):
            owner, other = pair if pair[0] in self.inputs else pair[::-1]
            yield shared_memory_issue(f"`{self._paths[owner]}`", self._paths[other])
        for index in sorted(self.inputs):
            tensor, path = leaves[index], self._paths[index]
            if tensor.read_only:
                yield Issue("the model writes to it, and it is read-only", where=path, hint="pass a copy")
            if 0 not in tensor.shape and overlaps_itself(tensor.shape, tensor.strides):
                yield overlapping_elements_issue(tensor.strides, path)
        written = [state[index] for index in self._written]
        for index, path in self._paths.items() if written else ():
            for at in core.overlapped(leaves[index], written)[:1]:
                yield shared_memory_issue(f"the buffer `{self._names[self._written[at]]}`", path)
        read = [state[index] for index in self._read] if self.inputs else []
        for index in sorted(self.inputs):
            for at in core.overlapped(leaves[index], read)[:1]:
                yield weight_memory_issue(self._names[self._read[at]], self._paths[index])
