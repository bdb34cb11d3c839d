"""The sizes that calls have, sampled: a trace for `aotc advise`, also of calls that were padded or missed."""

from __future__ import annotations

import json
import math
import random
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from aotc.call_table.dispatch import Shape
from aotc.errors import BindError
from aotc.machine.forks import renew_in_child
from aotc.runtime.call import CompiledCall
from aotc.runtime.compiled import Compiled
from aotc.store.files.writing import write_output


class ShapeSample:
    """A uniform sample of the sizes of all calls since the start or the last `take`.

    Up to `most` calls are all kept; of more, each call has the same chance to be among the kept ones (reservoir
    sampling, Li's algorithm L), so memory is bounded and few calls cost more than the counting. Any thread may call.
    A sample does not keep its model alive.

    Attributes:
        dims: the names of the sizes.
        seen: calls since the start or the last `take`.
    """

    def __init__(self, dims: Sequence[str], most: int = 10_000, seed: int | None = None) -> None:
        if most < 1:
            raise ValueError(f"most is {most}, and must be at least 1")
        self.dims = tuple(dims)
        self._most = most
        self._random = random.Random(seed)
        self._calls: weakref.WeakSet[CompiledCall] = weakref.WeakSet()  # each holds this sample
        self._lock = threading.RLock()
        self._start()
        renew_in_child(self, ShapeSample._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def _start(self) -> None:
        self.seen = 0
        self._kept: list[Shape] = []
        self._next = 1
        self._weight = 1.0

    def note(self, sizes: Shape) -> None:
        """Count one call of these sizes, in the order of `dims`."""
        with self._lock:
            self.seen += 1
            if self.seen >= self._next:
                self._keep(sizes)

    def _keep(self, sizes: Shape) -> None:
        if len(self._kept) < self._most:
            self._kept.append(sizes)
        else:
            self._kept[self._random.randrange(self._most)] = sizes
        if len(self._kept) < self._most:
            self._next = self.seen + 1
        else:  # how many calls are passed over until the next is kept
            self._weight *= math.exp(math.log(1 - self._random.random()) / self._most)
            skipped = math.log(1 - self._random.random()) / math.log1p(-self._weight) if self._weight < 1 else 0
            self._next = self.seen + int(skipped) + 1

    def lines(self) -> Iterator[str]:
        """The sample as JSON lines, the most frequent sizes first: `{"batch": 4, "seq": 312, "count": 17}`.

        Counts are scaled to all calls seen, so the lines of several replicas or hours can be concatenated.
        """
        with self._lock:
            kept, seen = list(self._kept), self.seen
        scale = max(1.0, seen / max(1, len(kept)))
        for sizes, count in sorted(Counter(kept).items(), key=lambda entry: (-entry[1], entry[0])):
            if min(sizes) > 0:
                yield json.dumps({**dict(zip(self.dims, sizes, strict=True)), "count": round(count * scale)})

    def take(self) -> list[str]:
        """`lines()`, and start anew: for one trace an hour, say."""
        with self._lock:
            lines = list(self.lines())
            self._start()
        return lines

    def write(self, path: str | Path) -> None:
        """Write `lines()` to a file, which is replaced whole. Raises StoreError where it cannot be written."""
        write_output(Path(path), "".join(f"{line}\n" for line in self.lines()).encode())

    def stop(self) -> None:
        """Note no further calls. What was kept stays."""
        for call in self._calls:
            if call.on_sizes == self.note:
                call.on_sizes = None

    def _attach(self, calls: Iterable[CompiledCall]) -> None:
        self._calls.update(calls)
        for call in self._calls:
            call.on_sizes = self.note


def sample_shapes(compiled: Compiled, *, most: int = 10_000) -> ShapeSample:
    """Sample the sizes of this model's calls from now on, those that miss included. A later sample takes its place.

    Of a model that was built by regions, the calls of the first region's first instance are sampled.

    Args:
        most: calls that are kept; a kept call takes about 100 bytes.

    Raises:
        BindError: the model has no dims, so all its calls have the same sizes.

    Example:
        >>> sample = sample_shapes(compiled)
        >>> y = compiled(torch.randn(4, 128, 256))
        >>> print(*sample.lines())
        {"batch": 4, "seq": 128, "count": 1}
        >>> sample.write("trace.jsonl")  # then: aotc advise trace.jsonl
    """
    calls = _calls_of(compiled)
    dims = calls[0].dims
    if not dims:
        raise BindError(
            f"`{compiled.artifact.model}` has no dims, so its calls have no sizes to sample",
            hint="name sizes in the manifest's shapes, like [batch, seq, 256]",
        )
    sample = ShapeSample(dims, most)
    sample._attach(call for call in calls if call.dims == dims)
    return sample


def _calls_of(compiled: Compiled) -> list[CompiledCall]:
    """The call of the model, or those of each form of its first region's first instance."""
    if not compiled.artifact.regions:
        return [compiled.forward]
    first = compiled.artifact.regions[0].instances[0]
    return [call for key, call in compiled.forward.regions.items() if key == first or key.startswith(f"{first}(")]
