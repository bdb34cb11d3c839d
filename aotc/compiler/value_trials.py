"""Which recorded integers a model takes as values: by running it in eager with others in their place.

`aotc.record` keeps the values of small integer inputs, since they may be indices of another input, tokens that the
model looks for, lengths, offsets or grids. Most are not: any token will do. So the model is called with other values,
the least, the greatest and random ones: first within the limits of all that were recorded, then up to a size of the
call, as edges that name nodes of the graph. Where it neither fails nor returns other sizes, nor NaN or infinities, the
input's `init` is `randint` with those limits; else the recorded values stay.

Where they do, a range is right only if the model takes them at other sizes, too, cut or repeated: that is tried, and
where it does not, each recorded size is a bucket of its own.

A wrong index may end the process, so all of it runs in a fork, on one thread and a CPU.
"""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from aotc.machine.processes import die_with_parent
from aotc.manifest import ModelSpec
from aotc.manifest.inputs import TensorInput, parse_inputs
from aotc.manifest.recorded_values import recorded_references
from aotc.manifest.sizes import extreme_dims
from aotc.manifest.types import RecordedCall
from aotc.models.calls import call_model, modes_of, signature_leaves, writable_buffers
from aotc.models.example_inputs import randint_limits, values_of
from aotc.models.factory import build_module
from aotc.models.input_forms import with_inits
from aotc.models.signature import make_signature
from aotc.records import Dims, SizeRange, takes, tuned_dims

SECONDS = 20.0
"""Of CPU time for one model, after which no further input is tried."""
MOST_SIZES = 4
MOST_DIMS = 3

Init = dict[str, Any]
TrialOutcome = tuple[Any, ...]


class Tried(msgspec.Struct, frozen=True):
    """`inits`: of inputs that may have other values, by their paths. `fixed`: the sizes of the recorded calls, where
    others do not go with the recorded values."""

    inits: dict[str, Init] = {}
    fixed: tuple[Dims, ...] = ()


