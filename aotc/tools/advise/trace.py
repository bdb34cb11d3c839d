"""Traces: the sizes that a service has seen, one call or one kind of call a line.

JSON lines (`{"batch": 4, "seq": 312, "count": 17}`), lines of an access log that hold `batch=4` or `"batch": 4` for
every dim, and the JSON of `compiled.stats()` are told apart by the first line. Lines are added up as they are read, so
memory grows with the number of distinct sizes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

import msgspec

from aotc.amounts import counted
from aotc.errors import Issue, TraceError

DimSizes = tuple[int, ...]

COUNT = "count"
SHOWN_ISSUES = 5
"""Lines that an error shows; it counts the others."""
SHOWN_TEXT = 60
"""Characters of a wrong value that an error shows."""

LONGEST_LINE = 1 << 20
"""Bytes."""
MOST_DIMS = 32
LARGEST = 1 << 53
"""Of a count, and of the product of the largest sizes: costs are floating-point numbers."""

_BUCKET = re.compile(r"(?:(?P<region>\S+) )?(?P<sizes>\w+=\d+(?:\.\.\d+(?: step \d+)?)?(?:,\w+=.+)?)")


class Trace(NamedTuple):
    """`counts`: how many calls had which sizes, in the order of `dims`. `notes`: what was left out, or assumed."""

    dims: tuple[str, ...]
    counts: dict[DimSizes, int]
    notes: tuple[str, ...] = ()

    @property
    def calls(self) -> int:
        return sum(self.counts.values())


def lines_of(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines of a file. Raises TraceError for one that is too long for any trace, as a device has."""
    number = 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise TraceError(f"{name}:{number} is longer than {LONGEST_LINE} bytes", hint=_LINE)
        yield line


_LINE = 'a line is {"batch": 4, "seq": 312, "count": 17}'


def read_trace(lines: Iterable[bytes], name: str, dims: Sequence[str] = ()) -> Trace:
    """The trace in these lines; `name` is the file's, for messages.

    Without `dims`, the dims are the keys of the first JSON line; with them, other keys are ignored. Raises TraceError
    with every line that cannot be read.
    """
    lines = iter(lines)
    _check_names(dims, name)
    blank = 0
    first = b""
    for first in lines:
        if first.strip():
            break
        blank += 1
    if not first.strip():
        raise TraceError(f"{name} is empty", hint=_LINE)
    if not first.lstrip().startswith(b"{"):
        return _read_log(chain([first], lines), name, dims)
    document = _decoded(first)
    if document is None and first.strip() == b"{":
        document = _decoded(first + b"".join(lines))
    if isinstance(document, dict) and isinstance(document.get("buckets"), dict):
        return _read_stats(document, name, dims)
    found = tuple(dims) or _dims_of(document, first, name, blank + 1)
    return _read_json(chain([first], lines), name, found, blank + 1)


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _dims_of(document: Any, text: bytes, name: str, line: int) -> tuple[str, ...]:
    if document is None:
        shown = text.decode(errors="replace").strip()
        shown = shown if len(shown) <= SHOWN_TEXT else shown[:SHOWN_TEXT] + "…"
        raise TraceError(f"{name}:{line} is not JSON: {shown}", hint=_LINE)
    dims = tuple(sorted(key for key in document if key != COUNT)) if isinstance(document, dict) else ()
    if not dims:
        raise TraceError(
            f"{name}:{line} names no dim", hint='a line is {"batch": 4, "seq": 312}, or name the dims with --dims'
        )
    _check_names(dims, f"{name}:{line}")
    return dims


def _check_names(dims: Sequence[str], where: str) -> None:
    """Raises TraceError for more dims than a model has, and for a name that no terminal should show."""
    hint = "name those of the model with --dims"
    if len(dims) > MOST_DIMS:
        raise TraceError(f"{where} names {len(dims)} dims; at most {MOST_DIMS} are advised on", hint=hint)
    if wrong := [dim for dim in dims if not (dim and dim.isprintable())]:
        raise TraceError(f"{where} names the dim {wrong[0][:SHOWN_TEXT]!r}, which is not a name", hint=hint)


def _read_json(lines: Iterable[bytes], name: str, dims: tuple[str, ...], line: int) -> Trace:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    counts: Counter[DimSizes] = Counter()
    flaws: list[Issue] = []
    bad = 0
    for number, text in enumerate(lines, line):
        try:
            entry = decode(text)
            shape = tuple([entry[dim] for dim in dims])
            count = entry.get(COUNT, 1)
            if all(type(size) is int and size > 0 for size in shape) and type(count) is int and 0 <= count <= LARGEST:
                counts[shape] += count
                continue
            flaw = "; ".join(_wrong_numbers([*zip(dims, shape, strict=True)], count))
        except KeyError as error:
            flaw = f"the dim `{error.args[0]}` is missing"
        except msgspec.DecodeError as error:
            if not text.strip():
                continue
            flaw = f"this is not a JSON object: {error}"
        bad += 1
        if len(flaws) < SHOWN_ISSUES:
            flaws.append(Issue(flaw, where=f"{name}:{number}"))
    if bad:
        raise TraceError(
            f"{bad} line{'' if bad == 1 else 's'} of {name} cannot be read",
            issues=tuple(flaws),
            hint=f'a line is {{{", ".join(f""""{dim}": 1""" for dim in dims)}, "count": 1}}',
        )
    return _checked(Trace(dims, {shape: count for shape, count in counts.items() if count}), name)


