"""A `g++` for the tests: what one test has compiled, no other compiles again, and headers that several sources begin
with are precompiled. `conftest.py` puts it first on PATH, in a folder that lasts as long as the run; compiled files lie
in $AOTC_TESTS_COMPILER_CACHE, if that is set, for the runs after it. Headers do not: each is 150 MB.

A file is kept by all that its bytes depend on: the command, the source, its name as `-ffile-prefix-map` gives it to the
code, and headers that lie in the unit's own folder. Without that option the whole path counts. Commands that do not
compile one source, print something, or whose source includes files by "name" are passed on.

Started for each compile, without site-packages: it imports little.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys

ENOUGH_SOURCES = 3
"""Precompiling takes 5 s, and saves 1 to 1.5 s for each source."""

_FEWER_COLLECTIONS = ("--param", "ggc-min-heapsize=400000")
"""KiB that GCC fills before it collects garbage: a tenth of its time, for 40 MB, and the same code."""

_NAMES_WRAPPER = b"// Triton kernels are embedded as comments in "  # Inductor's comment, different in each unit
_PASSED_ON = re.compile(r"-[ESM]|-v$|--|-print|-dump|-g(?!0)|.*\.(o|a|so|s|ii)$")


class Compile:
    """A command that compiles one source."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.source, self.target, self.header = words, "", "", ""
        self.options: list[str] = []
        taken = iter(words)
        for word in taken:
            if word in ("-o", "-include"):
                setattr(self, "target" if word == "-o" else "header", next(taken))
            elif word.endswith((".cpp", ".h")) and not self.source:
                self.source = word
            else:
                self.options.append(word)
        maps = [word.partition("=")[2].split("=") for word in self.options if word.startswith("-ffile-prefix-map=")]
        self.own = [folder for folder, _ in maps]
        self.name = self.source
        for folder, name in maps:
            if self.source.startswith(folder):
                self.name = name + self.source.removeprefix(folder)

    def is_plain(self) -> bool:
        if not (os.path.isfile(self.source) and (self.target.endswith((".o", ".so")) or self.is_header())):
            return False
        texts = self.text() + (_read(self.header) if self.header else b"")
        return not any(map(_PASSED_ON.match, self.options)) and not re.search(rb'^ *# *include *"', texts, re.MULTILINE)

    def is_header(self) -> bool:
        return "c++-header" in self.options

    def text(self) -> bytes:
        lines = _read(self.source).splitlines(keepends=True)
        return b"".join(line for line in lines if not line.startswith(_NAMES_WRAPPER))

    def common(self) -> list[bytes]:
        """What other units' compiles have too: the options but for folders of the unit, the headers in those."""
        outside = [word for word in self.options if not any(folder in word for folder in self.own)]
        paths = [os.environ.get(name, "") for name in ("CPATH", "CPLUS_INCLUDE_PATH")]
        found = [os.fsencode(word) for word in (*outside, *paths)]
        for word in self.options:
            if word.startswith("-I") and word not in outside:
                for folder, _, names in sorted(os.walk(word[2:])):
                    headers = sorted(name for name in names if not name.endswith((".cpp", ".o", ".ii")))
                    found += [os.fsencode(name) + _read(f"{folder}/{name}") for name in headers]
        return found

    def key(self) -> str:
        header = _read(self.header) if self.header else b""
        return _digest([os.fsencode(self.name), self.text(), header, *self.common()])

    def precompiled(self, folder: str, compiler: str) -> list[str]:
        """Arguments that use a precompiled header, where enough sources begin as this one does."""
        begin = re.match(rb"((#include <.*>|//.*|)\n)*", self.text())
        includes = b"".join(line + b"\n" for line in begin[0].splitlines() if line.startswith(b"#")) if begin else b""
        if self.header or self.is_header() or not includes:
            return []
        entry = f"{folder}/begins/{_digest([includes, *self.common()])}"
        os.makedirs(entry, exist_ok=True)
        header = f"{entry}/headers.h"
        with open(f"{entry}/sources", "a") as sources:
            fcntl.flock(sources, fcntl.LOCK_EX)
            sources.write("\n")
            if sources.tell() == ENOUGH_SOURCES:
                with open(header, "wb") as file:
                    file.write(includes)
                mine = [word for word in self.options if word not in ("-c", "-shared") and word[:2] not in ("-l", "-L")]
                if _run(compiler, [*mine, "-x", "c++-header", header, "-o", f"{entry}/begun"]) == 0:
                    os.rename(f"{entry}/begun", f"{header}.gch")
        return ["-include", header] if os.path.exists(f"{header}.gch") else []


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _run(compiler: str, words: list[str]) -> int:
    return os.waitstatus_to_exitcode(os.spawnv(os.P_WAIT, compiler, [compiler, *_FEWER_COLLECTIONS, *words]))


def main() -> None:
    folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    compiler = os.readlink(f"{folder}/compiler")
    compile = Compile(sys.argv[1:])
    if not compile.is_plain():
        os.execv(compiler, [compiler, *compile.words])
    place = f"{folder}/{'headers' if compile.is_header() else 'kept'}"
    kept = f"{place}/{compile.key()}"
    if os.path.exists(kept):
        os.utime(kept)  # what no run uses any more is removed
        _copy(kept, compile.target, link=compile.is_header())
        return
    status = _run(compiler, [*compile.words, *compile.precompiled(folder, compiler)])
    if status:
        sys.exit(status)
    os.makedirs(place, exist_ok=True)
    _copy(compile.target, f"{kept}.{os.getpid()}", link=compile.is_header())
    os.rename(f"{kept}.{os.getpid()}", kept)


def _copy(source: str, target: str, link: bool) -> None:
    """A precompiled header is 150 MB, and not changed in place."""
    if link and os.stat(source).st_dev == os.stat(os.path.dirname(target)).st_dev and not os.path.exists(target):
        os.link(source, target)
    else:
        shutil.copyfile(source, target)


if __name__ == "__main__":
    main()