def try_values(spec: ModelSpec, folder: Path) -> Tried:
    """Try a model's recorded inputs, in a process of its own. Nothing is found where that ends by itself."""
    reading, writing = os.pipe()
    parent = os.getpid()
    if (child := os.fork()) == 0:
        try:
            die_with_parent(parent)
            resource.setrlimit(resource.RLIMIT_CPU, (3 * int(SECONDS), 3 * int(SECONDS)))
            torch.set_num_threads(1)
            os.write(writing, msgspec.json.encode(_Trials(spec, folder).tried()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return msgspec.json.decode(answer, type=Tried) if answer else Tried()


class _Trials:
    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        self.module = build_module(spec, folder)
        self.signature = make_signature(spec, self.module)
        self.written = writable_buffers(self.module)
        self.references = {leaf.path: reference for leaf, reference in recorded_references(spec)}
        sizes = [dims for bucket in spec.buckets for dims in (tuned_dims(bucket), _smallest(bucket))]
        distinct = [dims for number, dims in enumerate(sizes) if dims not in sizes[:number]]
        outcomes = [(dims, self.run(spec, dims)) for dims in distinct[:MOST_SIZES]]
        self.expected = [(dims, outcome) for dims, outcome in outcomes if outcome is not None]

    def tried(self) -> Tried:
        if not self.expected:
            return Tried()  # eager does not take the recorded values either, as capture will say
        inits = self.free()
        spec = with_inits(self.spec, inits)
        if not inits.keys() < self.references.keys() or all(
            map(self.holds, self.between(spec), itertools.repeat(spec))
        ):
            return Tried(inits)
        return Tried(inits, self.recorded_sizes())

    # -- which values are free ----------------------------------------------------------------------------------------

    def free(self) -> dict[str, Init]:
        within = {path: self.limits(path) for path in self.references}
        if self.take(within):
            return within
        found: dict[str, Init] = {}
        for path in self.references:
            candidates = [within[path], *self.up_to_sizes(path)]
            if init := next((each for each in candidates if self.take({path: each})), None):
                found[path] = init
        while found and not self.take(found):  # one alone, and not together, as starts and ends
            found.popitem()
        return found

    def take(self, inits: Mapping[str, Init]) -> bool:
        """Whether the model does with other values what it does with the recorded ones."""
        spec = with_inits(self.spec, inits)
        draws = ((1, None), (0, "least"), (0, "greatest"), (2, None))
        return all(
            time.process_time() < SECONDS and self.run(spec, dims, seed, end, inits) == expected
            for dims, expected in self.expected
            for seed, end in draws
        )

    def run(
        self, spec: ModelSpec, dims: Dims, seed: int = 0, end: str | None = None, inits: Mapping[str, Init] = {}
    ) -> TrialOutcome | None:
        """What kinds of results a call gives; None where it fails. `end`: the inputs of `inits` have this limit."""
        try:
            leaves = signature_leaves(spec, self.signature, dims, "cpu", seed, self.folder)
            for leaf, value in zip(self.signature.leaves, leaves, strict=True):
                if end is not None and leaf.path in inits:
                    low, high = randint_limits(inits[leaf.path]["randint"], dims)
                    value.fill_(low if end == "least" else high - 1)
            with modes_of(spec, "cpu"):
                result = call_model(self.module, self.signature, self.written, leaves)
        except Exception:  # whatever the model raises
            return None
        return tuple(map(_kind, result))

    # -- limits -------------------------------------------------------------------------------------------------------

    def limits(self, path: str) -> Init:
        """Of all values that were recorded."""
        ends = [_ends(call, path) for call in self._calls(path)]
        return {"randint": [min(0, *(low for low, _ in ends)), 1 + max(high for _, high in ends)]}

    def up_to_sizes(self, path: str) -> Iterator[Init]:
        """Up to a size of the call, or to one more, where the values were in each call; the nearest ones first."""
        calls = self._calls(path)
        ends = [_ends(call, path) for call in calls]
        slack: dict[str, int] = {}
        for leaf in parse_inputs(self.spec.inputs)[1]:
            for axis, entry in enumerate(leaf.shape if isinstance(leaf, TensorInput) else ()):
                if not isinstance(entry, str):
                    continue
                above = [call.shapes[leaf.path][axis] - high for call, (_, high) in zip(calls, ends, strict=True)]
                if min(above) >= 0:
                    slack.setdefault(entry if min(above) > 0 else f"{entry} + 1", sum(above))
        low = min(least for least, _ in ends)
        for text in sorted(slack, key=lambda text: slack[text])[:MOST_DIMS]:
            yield {"randint": [min(low, 0), text]}
            if low > 0:
                yield {"randint": [low, text]}

    def _calls(self, path: str) -> list[RecordedCall]:
        return [call for call in self.spec.recorded[self.references[path]] if path in call.values]

    # -- other sizes --------------------------------------------------------------------------------------------------

    def between(self, spec: ModelSpec) -> Iterator[Dims]:
        """Sizes of the ranges at which nothing needs to have been recorded."""
        for bucket in spec.buckets:
            ranges = {dim: size for dim, size in bucket.items() if isinstance(size, SizeRange)}
            if ranges:
                yield from itertools.islice(extreme_dims(bucket, bucket), 2**MOST_DIMS)
            for dim, size in ranges.items():
                for other in (size.min + 1, (size.min + size.max) // 2, size.max - 1):
                    if takes(size, other):
                        yield {**tuned_dims(bucket), dim: other}

    def holds(self, dims: Dims, spec: ModelSpec) -> bool:
        if time.process_time() >= 2 * SECONDS:
            return True  # `aotc verify` will tell
        outcome, (_, expected) = self.run(spec, dims), self.expected[0]
        return outcome is not None and all(
            kind[-1] is other[-1] for kind, other in zip(outcome, expected, strict=False)
        )

    def recorded_sizes(self) -> tuple[Dims, ...]:
        """The dims of every recorded call that says all of them."""
        leaves = [leaf for leaf in parse_inputs(self.spec.inputs)[1] if isinstance(leaf, TensorInput)]
        named = {dim for bucket in self.spec.buckets for dim in bucket}
        found = []
        for call in itertools.chain.from_iterable(self.spec.recorded.values()):
            dims = {
                entry: size
                for leaf in leaves
                for entry, size in zip(leaf.shape, call.shapes.get(leaf.path, ()), strict=False)
                if isinstance(entry, str) and entry in named
            }
            if dims.keys() == named and dims not in found:
                found.append(dims)
        return tuple(found)


def _smallest(bucket: Mapping[str, Any]) -> Dims:
    return {dim: size.min if isinstance(size, SizeRange) else size for dim, size in bucket.items()}


def _ends(call: RecordedCall, path: str) -> tuple[int, int]:
    """The least and the greatest of recorded values."""
    tensor = values_of(call, path)
    return int(tensor.min()), int(tensor.max())


def _kind(item: Any) -> tuple[Any, ...]:
    """Of a result: what must be the same with other values."""
    if not isinstance(item, Tensor):
        return type(item).__name__, True
    is_number = item.is_floating_point() or item.is_complex()
    return tuple(item.shape), str(item.dtype), not is_number or bool(item.isfinite().all())
