"""Compiled C++ libraries, found by what they were made of.

Inductor's own key holds the compiler's command with all paths of headers, so it needs a compiler, and torch at the same
place. Here a library has a note beside it, `NAME.so` → `NAME.so.aotc.json`, with a digest of its source, of the options
that choose its flags, and of the target: these are the same wherever torch lies.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from aotc.digest import sha256_json
from aotc.machine.environment import cpu_features
from aotc.machine.native_target import python_abi
from aotc.store.files.writing import temporary_name
from aotc.tools.caches.origin import instructions

NOTE = ".aotc.json"
_OPTIONS = "cpp."
"""Of Inductor's configuration, what chooses the flags of C++."""
_ELSEWHERE = {"cpp.cxx"}
"""Which compiler is looked for; what it makes code for is in the target."""


class Note(msgspec.Struct, frozen=True):
    """`source`: of `source_digest`. `cpu_features`: of the machine that compiled, where `-march=native` may use all."""

    source: str
    cpu_features: tuple[str, ...]


def source_digest(call: Mapping[str, Any], configuration: Mapping[str, Any]) -> str:
    """Of a library by the arguments of Inductor's `load_async`, texts without space around them, and by
    Inductor's configuration."""
    arguments = {name: value.strip() if isinstance(value, str) else value for name, value in call.items()}
    options = {
        name: value
        for name, value in sorted(configuration.items())
        if name.startswith(_OPTIONS) and name not in _ELSEWHERE
    }
    target = {
        "machine": platform.machine(),
        "python": python_abi(),
        "torch": str(torch.__version__),
        "instructions": os.environ.get("ATEN_CPU_CAPABILITY", ""),
    }
    return sha256_json({"call": _plain(arguments), "options": _plain(options), "target": target})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def write_note(library: Path, source: str) -> None:
    """Beside a library that this machine has compiled. One that cannot be written is left out."""
    note = library.with_name(library.name + NOTE)
    if note.exists():
        return
    temporary = library.with_name(temporary_name())
    with contextlib.suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(Note(source, instructions(sorted(cpu_features())))))
        temporary.replace(note)


def _notes(folder: Path) -> Iterator[tuple[Path, Note]]:
    """Each library that has a note, whether it is there or not."""
    for path in sorted(folder.rglob(f"*.so{NOTE}")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            yield path.with_name(path.name.removesuffix(NOTE)), msgspec.json.decode(path.read_bytes(), type=Note)


def lacking(folder: Path, source: str) -> str:
    """The name of a library of which only the note is there, or what is known of it: for an error."""
    names = (library.name for library, note in _notes(folder) if note.source == source)
    return next(names, f"a library of the source {source[:19]}…")


def find_libraries(folder: Path) -> dict[str, Path]:
    """The libraries in `folder` by the digest of their source: those that are there and whose instructions are here."""
    return {
        note.source: library
        for library, note in _notes(folder)
        if library.is_file() and {*note.cpu_features} <= cpu_features()
    }
