"""Compares the bytes of two compiled files by section, function and string, to find why a build does not repeat."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec
from elftools.elf.constants import SH_FLAGS
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import Section, SymbolTableSection

CHUNK = 1 << 16
MOST_SHOWN = 8
"""Functions and texts that are listed of each kind; the others are counted."""
TEXT_LIMIT = 64 << 20
"""Sections above this many bytes hold weights, and no texts worth reading."""
BUILD_ID = ".note.gnu.build-id"
OUTSIDE = "outside the sections"

_TEXT = re.compile(rb"[\x20-\x7e]{6,400}")
_PATH = re.compile(r"(?:^|[\s\"'=:])/[\w.+-]+/[\w.+-]+")


class SectionDifference(msgspec.Struct, frozen=True, omit_defaults=True):
    """A section whose bytes differ. Sizes in bytes, None where that file has no such section.

    `differing` bytes of the common length differ, the first at offset `first`. `symbols` are functions and objects
    whose own bytes differ, by the linker's names, at most `MOST_SHOWN`: first those of another size, since the others
    may only point at what has moved.
    """

    name: str
    size_a: int | None
    size_b: int | None
    differing: int = 0
    first: int | None = None
    code: bool = False
    symbols: tuple[str, ...] = ()


class BinaryDifference(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where two files differ. For what is not an ELF file there is one section, named "", the whole file.

    `texts_a`, `texts_b`: printable texts outside code that only one of them holds, at most `MOST_SHOWN`; `more_texts`
    counts the others. `findings` say in words what that means.
    """

    sections: tuple[SectionDifference, ...]
    texts_a: tuple[str, ...] = ()
    texts_b: tuple[str, ...] = ()
    more_texts: int = 0
    findings: tuple[str, ...] = ()


class _Part(msgspec.Struct, frozen=True):
    """A section's bytes, and those of each symbol in it."""

    data: bytes = b""
    code: bool = False
    symbols: dict[str, bytes] = {}


def compare_binaries(a: bytes, b: bytes) -> BinaryDifference:
    """Compare two files section by section."""
    parts_a, parts_b = _parts(a), _parts(b)
    if not parts_a or not parts_b:
        parts_a, parts_b = {"": _Part(a)}, {"": _Part(b)}
    names = [name for name in dict.fromkeys([*parts_a, *parts_b]) if parts_a.get(name) != parts_b.get(name)]
    if not names and a != b:
        parts_a, parts_b, names = {OUTSIDE: _Part(a)}, {OUTSIDE: _Part(b)}, [OUTSIDE]
    sections = tuple(_section(name, parts_a.get(name), parts_b.get(name)) for name in names)
    texts_a, texts_b = (_texts(parts[name] for name in names if name in parts) for parts in (parts_a, parts_b))
    only_a, only_b = sorted(texts_a - texts_b), sorted(texts_b - texts_a)
    return BinaryDifference(
        sections=sections,
        texts_a=tuple(only_a[:MOST_SHOWN]),
        texts_b=tuple(only_b[:MOST_SHOWN]),
        more_texts=len(only_a[MOST_SHOWN:]) + len(only_b[MOST_SHOWN:]),
        findings=tuple(_findings(sections, [*only_a, *only_b])),
    )


def _parts(data: bytes) -> dict[str, _Part]:
    """The sections of an ELF file by name; none where it cannot be read as one."""
    try:
        elf = ELFFile(io.BytesIO(data))
        sections = [section for section in elf.iter_sections() if section["sh_type"] not in ("SHT_NULL", "SHT_NOBITS")]
        symbols = _symbols(elf, data)
        parts: dict[str, _Part] = {}
        for section in sections:
            name = section.name
            while name in parts:
                name += "'"
            content = data[section["sh_offset"] :][: section["sh_size"]]
            code = bool(section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR)
            parts[name] = _Part(content, code, symbols.get(section["sh_offset"], {}))
        return parts
    except Exception:  # a damaged file fails in the parser in many ways; it is then compared as bytes
        return {}


def _symbols(elf: ELFFile, data: bytes) -> dict[int, dict[str, bytes]]:
    """The bytes of each named function and object, by the file offset of its section."""
    sections: list[Section] = list(elf.iter_sections())
    found: dict[int, dict[str, bytes]] = {}
    for table in (section for section in sections if isinstance(section, SymbolTableSection)):
        for symbol in table.iter_symbols():
            index, size = symbol["st_shndx"], symbol["st_size"]
            if isinstance(index, int) and index < len(sections) and size and symbol.name:
                home = sections[index]
                if home["sh_type"] != "SHT_NOBITS":
                    start = home["sh_offset"] + symbol["st_value"] - home["sh_addr"]
                    found.setdefault(home["sh_offset"], {})[symbol.name] = data[start : start + size]
    return found


def _section(name: str, a: _Part | None, b: _Part | None) -> SectionDifference:
    if a is None or b is None:
        size_a, size_b = (None if part is None else len(part.data) for part in (a, b))
        return SectionDifference(name, size_a, size_b, code=any(part.code for part in (a, b) if part))
    differing, first = _count(a.data, b.data)
    symbols = sorted(
        (symbol for symbol, data in a.symbols.items() if b.symbols.get(symbol, data) != data),
        key=lambda symbol: (len(a.symbols[symbol]) == len(b.symbols[symbol]), symbol),
    )
    return SectionDifference(
        name, len(a.data), len(b.data), differing, first, a.code or b.code, tuple(symbols[:MOST_SHOWN])
    )


def _count(a: bytes, b: bytes) -> tuple[int, int | None]:
    """How many bytes of the common length differ, and the offset of the first."""
    differing, first = 0, None
    for start in range(0, min(len(a), len(b)), CHUNK):
        left, right = a[start : start + CHUNK], b[start : start + CHUNK]
        size = min(len(left), len(right))
        if left[:size] == right[:size]:
            continue
        mixed = (int.from_bytes(left[:size]) ^ int.from_bytes(right[:size])).to_bytes(size)
        differing += size - mixed.count(0)
        if first is None:
            first = start + size - len(mixed.lstrip(b"\0"))
    return differing, first


def _texts(parts: Iterable[_Part]) -> set[str]:
    readable = (part.data for part in parts if not part.code and len(part.data) <= TEXT_LIMIT)
    return {text.decode("ascii") for text in chain.from_iterable(map(_TEXT.findall, readable))}


def _findings(sections: tuple[SectionDifference, ...], texts: list[str]) -> Iterator[str]:
    names = {section.name for section in sections}
    if names == {BUILD_ID}:
        yield "only the linker's build id differs: an input of the linker that is not in the file, like debug data"
    code = [section.name for section in sections if section.code]
    if code:
        yield f"machine code differs: {', '.join(code)}"
    elif names - {"", BUILD_ID, OUTSIDE}:
        yield "the machine code is the same; data, texts or names differ"
    if any(_PATH.search(text) for text in texts):
        yield "absolute paths differ: see the texts"
    if ".comment" in names:
        yield "the C++ compilers say different versions of themselves (.comment)"
