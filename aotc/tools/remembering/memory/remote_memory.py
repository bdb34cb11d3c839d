"""What a store at a URL remembers of a module, for all machines that use that store.

Each machine works in a copy of its own, `copy_of(url)`, which is an ordinary store with a `Memory`. What was built goes
to the URL as bundles, and a document beside them holds the `Memory` with the digests of these bundles: an image
manifest of one layer called `NAME.remembered`, by the index of an object store, or by a tag of the repository URL/NAME
of a registry.

A machine first merges what that document says into its own memory, then builds what still has no code, and last
replaces the document, unless another machine has done so meanwhile: then it begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from aotc.digest import sha256_bytes
from aotc.errors import CorruptError, NotFoundError
from aotc.store.cache_folder import cache_folder
from aotc.store.layout.names import hex_of
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.store import Store
from aotc.store.opening import open_transfer
from aotc.store.reference import Reference, is_registry, parse_reference
from aotc.store.remote.fetching import fetch, of_targets
from aotc.store.remote.interface import Limits
from aotc.store.remote.push import change_attachment, push
from aotc.store.signing.attachments import DocumentKind, Encoded, Layer, encode_layers, read_layers
from aotc.tools.recording.seen_calls import MOST_KINDS
from aotc.tools.remembering.memory import memory as local
from aotc.tools.remembering.memory.kind_index import key_of, sizes_in
from aotc.tools.remembering.memory.memory import MOST_CALLS, Memory, Place, decode_memory, remembered_in

REMEMBERED = DocumentKind("remembered", "application/vnd.aotc.remembered.v1+json", 16 << 20, "forms of calls")
TAG = "latest"
LOAD_ATTEMPTS = 2
"""Of a request, in a program that waits for the answer with its first call."""


def copy_of(url: str) -> Path:
    """The store on this host in which `aotc.compile` works for the store at a URL. Raises StoreError."""
    return cache_folder() / "remembered-copies" / hex_of(sha256_bytes(url.rstrip("/").encode()))[:16]


class RemoteMemory:
    """What the store at `url` remembers of the module whose files on this host are `place`."""

    def __init__(self, url: str, place: Place, *, attempts: int | None = None) -> None:
        """Connects to nothing yet. Raises StoreError, ReferenceFormatError."""
        limits = Limits.from_environment()
        self._limits = msgspec.structs.replace(limits, attempts=min(attempts or limits.attempts, limits.attempts))
        self.url, self._place = url.rstrip("/"), place
        self._repository = f"{self.url}/{place.name}" if is_registry(url) else self.url
        self._name = f"{place.name}.{REMEMBERED.suffix}"

    def read(self) -> Memory | None:
        """None where nothing is remembered there. Raises RemoteError, CorruptError."""
        found = self._find()
        return None if found is None else self._decoded(found)

    def pull(self, own: Callable[[], Memory] | None = None) -> None:
        """Copy to this machine what others have added, with their code. `own` gives the memory to begin with.

        Of what is read, only the forms of calls are used: how the module is made is what this machine says. Raises
        RemoteError, CorruptError, StoreError.
        """
        found, ours = self._find(), self._place.read()
        if found is None or (ours is None and own is None) or (ours is not None and ours.remote == found.digest):
            return
        theirs = self._decoded(found)
        new = own() if ours is None and own is not None else None
        # Without code, first: killed before the end, this machine builds, and no call is taken for one that has code.
        self._place.change(new, lambda memory: self._merge(memory, theirs, ()))
        there = {n for n, kind in enumerate(theirs.kinds) if kind.pushed and self._fetched(n, kind.pushed)}

        def end(memory: Memory) -> None:
            self._merge(memory, theirs, there)
            memory.remote = found.digest

        self._place.change(new, end)

    def push(self) -> bool:
        """Upload what was built here, and then what is remembered of it. False where another machine has replaced that
        meanwhile: `pull` and build again. Raises RemoteError, StoreError."""
        memory = self._place.read()
        if memory is None or not memory.unpushed():
            return True
        store = Store(self._place.store)
        pushed = {
            n: push(store, Reference(None, self._place.model(n), tag=TAG), self._at(n, f":{TAG}"), limits=self._limits)
            for n in memory.unpushed()
        }

        def mark(memory: Memory) -> None:
            for n, copied in pushed.items():
                memory.kinds[n].pushed = copied.digest

        mark(memory)
        layer = Layer(msgspec.json.encode(memory.for_others()))
        encoded = encode_layers(REMEMBERED, [layer], artifact_type=REMEMBERED.media_type)
        is_ours = True

        def replace(theirs: Descriptor | None) -> Encoded | None:
            nonlocal is_ours
            is_ours = (theirs.digest if theirs else "") in (memory.remote, encoded.descriptor.digest)
            return encoded if is_ours and (theirs is None or theirs.digest != encoded.descriptor.digest) else None

        change_attachment(open_transfer(self._repository, self._limits), self._name, replace)
        if is_ours:

            def end(memory: Memory) -> None:
                mark(memory)
                memory.remote = encoded.descriptor.digest

            self._place.change(None, end)
        return is_ours

    def _merge(self, memory: Memory, theirs: Memory, there: Collection[int]) -> None:
        before = memory.kinds
        merge(memory, theirs, there)
        for number, kind in enumerate(memory.kinds):
            if number < len(before) and key_of(kind) != key_of(before[number]):
                self._place.tombstone(number).unlink(missing_ok=True)  # it is that of another kind

    def _find(self) -> Descriptor | None:
        transfer = open_transfer(self._repository, self._limits)
        try:
            return transfer.retrying(lambda: transfer.remote.attachment(self._name))
        except NotFoundError:  # there is no store yet
            return None

    def _decoded(self, found: Descriptor) -> Memory:
        where = f"{self.url} {self._name}"
        layers = read_layers(open_transfer(self._repository, self._limits).read, found, REMEMBERED).layers
        hint = "remove it: its forms are recorded anew"
        if len(layers) != 1:
            raise CorruptError(f"{where} has {len(layers)} documents", hint=hint, expected="one")
        memory = decode_memory(layers[0].data, where) or Memory({}, {}, "", {})
        try:
            are_known = all(
                len({key_of(kind, call) for call in kind.calls}) == 1 and sizes_in(kind) for kind in memory.kinds
            )
        except Exception:  # what another program wrote may be of any form
            are_known = False
        if not are_known:
            raise CorruptError(f"{where} has calls of an unknown form", hint=hint, expected="calls")
        return memory

    def _fetched(self, number: int, digest: str) -> bool:
        """Whether the code of a kind is now in the copy; it is built anew where it was removed from the URL."""
        try:
            fetch(self._at(number, f"@{digest}"), self._place.store, of_targets(), tag=TAG, limits=self._limits)
        except NotFoundError:
            return False
        return True

    def _at(self, number: int, end: str) -> Reference:
        separator = "/" if is_registry(self.url) else "#"
        return parse_reference(f"{self.url}{separator}{self._place.model(number)}{end}")


def merge(memory: Memory, theirs: Memory, there: Collection[int]) -> None:
    """Add what another machine remembers: `there` are the numbers of its kinds whose code is on this host.

    The numbers of kinds are in the names of their models, so they are the other machine's. What only this machine has
    seen is built again, mostly from units that are finished.
    """
    left, kinds = list(memory.kinds), []
    for number, kind in enumerate(theirs.kinds[:MOST_KINDS]):
        same = next((one for one in left if key_of(one) == key_of(kind)), None)
        ours = []
        if same is not None:
            left.remove(same)
            theirs_have = sizes_in(kind)
            ours = [call for call, sizes in zip(same.calls, sizes_in(same), strict=True) if sizes not in theirs_have]
        merged = local.Kind(kind.ambient, [*kind.calls, *ours][:MOST_CALLS], regions=kind.regions)
        if number in there:
            merged.built, merged.pushed = min(kind.built, MOST_CALLS), kind.pushed
            merged.counters = kind.counters
        kinds.append(merged)
    kinds += [local.Kind(kind.ambient, kind.calls, regions=kind.regions) for kind in left]
    memory.kinds = kinds[:MOST_KINDS]


def remembered_of(store: str, name: str) -> Memory | None:
    """What a store in a folder or at a URL remembers of a module. Raises CorruptError, RemoteError."""
    if "://" not in store:
        return Place(remembered_in(store), name).read()
    return RemoteMemory(store, Place(remembered_in(copy_of(store)), name)).read()