def _wrong_numbers(sizes: Sequence[tuple[str, Any]], count: Any) -> Iterator[str]:
    for name, value, least in [*((name, value, 1) for name, value in sizes), (COUNT, count, 0)]:
        if type(value) is not int or value < least:
            shown = msgspec.json.encode(value).decode()
            shown = shown if len(shown) <= SHOWN_TEXT else shown[:SHOWN_TEXT] + "…"
            yield f"`{name}` is {shown}; a whole number from {least} is expected"
        elif name == COUNT and value > LARGEST:
            yield f"`{name}` is {min(value, 10**30):.3g}; at most {LARGEST:.3g} is expected"


def _read_log(lines: Iterable[bytes], name: str, dims: Sequence[str]) -> Trace:
    if not dims:
        raise TraceError(
            f"{name} is not JSON lines, and an access log does not say which of its fields are dims",
            hint="name them with --dims, or the model with --manifest",
        )
    patterns = [
        re.compile(
            rb"""(?:^|[\s,;&?|{("'\[])""" + re.escape(dim).encode() + rb"""["']?\s*[=:]\s*["']?([0-9]{1,18})(?![\w.])"""
        )
        for dim in dims
    ]
    counts: Counter[DimSizes] = Counter()
    skipped = 0
    for text in lines:
        found = [pattern.search(text) for pattern in patterns]
        shape = tuple([int(one[1]) for one in found if one])
        if len(shape) == len(dims) and 0 not in shape:
            counts[shape] += 1
        elif text.strip():
            skipped += 1
    notes = (f"{name}: {counted(skipped, 'line')} left out: a dim is missing",) if skipped else ()
    return _checked(Trace(tuple(dims), dict(counts), notes), name)


def _checked(trace: Trace, name: str) -> Trace:
    if not trace.counts:
        dims = " ".join(f"{dim}=4" for dim in trace.dims)
        raise TraceError(f"{name} holds no call", hint=f"a line of an access log holds `{dims}`")
    largest = [max(sizes) for sizes in zip(*trace.counts, strict=True)]
    if math.prod(largest) > LARGEST:
        told = ", ".join(
            f"`{dim}` up to {min(size, 10**30):.3g}" for dim, size in zip(trace.dims, largest, strict=True)
        )
        raise TraceError(
            f"{name} holds sizes that no tensor has: {told}",
            hint="leave out what is not a size, or name the dims with --dims",
        )
    return trace


# -- compiled.stats() -------------------------------------------------------------------------------------------------


def _read_stats(stats: Mapping[str, Any], name: str, dims: Sequence[str]) -> Trace:
    """Counters know buckets, not calls: padded calls get their bucket's sizes, calls of ranges are left out."""
    counts: Counter[DimSizes] = Counter()
    padded = ranged = 0
    found = tuple(dims)
    for sizes, entry in _first_region(stats["buckets"], name):
        calls = _number(entry, "calls", name)
        found = found or tuple(sorted(sizes))
        if missing := [dim for dim in found if dim not in sizes]:
            raise TraceError(f"the buckets of {name} have no dim `{missing[0]}`", hint=f"they have {', '.join(sizes)}")
        values = tuple(sizes[dim] for dim in found)
        if not all(value.isdecimal() for value in values):
            ranged += calls
        elif calls:
            counts[tuple(map(int, values))] += calls
            padded += _number(entry, "padded_calls", name)
    misses = _number(stats, "misses", name)
    notes = [
        f"padded: {counted(padded, 'call')}, counted with the sizes of the bucket: stats() keeps no others"
        if padded
        else "",
        f"in ranges: {counted(ranged, 'call')}, left out: stats() does not keep their sizes" if ranged else "",
        f"misses: {counted(misses, 'call')}, left out: stats() does not keep their sizes" if misses else "",
    ]
    if any(notes):
        notes.append("aotc.telemetry.sample_shapes(compiled) keeps the sizes of all calls")
    return _checked(Trace(found, dict(counts), tuple(filter(None, notes))), name)


def _first_region(buckets: Mapping[str, Any], name: str) -> Iterator[tuple[dict[str, str], Any]]:
    """The sizes of each bucket as text. Every region of a model counts the same calls: the first one's are taken."""
    region = None
    for text, entry in buckets.items():
        match = _BUCKET.fullmatch(text)
        if match is None:
            raise TraceError(f"{name} has a bucket {text!r} without dims", hint="a model without dims needs one bucket")
        if region is None or match["region"] == region[0]:
            region = (match["region"],)
            yield dict(part.split("=", 1) for part in match["sizes"].split(",")), entry


def _number(entry: Any, key: str, name: str) -> int:
    value = entry.get(key, 0) if isinstance(entry, dict) else None
    if type(value) is not int or value < 0:
        raise TraceError(
            f"{name}: `{key}` is not a number of calls",
            hint="write it with json.dumps(msgspec.to_builtins(compiled.stats()))",
        )
    return value
