"""What a process knows of the calls that are remembered, so that a call of a new form reads no file, and writes one
seldom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from aotc.tools.recording.seen_calls import MOST_KINDS, SeenArgument, SeenTensor, kind_in, sizes_of_call
from aotc.tools.remembering.memory.memory import MOST_CALLS, Kind, Memory
from aotc.tools.remembering.memory.remembered_calls import as_json, from_json
from aotc.tools.remembering.memory.varying_floats import (
    FloatsByPath,
    argument_varies,
    floats_in,
    has_varying,
    varying_argument,
)

PlainConstant = tuple[type, Any]
"""A plain value with its type."""


class RememberedCall(NamedTuple):
    """A call, as it is remembered: as JSON, in its modes of torch; what is the same for all calls of its kind; and its
    sizes."""

    json: dict[str, Any]
    ambient: Mapping[str, str | None]
    kind: object
    sizes: object


def remembered_call(seen: Mapping[str, SeenArgument], ambient: Mapping[str, str | None]) -> RememberedCall:
    """Raises ManifestError for what JSON does not hold."""
    json = {name: as_json(value) for name, value in seen.items()}
    return RememberedCall(json, ambient, kind_in(seen, ambient), sizes_of_call(seen))


class KindIndex:
    """The kinds that are remembered, by what is the same for their calls, with the sizes of these."""

    def __init__(self, memory: Memory | None, failed: Callable[[int], str] = lambda number: "") -> None:
        """`failed`: why the kind with a number has no code; "" where nothing failed."""
        self.builds = memory.builds if memory is not None else 0
        self.numbers: dict[object, int] = {}
        self.sizes: list[set[object]] = []
        self.built: list[int] = []
        self.constants: set[PlainConstant] = set()
        """Of all kinds, those that are arguments, or within one."""
        self._floats: list[FloatsByPath] = []
        """Those of each kind, by their paths."""
        self.failures = [failed(number) for number in range(len(memory.kinds if memory is not None else ()))]
        """Of each kind, why it has no code; "" where nothing failed."""
        for kind in memory.kinds if memory is not None else ():
            self._add_kind(key_of(kind), _read(kind.calls[0]), kind.built)
            self.sizes[-1].update(sizes_in(kind))
        self.unwritten: list[RememberedCall] = []

    @property
    def is_full(self) -> bool:
        """Whether there are as many kinds as may be."""
        return len(self.numbers) >= MOST_KINDS

    @property
    def has_varying(self) -> bool:
        """Whether a float had as many values as may be."""
        return has_varying(self._floats)

    def varying(self, seen: Mapping[str, SeenArgument]) -> str:
        """The path of a float in a call of a new kind that had as many values as may be, and has another one here; ""
        where there is none."""
        return varying_argument(floats_in(seen), self._floats)

    def add(self, call: RememberedCall) -> str:
        """Keep a call, to be written, if its sizes are new; else why it is not, in words: there are as many kinds,
        sizes, or values of a float as may be."""
        if (number := self.numbers.get(call.kind)) is None:
            seen = _read(call.json)
            if path := self.varying(seen):
                return argument_varies(path)
            if self.is_full:
                return beyond_kinds()
            number = self._add_kind(call.kind, seen, 0)
        if call.sizes not in self.sizes[number]:
            if len(self.sizes[number]) >= MOST_CALLS:
                return f"calls of more than {MOST_CALLS} sizes: name ranges=, or pad them"
            self.sizes[number].add(call.sizes)
            self.unwritten.append(call)
        return ""

    def _add_kind(self, kind: object, seen: Mapping[str, SeenArgument], built: int) -> int:
        number = self.numbers[kind] = len(self.built)
        self.sizes.append(set())
        self.built.append(built)
        self.failures.extend([""] * (len(self.built) - len(self.failures)))
        self.constants.update(constants_of(seen))
        self._floats.append(floats_in(seen))
        return number

    def has_unbuilt(self, number: int) -> bool:
        """Whether calls of a kind have no code yet."""
        return self.built[number] < len(self.sizes[number])


def beyond_kinds() -> str:
    return f"calls of more than {MOST_KINDS} kinds: pass a number that varies as a tensor"


def keep_calls(memory: Memory, calls: list[RememberedCall]) -> bool:
    """Add calls to what is remembered, as far as they are new and there may be more. Whether any was added."""
    index = KindIndex(memory)
    for call in calls:
        index.add(call)
    for call in index.unwritten:
        if (number := index.numbers[call.kind]) == len(memory.kinds):
            memory.kinds.append(Kind(dict(call.ambient)))
        memory.kinds[number].calls.append(call.json)
    return bool(index.unwritten)


def key_of(kind: Kind, call: Mapping[str, Any] | None = None) -> object:
    """What is the same for all calls of a kind, by one of them: by the first, or the one that is given."""
    return kind_in(_read(kind.calls[0] if call is None else call), kind.ambient)


def sizes_in(kind: Kind) -> list[object]:
    """The sizes of the calls of a kind."""
    return [sizes_of_call(_read(call)) for call in kind.calls]


def _read(call: Mapping[str, Any]) -> dict[str, SeenArgument]:
    return {name: from_json(value) for name, value in call.items()}


def constants_of(value: Any) -> list[PlainConstant]:
    """The plain values that are within the arguments of a call, of which kinds are apart."""
    if isinstance(value, bool | int | float | str):
        return [(type(value), value)]
    if isinstance(value, Mapping):
        return [constant for item in value.values() for constant in constants_of(item)]
    if isinstance(value, list | tuple) and not isinstance(value, SeenTensor):
        return [constant for item in value for constant in constants_of(item)]
    return []
