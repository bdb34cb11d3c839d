"""Object storage and web servers: conditions, two writers, what breaks on the way, and what is said about it."""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from object_servers import (
    BUCKET,
    KEY,
    SECRET,
    needs_azurite,
    needs_radosgw,
    needs_rclone,
    web_server_without_ranges,
)
from registry_server import Fault, FaultProxy
from remote_reading import libraries, local_artifact
from sample_artifacts import CREATED, finish, make_artifact, make_variant, put_file, python, stored_artifact

from aotc.errors import CorruptError, NotFoundError, ReferenceFormatError, RemoteError, StoreError
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, find_unit, put_unit
from aotc.store.maintenance.fsck import fsck
from aotc.store.opening import open_objects, open_readable, open_remote
from aotc.store.reference import Reference, parse_reference
from aotc.store.remote.interface import CHUNK, Limits, Traffic
from aotc.store.remote.objects.object_interface import Objects, find_condition
from aotc.store.remote.objects.object_store import ObjectStore
from aotc.store.remote.push import parse_destination, push
from aotc.store.remote.staging import Staging

QUICK = Limits(connect=5, read=5, total=60, attempts=2, backoff=0.01)
LOCAL = Reference(None, "tiny", tag="v1")


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials of whoever runs the tests; a cache of this test's own."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name in ("SSL_CERT_FILE", "NETRC", "AOTC_SINGLE_WRITER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))


