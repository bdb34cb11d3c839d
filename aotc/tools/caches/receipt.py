"""What became of a restored cache: which of its files a program used, and what was compiled all the same.

`begin` notes the files after a restore. Python processes that have `WATCHER` on their PYTHONPATH, and AOTC_RECEIPT in
their environment, write down what they open and which compilers they start. `read` puts both together with the folders
as they are then, which tells of any program what it has written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec

from aotc.amounts import counted
from aotc.digest import sha256_bytes
from aotc.errors import CorruptError, Issue, NotFoundError
from aotc.store.files.disk import typed_errors
from aotc.store.files.writing import make_folder
from aotc.store.layout.compiler_cache import CompilerCache
from aotc.tools.caches.folders import files_worth_keeping, without_paths

WATCHER = Path(__file__).with_name("watched")
"""The folder with the `sitecustomize` that writes down."""
_RESTORED, _LOG = "restored.json", "log"
REQUIREMENTS = ("used", "no-compiler")


class ReceiptFile(msgspec.Struct, frozen=True):
    path: str
    digest: str


class _Restored(msgspec.Struct, frozen=True):
    """After a restore: the files of the cache, and other ones that lay in its folders."""

    folders: dict[str, str]
    files: tuple[ReceiptFile, ...]
    others: tuple[str, ...]


class _Line(msgspec.Struct, frozen=True):
    pid: int
    started: list[str] = msgspec.field(default_factory=list)
    used: str = ""
    compiler: str = ""
    sources: list[str] = msgspec.field(default_factory=list)


class CompilerRun(msgspec.Struct, frozen=True):
    """A compiler that ran, and the files that it was given to compile."""

    compiler: str
    sources: tuple[str, ...]


class Receipt(msgspec.Struct, frozen=True):
    """restored: how many files there were. used: paths of those that a process opened. written: paths of files that the
    restore did not write. replaced: of files of the cache that have other bytes now, or are gone. processes: how many
    wrote down what they did; without any, it is unknown what was used and what was compiled."""

    restored: int
    used: tuple[str, ...]
    written: tuple[str, ...]
    replaced: tuple[str, ...]
    compilers: tuple[CompilerRun, ...]
    processes: int

    def flaws(self, required: Sequence[str]) -> list[Issue]:
        """The violations of `required`, some of REQUIREMENTS. Nothing is known of a start that no process recorded."""
        found = []
        if required and not self.processes:
            found.append(Issue("no process wrote down what it did", hint=_HOW))
        if "used" in required:
            if not self.used:
                found.append(Issue(f"none of {counted(self.restored, 'restored file')} was used"))
            found += [Issue("was written anew", where=path) for path in self.written]
            found += [Issue("was replaced", where=path) for path in self.replaced]
        if "no-compiler" in required:
            found += [Issue(f"{each.compiler} ran for {', '.join(each.sources)}") for each in self.compilers]
            if "used" not in required:
                made = [path for path in (*self.written, *self.replaced) if path.endswith(_COMPILED)]
                found += [Issue("is compiled code that was not restored", where=path) for path in made]
        return found


_COMPILED = (".o", ".so", ".cubin")
"""Names of files that compilers make, also compilers that the receipt does not see: those within the process, and those
that ninja starts."""

_HOW = f"export AOTC_RECEIPT=FOLDER PYTHONPATH={WATCHER} where the program starts; or `aotc cache run REF -- COMMAND`"


def begin(folder: Path, cache: CompilerCache | None, folders: Mapping[str, Path]) -> dict[str, str]:
    """Note what the restore of `cache`, or of none, has left in `folders`. Returns the variables that a Python program
    needs to be watched.

    Raises StoreError.
    """
    make_folder(folder)
    roots = {kind: Path(os.path.realpath(root)) for kind, root in folders.items()}
    mine: dict[str, str] = {}
    for file in cache.files if cache is not None else ():
        if file.kind in roots:
            path = roots[file.kind] / file.path
            data = _bytes(path)
            if data is not None and sha256_bytes(without_paths(path.name, data)) == file.digest:
                mine[str(path)] = sha256_bytes(data)
    others = sorted(_now(roots) - mine.keys())
    noted = _Restored(
        {kind: str(root) for kind, root in roots.items()},
        tuple(ReceiptFile(path, digest) for path, digest in mine.items()),
        tuple(others),
    )
    with typed_errors("write", folder):
        (folder / _RESTORED).write_bytes(msgspec.json.encode(noted))
        (folder / _LOG).write_bytes(b"")
    inherited = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join(filter(None, (str(WATCHER), inherited)))
    return {"AOTC_RECEIPT": str(folder.absolute()), "PYTHONPATH": paths}


def watch_this_process() -> None:
    """Do in a process that runs what `WATCHER` does in one that starts, by its environment as it is now. A process that
    is watched already stays so."""
    name = "aotc_watching"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, WATCHER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.start()


def unwatched() -> AbstractContextManager[None]:
    """Meanwhile, this thread may read the files without using them."""
    watching = sys.modules.get("aotc_watching")
    paused: AbstractContextManager[None] = watching.unwatched() if watching is not None else nullcontext()
    return paused


def read(folder: Path) -> Receipt:
    """Read the receipt; a watched process may call it. Raises NotFoundError if `folder` has none, CorruptError,
    StoreError."""
    restored = folder / _RESTORED
    if not restored.exists():
        raise NotFoundError(
            f"{folder} holds no receipt", hint="`aotc cache restore REF --receipt FOLDER` begins one", known=()
        )
    with typed_errors("read", folder):
        text, log = restored.read_bytes(), (folder / _LOG).read_bytes() if (folder / _LOG).exists() else b""
    try:
        noted = msgspec.json.decode(text, type=_Restored)
        lines = [msgspec.json.decode(line, type=_Line) for line in log.splitlines()]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptError(
            f"the receipt in {folder} cannot be read: {error}", hint="remove the folder, and restore again"
        ) from error
    now = _now({kind: Path(root) for kind, root in noted.folders.items()})
    known = {file.path for file in noted.files}
    with unwatched():
        bytes_now = {file: _bytes(Path(file.path)) for file in noted.files}
    changed = [file.path for file, data in bytes_now.items() if data is None or sha256_bytes(data) != file.digest]
    return Receipt(
        restored=len(noted.files),
        used=tuple(sorted({line.used for line in lines if line.used})),
        written=tuple(sorted(now - known - {*noted.others})),
        replaced=tuple(sorted(changed)),
        compilers=tuple(
            dict.fromkeys(CompilerRun(line.compiler, tuple(line.sources)) for line in lines if line.compiler)
        ),
        processes=sum(bool(line.started) for line in lines),
    )


def _now(roots: Mapping[str, Path]) -> set[str]:
    return {
        str(root / path)
        for kind, root in roots.items()
        if root.is_dir()
        for path in files_worth_keeping(kind, root).files
    }


def _bytes(path: Path) -> bytes | None:
    """None where it is gone."""
    with typed_errors("read", path), contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None
