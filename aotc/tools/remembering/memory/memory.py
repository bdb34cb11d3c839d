"""What is remembered of a module, in files beside the store's own that are replaced as a whole.

STORE/.aotc/remembered/
├── <name>.json        the facts, how the module is made again, and the forms of its calls, built or not: `Memory`
├── <name>.damaged     such a file that could not be read: the module was begun anew
├── <name>.yaml        the manifest of the last build
├── <name>.log         its log
├── <name>.progress    how far it is (`aotc.tools.remembering.building.while_waiting`)
├── <model>.failed     a tombstone: why there is no code for that model, as text. Without it, it is tried again
├── <name>.lock        held by the process that builds, as long as it does
└── memory.lock        held while a `Memory` is replaced
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from aotc.errors import CorruptError
from aotc.reads.module_identity import IdentityFacts
from aotc.store.files.store_locks import is_held, locked
from aotc.store.files.writing import write_atomically

VERSION = 1
LOCK_TIMEOUT = 30.0
MOST_CALLS = 256
"""Forms that are kept of calls of one kind."""


def remembered_in(store: str | os.PathLike[str]) -> Path:
    """The folder of what is remembered in a store's folder."""
    return Path(store).absolute().joinpath(*_FOLDER)


_FOLDER = (".aotc", "remembered")


class Kind(msgspec.Struct):
    """Calls that one model takes: they differ in the sizes and values of tensors alone. `ambient` are the modes that
    they were made in, as the manifest says them. `calls` only grow; the first `built` of them have code. `regions` are
    those that the last build chose, if it was to choose, or if the model cannot be captured whole. `pushed` is the
    digest of the bundle that a store at a URL has of it. `counters` are numbers in the module that a call
    adds to, and what it adds: compiled code does not, and does not depend on them."""

    ambient: dict[str, str | None]
    calls: list[dict[str, Any]] = []
    built: int = 0
    regions: list[str] = []
    pushed: str = ""
    counters: dict[str, int] = {}


class Memory(msgspec.Struct):
    """All that is remembered of a module. `facts`, `asked`, `factory`, `kwargs` and `dtype` are what a person reads,
    and `aotc init --from-store`: a build takes these from the program that asks for it. `asked` is what the build was
    asked for; `attempts` are builds in a row that have begun and not ended; `state_bytes` are those of its parameters
    and buffers; `remote` is the digest of what was last merged from, or written to, a URL (`remote_memory`); `changed`
    are attributes that calls change. What another `version` wrote is as nothing."""

    facts: IdentityFacts
    asked: dict[str, Any]
    factory: str
    kwargs: dict[str, Any]
    dtype: str = ""
    kinds: list[Kind] = []
    builds: int = 0
    attempts: int = 0
    state_bytes: int = 0
    remote: str = ""
    changed: list[str] = []
    version: int = VERSION

    def unpushed(self) -> list[int]:
        """The kinds with code that a store at a URL lacks."""
        return [number for number, kind in enumerate(self.kinds) if kind.built and not kind.pushed]

    def for_others(self) -> Memory:
        """What other machines are told: of each kind the forms that have code. A kind without keeps its number, and one
        form."""
        kinds = [msgspec.structs.replace(kind, calls=kind.calls[: kind.built or 1]) for kind in self.kinds]
        return msgspec.structs.replace(self, kinds=kinds, builds=0, attempts=0, remote="")


class _Versioned(msgspec.Struct):
    version: int = 0


class Place:
    """The files of one module in the folder of a store."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.lock, self.log, self.manifest = (folder / f"{name}.{ending}" for ending in ("lock", "log", "yaml"))

    @property
    def store(self) -> Path:
        """The folder of the store."""
        return self.folder.parents[len(_FOLDER) - 1]

    def model(self, kind: int) -> str:
        """The name of a kind's model in the store."""
        return f"{self.name}-{kind + 1}" if kind else self.name

    def read(self) -> Memory | None:
        """None where nothing is remembered. Raises CorruptError."""
        return _read(self.folder / f"{self.name}.json")

    def change(
        self, new: Memory | None, change: Callable[[Memory], bool | None], *, durable: bool = True
    ) -> Memory | None:
        """What is remembered, else `new`, after `change`, written unless that gives False; if `durable`, it outlives a
        power cut, which takes tens of milliseconds. Raises StoreError, CorruptError."""
        with locked(self.folder / "memory.lock", LOCK_TIMEOUT):
            if (memory := self.read() or new) is not None and change(memory) is not False:
                write_atomically(self.folder / f"{self.name}.json", msgspec.json.encode(memory), durable=durable)
        return memory

    def set_aside_if_damaged(self) -> str:
        """Rename what is remembered, if it cannot be read, so that it is begun anew; why, or "". Raises StoreError."""
        try:
            self.read()
        except CorruptError as error:
            with locked(self.folder / "memory.lock", LOCK_TIMEOUT):
                (self.folder / f"{self.name}.json").replace(self.folder / f"{self.name}.damaged")
            return error.message
        return ""

    def is_being_built(self) -> bool:
        return is_held(self.lock)

    def failed(self, kind: int) -> str:
        """Why a kind has no code; "" where nothing failed."""
        try:
            return self.tombstone(kind).read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def fail(self, kind: int, reason: str) -> None:
        write_atomically(self.tombstone(kind), f"{reason}\n".encode())

    def tombstone(self, kind: int) -> Path:
        return self.folder / f"{self.model(kind)}.failed"

    def unbuilt(self, memory: Memory) -> list[int]:
        """The kinds with forms that have no code and may get it."""
        return [n for n, kind in enumerate(memory.kinds) if kind.built < len(kind.calls) and not self.failed(n)]

    def forget_failures(self) -> None:
        """Let all be tried again."""
        for path in self.folder.glob(f"{self.name}*.failed"):
            path.unlink(missing_ok=True)
        self.change(None, _as_new)

    def latest_of_class(self, facts: IdentityFacts) -> Memory | None:
        """What is remembered of a module of the same class in the same mode, as it was last; of what can be read."""
        found: list[tuple[float, Memory]] = []
        for path in self.folder.glob("*.json"):
            with suppress(CorruptError, OSError):
                memory = _read(path) if path.stem != self.name else None
                same = ("class", "option train")
                if memory is not None and [memory.facts.get(name) for name in same] == [
                    facts.get(name) for name in same
                ]:
                    found.append((path.stat().st_mtime, memory))
        return max(found, key=lambda pair: pair[0])[1] if found else None


def _as_new(memory: Memory) -> None:
    memory.builds = memory.attempts = 0


def _read(path: Path) -> Memory | None:
    try:
        return decode_memory(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None


def decode_memory(data: bytes, where: str) -> Memory | None:
    """None for what another version wrote. Raises CorruptError, also for what no program has recorded: a store's
    content is data, and any process may have written it."""
    from aotc.tools.remembering.memory.checked_kinds import check_kind

    try:
        if msgspec.json.decode(data, type=_Versioned).version != VERSION:
            return None
        memory = msgspec.json.decode(data, type=Memory)
        for kind in memory.kinds:
            check_kind(kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"{where} cannot be read: {error}", hint="remove it: its module is built anew") from None
    return memory