def set_environment(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def server(request: pytest.FixtureRequest, backends_started: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server that `with_server` names, for the environment of this test."""
    server = backends_started[request.param].server
    set_environment(monkeypatch, server.environment)
    return server


def with_server(*names: str) -> Any:
    marks = {"s3-ceph": needs_radosgw, "azure": needs_azurite, "s3-rclone": needs_rclone, "https": needs_rclone}
    chosen = [pytest.param(name, marks=marks.get(name, ())) for name in names]
    return pytest.mark.parametrize("server", chosen, indirect=True)


@pytest.fixture
def local(store: Store, work: Path) -> Store:
    """tiny:v1."""
    publish(store, "tiny", "v1", [stored_artifact(store, work)], created=CREATED)
    return store


def ref(url: str, tag: str = "v1") -> Reference:
    return parse_reference(f"{url}#tiny:{tag}")


@pytest.fixture
def proxy(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Stands before an S3 server. Its signatures are over the proxy's address, which is what the server sees too."""
    proxy = FaultProxy(server.port)
    set_environment(monkeypatch, {"AWS_ENDPOINT_URL": f"http://{proxy.host}"})
    yield proxy
    proxy.close()


# -- conditions -------------------------------------------------------------------------------------------------------


def objects_of(server: Any) -> Objects:
    return open_objects(server.new_url(), QUICK, Traffic())


@with_server("s3-ceph", "azure", "s3-rclone", "file")
def test_a_probe_finds_out_whether_the_server_looks_at_conditions(server: Any) -> None:
    assert (find_condition(objects_of(server)) is not None) == server.conditional


@with_server("s3-ceph", "azure")
def test_a_probe_leaves_nothing_behind(server: Any) -> None:
    from obstore.store import AzureStore, S3Store

    objects = objects_of(server)
    assert find_condition(objects) is not None
    kind = S3Store if server.root.startswith("s3") else AzureStore
    listed = kind(BUCKET, client_options={"allow_http": True}).list(prefix=objects.url.rpartition("/")[2])
    assert not [entry for batch in listed for entry in batch]


@with_server("s3-ceph", "azure", "file")
def test_of_writers_that_saw_the_same_version_one_writes(server: Any) -> None:
    """The atomicity that everything here stands on: a counter that many threads raise loses no step."""
    objects, steps, threads = objects_of(server), int(os.environ.get("AOTC_TEST_STEPS", "10")), 4
    condition = find_condition(objects)
    assert condition is not None and objects.replace("counter", b"0", None)

    def raise_counter(_: int) -> None:
        for _ in range(steps):
            while True:
                found = objects.read("counter", 100)
                assert found is not None
                try:
                    if objects.replace("counter", b"%d" % (int(found.data) + 1), condition(found.version)):
                        break
                except RemoteError as error:  # radosgw answers some lost races with 500
                    assert error.transient

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(raise_counter, range(threads)))
    found = objects.read("counter", 100)
    assert found is not None and int(found.data) == steps * threads


@with_server("s3-rclone")
def test_a_second_writer_is_noticed_where_a_single_one_was_promised(
    server: Any, local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_remote(server.new_url(), QUICK)
    assert isinstance(store, ObjectStore)
    bundle = local.blobs.read(local.resolve(LOCAL).digest, 1 << 20)
    put = store._objects.put

    def put_and_be_overtaken(name: str, stream: Any, size: int) -> None:
        put(name, stream, size)
        if name == "index.json":
            other = b'{"schemaVersion":2,"manifests":[]}'
            put(name, io.BytesIO(other), len(other))

    monkeypatch.setattr(store._objects, "put", put_and_be_overtaken)
    with pytest.raises(StoreError, match="has another writer"):
        store.set_tag(ref(store.url), "application/vnd.oci.image.index.v1+json", bundle)


@with_server("s3-rclone")
def test_a_single_writer_may_write_and_says_so(server: Any, local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.new_url()
    assert push(local, LOCAL, ref(url), limits=QUICK).moved == 7
    monkeypatch.setenv("AOTC_SINGLE_WRITER", "yes")
    with pytest.raises(StoreError, match="AOTC_SINGLE_WRITER=1"):
        push(local, LOCAL, ref(url, "v2"), limits=QUICK)


# -- what breaks ------------------------------------------------------------------------------------------------------


@with_server("s3-ceph")
def test_a_busy_service_is_asked_again(server: Any, proxy: FaultProxy, local: Store, tmp_path: Path) -> None:
    """One request in seven fails; a push takes some thirty."""
    url, draw, failed = server.new_url(), random.Random(1), itertools.count()
    busy = Fault(status=503, body=b"<Error><Code>SlowDown</Code></Error>")
    proxy.fault = lambda request: busy if draw.random() < 1 / 7 and next(failed) >= 0 else None
    push(local, LOCAL, ref(url), limits=Limits(connect=5, read=5, total=300, attempts=20, backoff=0.001))
    assert next(failed) > 2
    proxy.fault = lambda request: None
    assert libraries_of(url, tmp_path) == 2


def libraries_of(url: str, tmp_path: Path) -> int:
    store, artifact = local_artifact(ref(url), tmp_path / "elsewhere")
    return len(libraries(store, artifact.variants))


@with_server("s3-ceph")
@pytest.mark.parametrize(
    ("status", "code"),
    [(409, "ConditionalRequestConflict"), (412, "PreconditionFailed"), (500, "InternalError")],
)
def test_a_write_of_the_index_that_another_one_overtook_is_done_again(
    server: Any, proxy: FaultProxy, local: Store, status: int, code: str
) -> None:
    url = server.new_url()
    push(local, LOCAL, ref(url, "v0"), limits=QUICK)
    overtaken = iter([Fault(status=status, body=f"<Error><Code>{code}</Code></Error>".encode())])
    proxy.fault = lambda r: next(overtaken, None) if r.method == "PUT" and r.path.endswith("index.json") else None
    push(local, LOCAL, ref(url), limits=QUICK)
    assert next(overtaken, None) is None
    assert [str(entry) for entry in open_remote(url, QUICK).tags()] == ["tiny:v0", "tiny:v1"]


@with_server("s3-ceph")
def test_a_download_that_breaks_goes_on_where_it_broke(
    server: Any, proxy: FaultProxy, store: Store, work: Path, tmp_path: Path
) -> None:
    """At most the last `CHUNK` is asked for twice."""
    file = put_file(store, work, "model.so", random.Random(1).randbytes(3 * CHUNK))
    publish(store, "tiny", "v1", [make_artifact((make_variant((file,)),))], created=CREATED)
    url = server.new_url()
    push(store, LOCAL, ref(url), limits=QUICK)
    cut = iter([True])
    proxy.fault = lambda r: Fault(cut_after=2 * CHUNK) if file.blob[7:] in r.path and next(cut, False) else None
    proxy.seen.clear()
    assert libraries_of(url, tmp_path) == 1
    first, second = (request.headers.get("range", "") for request in proxy.seen if file.blob[7:] in request.path)
    assert first == "" and CHUNK <= int(second.removeprefix("bytes=").rstrip("-")) <= 2 * CHUNK


@with_server("s3-ceph")
def test_a_service_that_says_nothing_is_given_up(server: Any, proxy: FaultProxy) -> None:
    proxy.fault = lambda request: Fault(stall=3.0)
    began = time.monotonic()
    with pytest.raises(RemoteError, match="nothing came for too long") as caught:
        open_remote(server.new_url(), Limits(read=0.5)).tags()
    assert time.monotonic() - began < 2.5
    assert caught.value.transient and "AOTC_REMOTE_READ" in caught.value.hint


def test_a_web_server_that_knows_no_ranges_is_read_all_the_same(local: Store, tmp_path: Path) -> None:
    with web_server_without_ranges(local.path) as url:
        remote = open_remote(url, QUICK)
        blob = read_artifact(local, read_bundle(local, LOCAL).artifacts[0].digest).variants[0].files[0].blob
        whole = local.blobs.path(blob).read_bytes()
        with remote.open_blob(blob, len(whole), 7) as chunks:
            assert b"".join(chunks) == whole[7:]
        assert libraries_of(url, tmp_path) == 2


# -- errors -----------------------------------------------------------------------------------------------------------


def failure(url: str, limits: Limits = QUICK) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        open_remote(url, limits).tags()
    return caught.value


@with_server("s3-ceph")
@pytest.mark.parametrize(
    ("changes", "bucket", "said", "hint"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, BUCKET, "403 SignatureDoesNotMatch", "credentials are wrong"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, BUCKET, "403 InvalidAccessKeyId", "credentials are wrong"),
        ({}, "another-bucket", "404 NoSuchBucket", "check its name"),
        ({"AWS_SKIP_SIGNATURE": "true"}, BUCKET, "403 AccessDenied", "may not do that"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, BUCKET, "refused", "is the service running"),
        ({"AWS_ENDPOINT_URL": "http://no-such-host.invalid"}, BUCKET, "no address", "DNS"),
    ],
)
def test_what_is_wrong_is_said(
    server: Any, changes: dict[str, str], bucket: str, said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, changes)
    error = failure(f"s3://{bucket}/some/store")
    assert said in error.message and hint in error.hint
    assert "wrong" not in error.message and SECRET not in str(error)
    assert error.transient == ("refused" in said)


@with_server("s3-ceph")
def test_tls_where_there_is_none_is_said(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.environment["AWS_ENDPOINT_URL"].replace("http:", "https:"))
    error = failure(f"s3://{BUCKET}/store")
    assert "does not speak TLS" in error.message and "http://" in error.hint and not error.transient


@with_server("s3-ceph")
def test_a_wrong_clock_is_said(server: Any, proxy: FaultProxy) -> None:
    proxy.fault = lambda request: Fault(status=403, body=b"<Error><Code>RequestTimeTooSkewed</Code></Error>")
    assert "clock" in failure(f"s3://{BUCKET}/store").hint


@with_server("s3-ceph")
def test_a_bucket_of_another_region_is_said(server: Any, proxy: FaultProxy) -> None:
    proxy.fault = lambda request: Fault(status=301, body=b"<Error><Code>PermanentRedirect</Code></Error>")
    assert "AWS_REGION" in failure(f"s3://{BUCKET}/store").hint


@pytest.mark.parametrize("url", ["s3://bucket/store", "gs://bucket/store", "az://bucket/store"])
def test_missing_credentials_are_said(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where a machine's role would be asked for
    error = failure(url, Limits(connect=1, read=1, attempts=1))
    assert "no credentials were found" in error.message
    assert {"s3": "AWS_ACCESS_KEY_ID", "gs": "gcloud", "az": "AZURE_STORAGE_ACCOUNT_NAME"}[url[:2]] in error.hint
    assert not error.transient


@needs_rclone
def test_https_wants_a_trusted_certificate_and_a_password(
    backends_started: Mapping[str, Any], local: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = backends_started["https"].server
    url = server.new_url()
    local.path.rename(server.folder_of(url))
    error = failure(url)
    assert "certificate is not trusted" in error.message and "SSL_CERT_FILE" in error.hint and not error.transient
    monkeypatch.setenv("SSL_CERT_FILE", server.environment["SSL_CERT_FILE"])
    error = failure(url)
    assert error.status == 401 and ".netrc" in error.hint
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text(f"machine localhost login {KEY} password {SECRET}\n")
    assert [str(entry) for entry in open_remote(url, QUICK).tags()] == ["tiny:v1"]


@pytest.mark.parametrize("refused", ["", ".netrc"], ids=["home", "file"])
def test_a_netrc_that_may_not_be_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".netrc").write_text("machine localhost login one password two\n")
    method = "open" if refused else "stat"
    asked = getattr(builtins if refused else os, method)

    def refuse(path: Any, *rest: Any, **more: Any) -> Any:
        if Path(str(path)) == home / ".netrc":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return asked(path, *rest, **more)

    monkeypatch.setattr(builtins if refused else os, method, refuse)
    open_remote("https://localhost/store", QUICK)
    assert f"credentials in {home / '.netrc'} are not used: " in caplog.text


@with_server("s3-rclone")
def test_a_profile_s_credentials_are_used(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    credentials = tmp_path / "credentials"
    credentials.write_text(f"[ours]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_PROFILE", "ours")
    assert open_objects(server.new_url(), QUICK, Traffic()).size("nothing") is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://user:secret@host/store", "no user or password"),
        ("s3:///store", "names no bucket"),
        ("https://host/store?X-Amz-Signature=secret", "no query"),
        ("nonsense://host/store", "not a store that aotc knows"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_and_not_repeated(url: str, said: str) -> None:
    with pytest.raises((ReferenceFormatError, StoreError), match=said) as caught:
        open_remote(url, QUICK)
    assert "secret" not in str(caught.value)


def test_a_missing_library_is_named() -> None:
    code = "import sys; sys.modules['obstore'] = None\nfrom aotc.store.opening import open_readable\n"
    code += "from aotc.store.reference import parse_reference\nopen_readable('s3://b/p').resolve(parse_reference('m'))"
    process = python(code)
    _, errors = process.communicate(timeout=60)
    assert "pip install 'aotc[objects]'" in errors


FORK = """
import os, sys
from aotc.errors import RemoteError
from aotc.store.opening import open_remote
from aotc.store.remote.interface import Limits
store = open_remote(sys.argv[1], Limits())
tags = lambda: len(store.tags())
print(tags(), flush=True)
child = os.fork()
if not child:
    try:
        open_remote(sys.argv[1], Limits()).tags()
    except RemoteError as error:
        os._exit(7 if "spawn" in error.hint else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), tags())
"""


@with_server("s3-ceph")
def test_a_forked_process_is_told_so_and_its_parent_goes_on(server: Any, local: Store) -> None:
    """obstore's threads do not live in a forked child; without this, both processes would wait for ever."""
    url = server.new_url()
    push(local, LOCAL, ref(url), limits=QUICK)
    assert finish(python(FORK, url)).split() == ["1", "7", "1"]


# -- destinations -----------------------------------------------------------------------------------------------------


def test_a_destination_has_the_source_s_model_and_tag_unless_it_says_others() -> None:
    assert str(parse_destination("s3://b/p", LOCAL)) == "s3://b/p#tiny:v1"
    assert str(parse_destination("s3://b/p#tiny:v2", LOCAL)) == "s3://b/p#tiny:v2"
    assert str(parse_destination("oci://h/r:v3", LOCAL)) == "oci://h/r:v3"


@with_server("s3-ceph", "file")
def test_an_attachment_stands_beside_the_tags_and_is_none(server: Any, local: Store) -> None:
    url = server.new_url()
    push(local, LOCAL, ref(url), limits=QUICK)
    store, name = open_remote(url, QUICK), "sha256-" + "0" * 64 + ".sig"
    assert store.attachment(name) is None
    for data in (b'{"schemaVersion":2,"first":1}', b'{"schemaVersion":2}'):
        store.set_attachment(name, data, store.attachment(name))
    store.set_attachment(name, b'{"schemaVersion":2,"third":1}', None)  # by somebody who saw none
    found = store.attachment(name)
    assert found is not None and store.read(found.media_type, found.digest, 100) == b'{"schemaVersion":2}'
    assert [str(entry) for entry in store.tags()] == ["tiny:v1"]


# -- units and staging ------------------------------------------------------------------------------------------------


def unit_of(store: Store, work: Path, batch: int) -> UnitRecord:
    artifact = stored_artifact(store, work, (batch,))
    unit = UnitRecord(artifact.variants[0].key, {"model": "tiny"}, artifact, 1.5, CREATED)
    put_unit(store, unit)
    return unit


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it to be on another machine from now on: with an empty cache."""
    names = iter(range(100))

    def new() -> None:
        monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / f"machine-{next(names)}"))

    return new


@with_server("s3-ceph", "file")
def test_a_fresh_machine_gets_the_units_that_another_one_finished(server: Any, machine: Any, work: Path) -> None:
    url = server.new_url()
    machine()
    first = Staging(url, QUICK)
    units = [unit_of(first.store, work, batch) for batch in (1, 2)]
    first.keep(units[0].key)  # the second one was running when the machine went away
    machine()
    second = Staging(url, QUICK)
    assert second.fetch(unit.key for unit in units) == {units[0].key}
    assert find_unit(second.store, units[0].key) == units[0]
    assert find_unit(second.store, units[1].key) is None


@with_server("s3-ceph", "file")
def test_a_build_s_bundle_is_at_the_url_under_the_tag(server: Any, machine: Any, work: Path, tmp_path: Path) -> None:
    url = server.new_url()
    machine()
    staging = Staging(url, QUICK)
    unit = unit_of(staging.store, work, 1)
    staging.keep(unit.key)
    digest = publish(staging.store, "tiny", "v1", [unit.artifact], created=CREATED)
    assert staging.push("tiny", "v1").moved == 2  # the provenance and the record: the unit's files are there
    assert read_bundle(open_readable(url), ref(url)).digest == digest


@with_server("file")
def test_a_copy_of_a_url_is_a_store_with_its_units_and_the_other_way_round(
    server: Any, machine: Any, work: Path, tmp_path: Path
) -> None:
    url = server.new_url()
    machine()
    staging = Staging(url, QUICK)
    unit = unit_of(staging.store, work, 1)
    staging.keep(unit.key)
    publish(staging.store, "tiny", "v1", [unit.artifact], created=CREATED)
    staging.push("tiny", "v1")
    copy = Store.open(shutil.copytree(server.folder_of(url), tmp_path / "copy"))
    assert find_unit(copy, unit.key) == unit
    assert [finding for finding in fsck(copy.path).findings if finding.severity == "error"] == []
    shutil.copytree(
        staging.store.path / ".aotc" / "units", server.folder_of(url) / ".aotc" / "units", dirs_exist_ok=True
    )
    machine()
    assert Staging(url, QUICK).fetch([unit.key]) == {unit.key}


@with_server("file")
@pytest.mark.parametrize("damage", ["record", "one value", "other record", "blob", "no blob"])
def test_a_damaged_unit_is_compiled_again(server: Any, machine: Any, work: Path, damage: str) -> None:
    url = server.new_url()
    machine()
    first = Staging(url, QUICK)
    unit, other = unit_of(first.store, work, 1), unit_of(first.store, work, 2)
    first.keep(unit.key)
    folder = server.folder_of(url)
    record = folder / ".aotc" / "units" / f"{unit.key[7:]}.json"
    blob = folder / "blobs" / "sha256" / unit.artifact.variants[0].files[0].blob[7:]
    if damage == "record":
        record.write_bytes(record.read_bytes()[:-1])
    elif damage == "one value":
        changed = record.read_bytes().replace(b'"seconds":1.5', b'"seconds":2.5')
        assert changed != record.read_bytes()
        record.write_bytes(changed)
    elif damage == "other record":
        first.keep(other.key)
        record.write_bytes((record.parent / f"{other.key[7:]}.json").read_bytes())
    elif damage == "blob":
        blob.write_bytes(bytes(reversed(blob.read_bytes())))
    else:
        blob.unlink()
    machine()
    assert Staging(url, QUICK).fetch([unit.key]) == set()


def test_a_registry_keeps_no_units() -> None:
    with pytest.raises(StoreError, match="keeps no finished units") as caught:
        Staging("oci://127.0.0.1:9/team/repo", QUICK)
    assert "aotc push" in caught.value.hint


@with_server("s3-ceph")
def test_a_store_that_was_begun_and_not_finished_is_finished(server: Any, local: Store, tmp_path: Path) -> None:
    """Killed between index.json and oci-layout: readers see no store, and the next writer makes it one."""
    url = server.new_url()
    objects = open_objects(url, QUICK, Traffic())
    assert objects.replace("index.json", b'{"manifests":[],"schemaVersion":2}', None)
    with pytest.raises(NotFoundError, match="no store"):
        open_remote(url, QUICK).tags()
    push(local, LOCAL, ref(url), limits=QUICK)
    assert libraries_of(url, tmp_path) == 2


@with_server("s3-ceph")
def test_a_store_without_its_index_is_corrupt_and_not_empty(server: Any, local: Store) -> None:
    url = server.new_url()
    push(local, LOCAL, ref(url), limits=QUICK)
    open_objects(url, QUICK, Traffic()).remove("index.json")
    with pytest.raises(CorruptError, match=r"no index\.json"):
        open_remote(url, QUICK).tags()
    with pytest.raises(CorruptError, match=r"no index\.json"):
        push(local, LOCAL, ref(url, "v2"), limits=QUICK)
