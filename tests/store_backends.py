"""Every place that a store can be, made the same for `store_suite.py`: real servers on loopback, and a folder."""

from __future__ import annotations

import contextlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import object_servers
import pytest
from hub_server import Hub, running_hub
from object_servers import ObjectServer
from registry_server import RegistryServer, needs, running_registry

from aotc.digest import sha256_bytes
from aotc.records import Artifact
from aotc.store.layout.oci import INDEX, Descriptor
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.opening import open_objects, open_readable, open_remote
from aotc.store.readable import ReadableStore
from aotc.store.reference import Reference, parse_reference
from aotc.store.remote.interface import Limits, Traffic
from aotc.store.remote.push import push

QUICK = Limits(connect=5, read=10, total=120, attempts=3, backoff=0.02)


class Backend(ABC):
    """A place for stores, each new one with a name of its own."""

    environment: Mapping[str, str] = {}

    @abstractmethod
    def new(self, folder: Path) -> str:
        """Where a new store shall be; `folder` is the test's own."""

    @abstractmethod
    def ref(self, where: str, name: str) -> Reference:
        """The reference to `model:tag` or `model@digest` in that store."""

    @abstractmethod
    def put(self, where: str, local: Store, reference: Reference, tag: str) -> str:
        """Let `tag` name a bundle of a local store there; its digest."""

    @abstractmethod
    def put_raw(self, where: str, documents: Sequence[tuple[str, bytes]], index: bytes, tag: str) -> None:
        """Let `tiny:<tag>` name whatever `index` holds, with (media type, bytes) of documents and blobs beside it."""

    @abstractmethod
    def change(self, where: str, digest: str, change: Callable[[bytes], bytes | None]) -> None:
        """Tamper with a blob on the server; None removes it."""

    def restore(self) -> None:  # noqa: B027
        """Undo what `change` did to blobs that other stores of the server share."""

    def readable(self, where: str) -> ReadableStore:
        return open_readable(where)

    def publish(self, where: str, local: Store, tag: str, artifacts: Sequence[Artifact], created: str) -> str:
        publish(local, "tiny", tag, artifacts, created=created)
        return self.put(where, local, Reference(None, "tiny", tag=tag), tag)


def change_file(path: Path, change: Callable[[bytes], bytes | None]) -> None:
    data = change(path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)


class Folder(Backend):
    """The local layout."""

    def new(self, folder: Path) -> str:
        return str(folder / "the store")

    def ref(self, where: str, name: str) -> Reference:
        return parse_reference(f"{where}#{name}")

    def put(self, where: str, local: Store, reference: Reference, tag: str) -> str:
        """As a build there would: the blobs, then the bundle with its tag."""
        there = Store.create(self._folder(where))
        for path in (local.path / "blobs" / "sha256").iterdir():
            there.blobs.put_bytes(path.read_bytes())
        bundle = local.resolve(reference)
        there.set_tag("tiny", tag, bundle)
        return bundle.digest

    def put_raw(self, where: str, documents: Sequence[tuple[str, bytes]], index: bytes, tag: str) -> None:
        there = Store.create(self._folder(where))
        for _, data in documents:
            there.blobs.put_bytes(data)
        blob = there.blobs.put_bytes(index)
        there.set_tag("tiny", tag, Descriptor(media_type=INDEX, digest=blob.digest, size=blob.size))

    def change(self, where: str, digest: str, change: Callable[[bytes], bytes | None]) -> None:
        change_file(Store(self._folder(where)).blobs.path(digest), change)

    def _folder(self, where: str) -> Path:
        return Path(where)


class Web(Folder):
    """A web server over such a folder, which only reads."""

    def __init__(self, server: ObjectServer) -> None:
        self.server, self.environment = server, server.environment

    def new(self, folder: Path) -> str:
        return self.server.new_url()

    def _folder(self, where: str) -> Path:
        return self.server.folder_of(where)


class Remote(Backend):
    """What is written to over a network."""

    def put(self, where: str, local: Store, reference: Reference, tag: str) -> str:
        return push(local, reference, self.ref(where, f"tiny:{tag}"), limits=QUICK).digest

    def put_raw(self, where: str, documents: Sequence[tuple[str, bytes]], index: bytes, tag: str) -> None:
        remote = open_remote(where, QUICK)
        for media_type, data in documents:
            remote.put_document(media_type, data)
        remote.set_tag(self.ref(where, f"tiny:{tag}"), INDEX, index)


