"""What a shared library requires of other libraries: its undefined symbols, and versions of symbols.

The format is that of the System V ABI and of the Linux Standard Base (5.0, "Symbol Versioning"), 64 bit, little-endian.
A load reads it too (`compat="abi"`), which needs no package beyond torch: hence not pyelftools.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SYMBOLS, NEEDED, VERSIONS, _DYNAMIC = 11, 0x6FFFFFFE, 0x6FFFFFFF, 6
"""Types of sections: SHT_DYNSYM, SHT_GNU_verneed, SHT_GNU_versym, SHT_DYNAMIC."""
_NEEDED_TAG = 1  # DT_NEEDED
_UNVERSIONED = 1  # VER_NDX_GLOBAL; higher indices name a version
_HIDDEN = 0x8000
_GLOBAL = 1  # STB_GLOBAL; a weak symbol may stay undefined
_VERSION = re.compile(r"(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)*)")
_PACKED_RELOCATIONS = "GLIBC_ABI_DT_RELR"
"""Needed by a library with relocations that glibc can read from 2.36 on."""


Bytes = mmap.mmap | bytes | bytearray


class _Section(NamedTuple):
    offset: int
    size: int
    entries: int
    strings: int
    """The offset of its names."""


def undefined_symbols(path: str | Path) -> list[str]:
    """The undefined symbols, except weak ones, which may be missing. Raises ValueError for a file that is damaged, or
    no library."""
    with _mapped(path) as data:
        return undefined_in(data)


def undefined_in(data: Bytes) -> list[str]:
    """As `undefined_symbols`, of a library's bytes."""
    with _damaged():
        return [name for _, name in _undefined(data)]


def unversioned_symbols(path: str | Path) -> list[str]:
    """Of `undefined_symbols`, those that no version is asked of, in their order: what glibc, libstdc++ and libgomp
    define has versions, what torch defines has none. Raises ValueError as `undefined_symbols`."""
    with _mapped(path) as data:
        return unversioned_in(data)


def unversioned_in(data: Bytes) -> list[str]:
    """As `unversioned_symbols`, of a library's bytes."""
    with _damaged():
        versions = [
            index & ~_HIDDEN
            for section in _sections(data, VERSIONS)
            for (index,) in struct.iter_unpack("<H", data[section.offset : section.offset + section.size])
        ]
        return [name for position, name in _undefined(data) if not versions or versions[position] <= _UNVERSIONED]


def defined_symbols(path: str | Path) -> frozenset[str]:
    """The symbols that a library gives to others. Raises ValueError as `undefined_symbols`."""
    with _mapped(path) as data, _damaged():
        return frozenset(
            _text(data, section.strings + name)
            for section in _sections(data, SYMBOLS)
            for name, _, _, index, _, _ in struct.iter_unpack(
                "<IBBHQQ", data[section.offset : section.offset + section.size]
            )
            if index and name
        )


def needed_versions(path: str | Path) -> dict[str, str]:
    """The newest version that a library needs of each of `GLIBC`, `GLIBCXX` and `CXXABI`; families that it does not
    need are left out. Raises ValueError as `undefined_symbols`."""
    with _mapped(path) as data, _damaged():
        return newest(_needed(data))


def newest(names: Iterable[str]) -> dict[str, str]:
    """`{"GLIBC": "2.34"}` of `GLIBC_2.3`, `GLIBC_2.34`; names of another form are left out."""
    found: dict[str, str] = {}
    for name in names:
        name = "GLIBC_2.36" if name == _PACKED_RELOCATIONS else name
        if match := _VERSION.fullmatch(name):
            family, version = match.groups()
            found[family] = max(found.get(family, "0"), version, key=version_numbers)
    return found


def version_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@contextmanager
def _damaged() -> Iterator[None]:
    """Raises ValueError where an offset or a number within leads out of the file."""
    try:
        yield
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError(f"a damaged ELF file: {error}") from error


def _mapped(path: str | Path) -> mmap.mmap:
    with Path(path).open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)


def _sections(data: Bytes, kind: int) -> Iterator[_Section]:
    """The sections of a kind. Raises ValueError for a file of another format."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    each = [struct.unpack_from("<IIQQQQIIQQ", data, table + number * size) for number in range(count)]
    for _, found, _, _, offset, length, link, entries, _, _ in each:
        if found == kind:
            yield _Section(offset, length, entries, each[link][4])


def _undefined(data: Bytes) -> Iterator[tuple[int, str]]:
    """Each undefined symbol with its position in the table."""
    for section in _sections(data, SYMBOLS):
        for position in range(section.size // 24):
            name, info, _, index = struct.unpack_from("<IBBH", data, section.offset + position * 24)
            if index == 0 and info >> 4 == _GLOBAL and name:
                yield position, _text(data, section.strings + name)


def _needed(data: mmap.mmap) -> Iterator[str]:
    for section in _sections(data, NEEDED):
        offset = section.offset
        for _ in range(section.entries):
            _, count, _, first, following = struct.unpack_from("<HHIII", data, offset)
            entry = offset + first
            for _ in range(count):
                _, _, _, name, further = struct.unpack_from("<IHHII", data, entry)
                yield _text(data, section.strings + name)
                entry += further
            offset += following


def _text(data: Bytes, offset: int) -> str:
    return data[offset : data.find(b"\0", offset)].decode("ascii", "replace")


class NeededLibrary(NamedTuple):
    """An entry DT_NEEDED: where in the file its value stands, and the name that it is, with its place."""

    position: int
    name_at: int
    name: str


def needed_libraries(data: bytes | bytearray) -> list[NeededLibrary]:
    """The libraries that a library names, in order. Raises ValueError as `undefined_symbols`."""
    with _damaged():
        found = []
        for section in _sections(data, _DYNAMIC):
            for offset in range(section.offset, section.offset + section.size, 16):
                tag, value = struct.unpack_from("<QQ", data, offset)
                if tag == _NEEDED_TAG:
                    at = section.strings + value
                    found.append(NeededLibrary(offset + 8, at, _text(data, at)))
        return found


def rename_needed(data: bytearray, names: frozenset[str], name: str) -> int:
    """Replace each of `names` by `name` among the needed libraries. `name` must not be longer than the replaced name.

    Returns how many entries were changed. Raises ValueError as `undefined_symbols`, and where other names share the
    bytes, or there is no room.
    """
    entries = [entry for entry in needed_libraries(data) if entry.name in names]
    if not entries:
        return 0
    widest = max(entries, key=lambda entry: len(entry.name))
    end = widest.name_at + len(widest.name)
    if len(name) > len(widest.name):
        raise ValueError(f"there is no room for the name {name} in that of {widest.name}")
    with _damaged():
        for section in _sections(data, SYMBOLS):
            for offset in range(section.offset, section.offset + section.size, 24):
                (at,) = struct.unpack_from("<I", data, offset)
                if widest.name_at < section.strings + at < end:
                    raise ValueError(f"a symbol's name lies in that of {widest.name}")
    data[widest.name_at : end] = name.encode().ljust(len(widest.name), b"\0")
    (value,) = struct.unpack_from("<Q", data, widest.position)
    for entry in entries:
        struct.pack_into("<Q", data, entry.position, value)
    return len(entries)
