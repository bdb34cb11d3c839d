"""What any backend of a store promises, as tests that a backend of your own inherits.

    import aotc.testing, pytest

    class TestMine(aotc.testing.ObjectsSuite):
        @pytest.fixture
        def make_objects(self):
            url = new_empty_place()
            return lambda: MyObjects(url, Limits(), Traffic())

Each test is given a new, empty place; `make_objects()` gives what another process would have, another `Objects` of that
place. How such a backend is installed: aotc/store/REMOTES.md. Nothing else in aotc imports this module, nor pytest.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from itertools import chain

import pytest

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import CorruptError, NotFoundError, RemoteError
from aotc.store.layout import oci
from aotc.store.layout.oci import Descriptor, ImageIndex
from aotc.store.reference import Reference
from aotc.store.remote.interface import Traffic
from aotc.store.remote.objects.object_interface import Condition, Objects, find_condition
from aotc.store.remote.objects.object_store import ObjectStore

__all__ = ["ObjectsSuite"]

MakeObjects = Callable[[], Objects]
TRIES = 100
"""Of one write, where others write at the same time."""


class ObjectsSuite:
    """Tests of an implementation of `aotc.store.remote.objects.object_interface.Objects` that can be written to.

    A blob (`blobs/sha256/…`) may appear with the next write of another name: a store names a blob only then.
    """

    @pytest.fixture
    def make_objects(self) -> MakeObjects:
        pytest.fail("override this fixture: it gives a function that makes an Objects of one new, empty place")

    # -- objects ------------------------------------------------------------------------------------------------------

    def test_what_was_written_is_read(self, make_objects: MakeObjects) -> None:
        put(make_objects(), "oci-layout", b"some bytes")
        objects = make_objects()
        found = objects.read("oci-layout", 10)
        assert found is not None and found.data == b"some bytes"
        assert objects.size("oci-layout") == 10

    def test_what_is_not_there_is_none(self, make_objects: MakeObjects) -> None:
        objects = make_objects()
        assert objects.read("index.json", 1) is None
        assert objects.size("index.json") is None
        with objects.open("index.json", 0) as chunks:
            assert chunks is None

    def test_an_object_is_replaced_as_a_whole(self, make_objects: MakeObjects) -> None:
        for data in (b"a long one, to begin with", b"short"):
            put(make_objects(), "oci-layout", data)
            assert contents(make_objects(), "oci-layout") == data

    def test_no_more_is_read_than_is_allowed(self, make_objects: MakeObjects) -> None:
        put(make_objects(), "oci-layout", b"12345")
        with pytest.raises(CorruptError):
            make_objects().read("oci-layout", 4)

    @pytest.mark.parametrize("offset", [0, 1, 4])
    def test_a_download_goes_on_in_the_middle(self, make_objects: MakeObjects, offset: int) -> None:
        put(make_objects(), "oci-layout", b"12345")
        with make_objects().open("oci-layout", offset) as chunks:
            assert chunks is not None and b"".join(chunks) == b"12345"[offset:]

    # -- conditional writes -------------------------------------------------------------------------------------------

    def test_only_one_writer_creates(self, make_objects: MakeObjects) -> None:
        condition_of(make_objects())
        assert make_objects().replace("index.json", b"first", None)
        assert not make_objects().replace("index.json", b"second", None)
        assert contents(make_objects(), "index.json") == b"first"

    def test_a_write_on_top_of_another_version_is_refused(self, make_objects: MakeObjects) -> None:
        objects = make_objects()
        condition = condition_of(objects)
        objects.replace("index.json", b"first", None)
        found = objects.read("index.json", 100)
        assert found is not None
        assert make_objects().replace("index.json", b"second", condition(found.version))
        assert not objects.replace("index.json", b"third", condition(found.version))
        assert contents(make_objects(), "index.json") == b"second"

    def test_writers_at_once_lose_nothing(self, make_objects: MakeObjects) -> None:
        """Each adds four lines of its own to one object. A place may answer that it is busy, and have written all the
        same."""
        condition = condition_of(make_objects())
        make_objects().replace("index.json", b"", None)
        lines = [[b"%d.%d\n" % (writer, number) for number in range(4)] for writer in range(3)]

        def write(own: list[bytes]) -> None:
            objects = make_objects()
            for line in own:
                for _ in range(TRIES):
                    found = objects.read("index.json", 1 << 10)
                    assert found is not None
                    if line in found.data:
                        break
                    try:
                        objects.replace("index.json", found.data + line, condition(found.version))
                    except RemoteError as error:
                        if not error.fields.get("transient"):
                            raise

        writers = [threading.Thread(target=write, args=(own,)) for own in lines]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert sorted(contents(make_objects(), "index.json").splitlines(keepends=True)) == sorted(chain(*lines))

    def test_a_removal_is_no_error_twice(self, make_objects: MakeObjects) -> None:
        put(make_objects(), "oci-layout", b"1")
        for _ in range(2):
            make_objects().remove("oci-layout")
        assert make_objects().size("oci-layout") is None

    # -- a store ------------------------------------------------------------------------------------------------------

    def test_a_tag_names_a_bundle_with_all_its_blobs(self, make_objects: MakeObjects, single_writer: None) -> None:
        blob, bundle = bytes(range(256)) * 40_960, bundle_of("tiny")
        writer = ObjectStore(make_objects(), Traffic())
        writer.put_blob(sha256_bytes(blob), len(blob), io.BytesIO(blob))
        writer.set_tag(Reference(None, "tiny", tag="v1"), oci.INDEX, bundle)
        reader = ObjectStore(make_objects(), Traffic())
        named = Descriptor(media_type=oci.INDEX, digest=sha256_bytes(bundle), size=len(bundle))
        assert reader.resolve(Reference(None, "tiny", tag="v1")) == named
        assert reader.read(oci.INDEX, sha256_bytes(bundle), len(bundle)) == bundle
        assert reader.has_blob(sha256_bytes(blob), len(blob))
        with reader.open_blob(sha256_bytes(blob), len(blob), 5) as chunks:
            assert b"".join(chunks) == blob[5:]

    def test_a_tag_that_was_removed_is_not_found(self, make_objects: MakeObjects, single_writer: None) -> None:
        writer = ObjectStore(make_objects(), Traffic())
        for tag in ("v1", "v2"):
            writer.set_tag(Reference(None, "tiny", tag=tag), oci.INDEX, bundle_of("tiny"))
        writer.remove_tag(Reference(None, "tiny", tag="v1"))
        reader = ObjectStore(make_objects(), Traffic())
        assert [str(entry) for entry in reader.tags()] == ["tiny:v2"]
        with pytest.raises(NotFoundError, match="tiny:v1"):
            reader.resolve(Reference(None, "tiny", tag="v1"))

    def test_a_finished_unit_is_found_at_once(self, make_objects: MakeObjects, single_writer: None) -> None:
        key = sha256_bytes(b"a unit")
        ObjectStore(make_objects(), Traffic()).put_unit(key, b"{}")
        assert ObjectStore(make_objects(), Traffic()).read_unit(key) == b"{}"

    @pytest.fixture
    def single_writer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A place without conditional writes is written to by one process at a time."""
        monkeypatch.setenv("AOTC_SINGLE_WRITER", "1")


def condition_of(objects: Objects) -> Condition:
    """How this place compares versions. One that does not takes one writer at a time, by `AOTC_SINGLE_WRITER=1`."""
    condition = find_condition(objects)
    if condition is None:
        pytest.skip("this place writes whatever the condition says")
    return condition


def bundle_of(model: str) -> bytes:
    """A bundle without artifacts."""
    annotations = {oci.MODEL: model, oci.CREATED: "2026-01-01T00:00:00Z"}
    return canonical_json(ImageIndex(schema_version=2, media_type=oci.INDEX, manifests=(), annotations=annotations))


def put(objects: Objects, name: str, data: bytes) -> None:
    objects.put(name, io.BytesIO(data), len(data))


def contents(objects: Objects, name: str) -> bytes:
    found = objects.read(name, 1 << 20)
    assert found is not None
    return found.data