class Registry(Remote):
    def __init__(self, server: RegistryServer) -> None:
        self.server = server
        self.count = 0
        self.before: dict[Path, bytes] = {}

    def new(self, folder: Path) -> str:
        self.count += 1
        return f"oci://{self.server.host}/suite/store-{self.count}"

    def ref(self, where: str, name: str) -> Reference:
        _, at, digest = name.partition("@")
        return parse_reference(f"{where}@{digest}" if at else f"{where}:{name.partition(':')[2]}")

    def change(self, where: str, digest: str, change: Callable[[bytes], bytes | None]) -> None:
        name = digest.removeprefix("sha256:")
        path = next(path for path in self.server.blob_files() if path.parent.name == name)
        self.before[path] = path.read_bytes()
        change_file(path, change)

    def restore(self) -> None:
        while self.before:
            path, data = self.before.popitem()
            path.write_bytes(data)


class ObjectStorage(Remote):
    server: ObjectServer | Hub

    def __init__(self, server: ObjectServer) -> None:
        self.server, self.environment = server, server.environment

    def new(self, folder: Path) -> str:
        return self.server.new_url()

    def ref(self, where: str, name: str) -> Reference:
        return parse_reference(f"{where}#{name}")

    def change(self, where: str, digest: str, change: Callable[[bytes], bytes | None]) -> None:
        import io

        objects, name = open_objects(where, QUICK, Traffic()), f"blobs/sha256/{digest.removeprefix('sha256:')}"
        found = objects.read(name, 1 << 30)
        assert found is not None and sha256_bytes(found.data) == digest
        data = change(found.data)
        if data is None:
            objects.remove(name)
        else:
            objects.put(name, io.BytesIO(data), len(data))


class HuggingFace(ObjectStorage):
    def __init__(self, server: Hub) -> None:
        self.server, self.environment = server, server.environment

    def change(self, where: str, digest: str, change: Callable[[bytes], bytes | None]) -> None:
        assert isinstance(self.server, Hub)
        self.server.change(where.removeprefix("hf://"), f"blobs/sha256/{digest.removeprefix('sha256:')}", change)


# -- all of them ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder(work: Path) -> Iterator[Backend]:
    yield Folder()


@contextlib.contextmanager
def registry(work: Path) -> Iterator[Backend]:
    with running_registry(work) as server:
        yield Registry(server)


def _object_storage(
    start: Callable[[Path], contextlib.AbstractContextManager[ObjectServer]],
) -> Callable[[Path], contextlib.AbstractContextManager[Backend]]:
    @contextlib.contextmanager
    def started(work: Path) -> Iterator[Backend]:
        with start(work) as server:
            yield ObjectStorage(server)

    return started


@contextlib.contextmanager
def hub(work: Path) -> Iterator[Backend]:
    with running_hub() as server:
        yield HuggingFace(server)


needs_hub = pytest.mark.skipif(not importlib.util.find_spec("huggingface_hub"), reason="needs huggingface_hub")


@contextlib.contextmanager
def web(work: Path) -> Iterator[Backend]:
    with object_servers.https(work) as server:
        yield Web(server)


STARTS = {
    "folder": (folder, ()),
    "registry": (registry, (needs("docker-registry"),)),
    "s3-ceph": (_object_storage(object_servers.radosgw), (object_servers.needs_radosgw,)),
    "s3-rclone": (_object_storage(object_servers.rclone_s3), (object_servers.needs_rclone,)),
    "azure": (_object_storage(object_servers.azurite), (object_servers.needs_azurite,)),
    "https": (web, (object_servers.needs_rclone,)),
    "hub": (hub, (needs_hub,)),
    "file": (_object_storage(object_servers.local_folder), ()),
}
"""How each is started in a folder of its own, and the marks of what it needs."""

REMOTE = [name for name in STARTS if name != "folder"]
WRITTEN_OVER_A_NETWORK = [name for name in REMOTE if name != "https"]


class Started(dict[str, Backend]):
    """The backends by name; each server is started when it is first asked for, and ends with `stack`."""

    def __init__(self, folder: Callable[[str], Path], stack: contextlib.ExitStack) -> None:
        self.folder, self.stack = folder, stack

    def __missing__(self, name: str) -> Backend:
        self[name] = self.stack.enter_context(STARTS[name][0](self.folder(name)))
        return self[name]
