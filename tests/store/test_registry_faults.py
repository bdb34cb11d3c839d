"""A network that breaks: what is resumed, what is tried again and how often, and what is said in the end."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from registry_server import Fault, FaultProxy, RegistryServer, Request, free_port, needs
from remote_reading import fetch_all, load_hot, remote_store
from sample_artifacts import CREATED, make_artifact, make_variant, put_file, python

from aotc.errors import CorruptError, NotFoundError, RemoteError, StoreError
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.maintenance.fsck import fsck
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.retention import Policy
from aotc.store.reference import Reference, parse_reference
from aotc.store.remote import fetching
from aotc.store.remote.interface import Deadline, Limits, Retry, retrying
from aotc.store.remote.push import push
from aotc.store.tagging import remove_tag

pytestmark = needs("docker-registry")

LIMITS = Limits(connect=2, read=1, total=30, attempts=4, backoff=0.01, longest_wait=0.05, jobs=2)
SIZE = 3_000_000
LOCAL = Reference(None, "tiny", tag="v1")


@pytest.fixture(scope="module")
def library() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, library: bytes) -> Store:
    """tiny:v1 with one incompressible library, so that its blob is as large."""
    folder = tmp_path_factory.mktemp("source")
    store = Store.create(folder / "store")
    publish(
        store,
        "tiny",
        "v1",
        [make_artifact((make_variant((put_file(store, folder, "model.so", library),)),))],
        created=CREATED,
    )
    return store


@pytest.fixture
def where(proxy: FaultProxy, source: Store, registry: RegistryServer) -> str:
    """The bundle in the registry, behind the proxy."""
    push(source, LOCAL, parse_reference(f"oci://{registry.host}/team/tiny:v1"), limits=LIMITS)
    return f"oci://{proxy.host}/team/tiny:v1"


def blob_of(source: Store) -> str:
    """The library's blob: the largest."""
    return max((source.path / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size).name


def times(count: int, fault: Fault, matches: Callable[[Request], bool]) -> Callable[[Request], Fault | None]:
    """The fault for the first `count` requests that match."""
    left = [count]

    def decide(request: Request) -> Fault | None:
        if matches(request) and left[0]:
            left[0] -= 1
            return fault
        return None

    return decide


def ranges(proxy: FaultProxy, digest: str) -> list[str]:
    return [r.headers.get("Range", "") for r in proxy.seen if r.method == "GET" and r.path.endswith(digest)]


# -- downloads --------------------------------------------------------------------------------------------------------


def test_a_download_goes_on_at_the_byte_where_it_broke(
    where: str, proxy: FaultProxy, source: Store, library: bytes, tmp_path: Path
) -> None:
    blob = blob_of(source)
    proxy.fault = times(3, Fault(cut_after=700_000), lambda request: request.path.endswith(blob))
    assert list(load_hot(where, tmp_path / "cache", LIMITS).values()) == [library]
    assert ranges(proxy, blob) == ["", "bytes=700000-", "bytes=1400000-", "bytes=2100000-"]


def test_a_server_that_ignores_ranges_is_read_past_what_is_here(
    where: str, proxy: FaultProxy, source: Store, library: bytes, tmp_path: Path
) -> None:
    blob = blob_of(source)
    cut = times(1, Fault(cut_after=700_000), lambda request: request.path.endswith(blob))
    proxy.fault = lambda request: cut(request) or Fault(drop_headers=("Range",))
    assert list(load_hot(where, tmp_path / "cache", LIMITS).values()) == [library]


def test_a_download_that_stalls_is_broken_off_and_resumed(
    where: str, proxy: FaultProxy, source: Store, library: bytes, tmp_path: Path
) -> None:
    blob = blob_of(source)
    proxy.fault = times(1, Fault(stall=4), lambda request: request.path.endswith(blob))
    assert list(load_hot(where, tmp_path / "cache", LIMITS).values()) == [library]
    first, second = ranges(proxy, blob)
    assert first == ""
    assert second == f"bytes={len((source.path / 'blobs' / 'sha256' / blob).read_bytes()) // 2}-"


PULL = """
import sys
from pathlib import Path
from aotc.store.reference import parse_reference
from remote_reading import fetch_all
from aotc.store.remote.interface import Limits
fetch_all(parse_reference(sys.argv[1]), Path(sys.argv[2]), limits=Limits(jobs=2))
"""


def test_a_pull_that_is_killed_shows_nothing_and_the_next_one_goes_on_where_it_was(
    where: str, proxy: FaultProxy, source: Store, tmp_path: Path
) -> None:
    blob = blob_of(source)
    proxy.fault = times(1, Fault(stall=60), lambda request: request.path.endswith(blob))
    process = python(PULL, where, tmp_path / "copy")
    partial = tmp_path / "copy" / "blobs" / "sha256" / f".tmp-{blob}"
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 1_000_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    came = partial.stat().st_size
    assert Store.open(tmp_path / "copy").tags() == []
    proxy.seen.clear()
    pulled = fetch_all(parse_reference(where), tmp_path / "copy", limits=LIMITS)
    assert ranges(proxy, blob) == [f"bytes={came}-"]
    assert pulled.digest == read_bundle(Store.open(tmp_path / "copy"), LOCAL).digest
    assert not list((tmp_path / "copy").rglob(".tmp-*"))


@pytest.mark.parametrize("left", ["damaged", "too long", "whole"])
def test_what_an_earlier_download_left_is_checked(
    where: str, proxy: FaultProxy, source: Store, tmp_path: Path, left: str
) -> None:
    blob = blob_of(source)
    whole = (source.path / "blobs" / "sha256" / blob).read_bytes()
    store = Store.create(tmp_path / "copy")
    data = {"damaged": b"\0" + whole[1:1_000_000], "too long": whole + b"x", "whole": whole}[left]
    (store.path / "blobs" / "sha256" / f".tmp-{blob}").write_bytes(data)
    fetch_all(parse_reference(where), store.path, limits=LIMITS)
    assert store.blobs.path(f"sha256:{blob}").read_bytes() == whole
    assert ranges(proxy, blob) == {"damaged": ["bytes=1000000-", ""], "too long": [""], "whole": []}[left]


def test_gc_beside_a_pull_takes_no_old_download_for_garbage(
    where: str, source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier pull downloaded to its last byte counts as written when the next one gives it its name."""
    blob = blob_of(source)
    store = Store.create(tmp_path / "copy")
    left = store.path / "blobs" / "sha256" / f".tmp-{blob}"
    left.write_bytes((source.path / "blobs" / "sha256" / blob).read_bytes())
    os.utime(left, (0, 0))
    monkeypatch.setattr(fetching, "fetch_signatures", lambda *_: collect(store, Policy()))
    fetch_all(parse_reference(where), store.path, limits=LIMITS)
    assert fsck(store.path).errors == []


def test_a_pull_sets_no_tag_where_a_blob_has_gone_meanwhile(
    where: str, source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = blob_of(source)
    store = Store.create(tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(fetching, "fetch_signatures", lambda *_: store.blobs.path(f"sha256:{blob}").unlink())
        with pytest.raises(NotFoundError, match=blob) as caught:
            fetch_all(parse_reference(where), store.path, limits=LIMITS)
    assert "fetch" in caught.value.hint
    assert store.tags() == []
    fetch_all(parse_reference(where), store.path, limits=LIMITS)
    assert fsck(store.path).errors == []


def test_bytes_that_are_not_the_blob_are_fetched_once_more_and_then_refused(
    where: str, proxy: FaultProxy, source: Store, library: bytes, tmp_path: Path
) -> None:
    blob = blob_of(source)
    lie = Fault(change=lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    proxy.fault = times(1, lie, lambda request: request.path.endswith(blob))
    assert list(load_hot(where, tmp_path / "one", LIMITS).values()) == [library]
    proxy.fault = times(99, lie, lambda request: request.path.endswith(blob))
    with pytest.raises(CorruptError) as caught:
        load_hot(where, tmp_path / "two", LIMITS)
    assert caught.value.expected == f"sha256:{blob}"
    assert caught.value.actual.startswith("sha256:")
    assert blob not in [path.name for path in (tmp_path / "two").rglob("*")]


def test_a_document_that_is_not_its_digest_s_is_refused(where: str, proxy: FaultProxy, tmp_path: Path) -> None:
    lie = Fault(change=lambda data: data.replace(b"cpu:x86-64-v3", b"cpu:x86-64-v4"))
    proxy.fault = lambda request: lie if request.method == "GET" and "/manifests/sha256" in request.path else None
    with pytest.raises(CorruptError, match="sent sha256"):
        load_hot(where, tmp_path / "cache", LIMITS)
    assert not list((tmp_path / "cache").rglob("blobs"))


def test_more_bytes_than_the_blob_has_are_not_taken(
    where: str, proxy: FaultProxy, source: Store, tmp_path: Path
) -> None:
    blob = blob_of(source)
    proxy.fault = lambda request: Fault(change=lambda data: data * 2) if request.path.endswith(blob) else None
    with pytest.raises(CorruptError, match="more than"):
        load_hot(where, tmp_path / "cache", LIMITS)


def test_a_full_disk_is_a_typed_error_of_the_disk_and_not_of_the_network(
    where: str, source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import aotc.store.remote.transfer as transfer_module

    class Full:
        def __init__(self, stream: object) -> None:
            self._stream = stream

        def __getattr__(self, name: str) -> object:
            return getattr(self._stream, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._stream.close()  # type: ignore[attr-defined]

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

    opened = transfer_module._open_to_append
    monkeypatch.setattr(transfer_module, "_open_to_append", lambda path: Full(opened(path)))
    with pytest.raises(StoreError, match="No space left") as caught:
        fetch_all(parse_reference(where), tmp_path / "copy", limits=LIMITS)
    assert not isinstance(caught.value, RemoteError)
    assert "free space" in caught.value.hint


# -- uploads ----------------------------------------------------------------------------------------------------------


def test_an_upload_that_breaks_is_begun_again(
    source: Store, proxy: FaultProxy, registry: RegistryServer, tmp_path: Path
) -> None:
    large = lambda request: request.method == "PUT" and int(request.headers["Content-Length"]) > 1_000_000  # noqa: E731
    proxy.fault = times(2, Fault(cut_request_after=500_000), large)
    to = parse_reference(f"oci://{proxy.host}/team/upload:v1")
    digest = push(source, LOCAL, to, limits=LIMITS).digest
    assert proxy.count("PUT", blob_of(source)) == 3
    assert fetch_all(to, tmp_path / "copy", limits=LIMITS).digest == digest


def test_the_progress_of_a_push_that_had_to_begin_again_ends_at_its_size(source: Store, proxy: FaultProxy) -> None:
    large = lambda request: request.method == "PUT" and int(request.headers["Content-Length"]) > 1_000_000  # noqa: E731
    proxy.fault = times(1, Fault(cut_request_after=500_000), large)
    planned, moved = [], []
    push(
        source,
        LOCAL,
        parse_reference(f"oci://{proxy.host}/team/progress:v1"),
        limits=LIMITS,
        on_event=lambda event: (planned if event.what == "planned" else moved).append(event.size),
    )
    assert sum(moved) == sum(planned) > SIZE
    assert min(moved) < 0


# -- answers that nobody should give ----------------------------------------------------------------------------------


def redirect(location: str) -> Fault:
    return Fault(307, {"Location": location})


def challenge(realm: str) -> Fault:
    return Fault(401, {"WWW-Authenticate": f'Bearer realm="{realm}"'})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (redirect("http://[no"), "leads to what is not a URL"),
        (redirect("http://127.0.0.1:port/"), "port"),
        (redirect("http://\xe4\xf6..x/"), "leads to what is not a URL"),
        (redirect("ftp://127.0.0.1/"), "ftp"),
        (redirect(""), "answers 307"),
        (challenge("https://[no"), "cannot get a token"),
        (challenge("nowhere"), "not https"),
        (Fault(500, body=b"[" * 60_000), r"answers 500.*\[\["),
        (Fault(500, body=b'{"errors": {"a": 1}}'), "answers 500"),
        (Fault(204), "answers 204"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_an_odd_answer_is_an_error_that_says_what_came(
    source: Store, where: str, proxy: FaultProxy, tmp_path: Path, method: str, fault: Fault, message: str
) -> None:
    proxy.fault = lambda request: fault if request.method == method else None
    quick = msgspec.structs.replace(LIMITS, attempts=1)
    with pytest.raises(RemoteError, match=message):
        if method == "GET":
            load_hot(where, tmp_path / "cache", quick)
        else:
            push(source, LOCAL, parse_reference(f"oci://{proxy.host}/team/odd:v1"), limits=quick)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "says in no Location where to send it"),
        ({"Location": ""}, "says in no Location where to send it"),
        ({"Location": "http://[no"}, "http://\\[no.*, which is not a URL"),
    ],
)
def test_an_upload_that_goes_nowhere_is_an_error(
    source: Store, proxy: FaultProxy, headers: dict[str, str], message: str
) -> None:
    proxy.fault = lambda request: Fault(202, headers) if request.method == "POST" else None
    with pytest.raises(RemoteError, match=message):
        push(source, LOCAL, parse_reference(f"oci://{proxy.host}/team/nowhere:v1"), limits=LIMITS)
    assert proxy.count("PUT") == 0


def test_an_upload_to_a_relative_location_arrives(
    source: Store, proxy: FaultProxy, registry: RegistryServer, tmp_path: Path
) -> None:
    places: dict[str, str] = {}

    def relative(request: Request) -> Fault | None:
        if request.method != "POST":
            return None
        upstream = http.client.HTTPConnection("127.0.0.1", registry.port, timeout=60)
        upstream.request("POST", request.path)
        url = urlsplit(upstream.getresponse().headers["Location"])
        upstream.close()
        places[url.path] = f"{url.path.rpartition('/')[2]}?{url.query}"
        return Fault(202, {"Location": places[url.path]})

    proxy.fault = relative
    to = parse_reference(f"oci://{proxy.host}/team/relative:v1")
    digest = push(source, LOCAL, to, limits=LIMITS).digest
    assert fetch_all(to, tmp_path / "copy", limits=LIMITS).digest == digest
    assert places


def test_a_size_that_is_none_is_not_believed(where: str, proxy: FaultProxy, library: bytes, tmp_path: Path) -> None:
    proxy.fault = lambda request: Fault(headers={"Content-Length": "9" * 5000}) if request.method == "HEAD" else None
    assert list(load_hot(where, tmp_path / "cache", LIMITS).values()) == [library]


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        ("page", {"Content-Type": "text/html", "Content-Length": "512"}),
        ("no-length", {"Content-Type": "text/html"}),
        ("other-blob", {"Docker-Content-Digest": f"sha256:{0:064}"}),
    ],
)
def test_a_blob_is_there_only_where_the_answer_is_about_it(
    source: Store, proxy: FaultProxy, registry: RegistryServer, tmp_path: Path, name: str, headers: dict[str, str]
) -> None:
    """Not where a proxy that wants a login answers any question with a page of its own."""
    proxy.fault = lambda request: Fault(200, headers) if request.method == "HEAD" else None
    pushed = push(source, LOCAL, parse_reference(f"oci://{proxy.host}/team/{name}:v1"), limits=LIMITS)
    assert pushed.moved == pushed.blobs
    there = parse_reference(f"oci://{registry.host}/team/{name}:v1")
    assert fetch_all(there, tmp_path / "copy", limits=LIMITS).digest == pushed.digest


def test_what_is_there_is_known_by_its_size_alone(source: Store, where: str, proxy: FaultProxy) -> None:
    proxy.fault = lambda request: Fault(headers={"Docker-Content-Digest": ""}) if request.method == "HEAD" else None
    assert push(source, LOCAL, parse_reference(where), limits=LIMITS).moved == 0


def test_an_empty_digest_of_what_was_put_says_nothing(source: Store, proxy: FaultProxy) -> None:
    proxy.fault = lambda request: Fault(headers={"Docker-Content-Digest": ""}) if request.method == "PUT" else None
    push(source, LOCAL, parse_reference(f"oci://{proxy.host}/team/silent:v1"), limits=LIMITS)


# -- retries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(
    where: str, proxy: FaultProxy, library: bytes, tmp_path: Path, status: int
) -> None:
    proxy.fault = times(3, Fault(status=status), lambda request: True)
    assert list(load_hot(where, tmp_path / "cache", LIMITS).values()) == [library]


@pytest.mark.parametrize(("status", "requests"), [(400, 1), (403, 1), (405, 1), (418, 1), (503, 4)])
def test_in_the_end_the_error_says_what_the_registry_said(
    where: str, proxy: FaultProxy, tmp_path: Path, status: int, requests: int
) -> None:
    body = b'{"errors":[{"code":"DENIED","message":"because \\u001b[31m of this"}]}'
    proxy.fault = lambda request: Fault(status=status, body=body) if request.method == "GET" else None
    with pytest.raises(RemoteError, match=f"answers {status}.*DENIED: because  ?\\[31m of this") as caught:
        load_hot(where, tmp_path / "cache", LIMITS)
    assert caught.value.status == status
    assert caught.value.url.startswith(f"http://{proxy.host}/v2/team/tiny/manifests/sha256")
    assert proxy.count("GET") == requests


def test_retry_after_is_waited_for(where: str, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.fault = times(1, Fault(status=429, headers={"Retry-After": "1"}), lambda request: True)
    began = time.monotonic()
    load_hot(where, tmp_path / "cache", LIMITS)
    assert time.monotonic() - began >= 1


def test_a_retry_after_beyond_the_time_limit_is_not_waited_for(where: str, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.fault = lambda request: Fault(status=503, headers={"Retry-After": "3600"})
    began = time.monotonic()
    with pytest.raises(RemoteError, match="was not done within 30 s: the next attempt is 3600 s away") as caught:
        load_hot(where, tmp_path / "cache", LIMITS)
    assert time.monotonic() - began < 20
    assert "503" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "value",
    ["-5", "1e9", "nan", "soon", "", "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 99999 07:28:00 GMT", "9" * 5000],
)
def test_a_retry_after_that_is_no_wait_is_not_waited_for(
    where: str, proxy: FaultProxy, library: bytes, tmp_path: Path, value: str
) -> None:
    proxy.fault = times(1, Fault(429, {"Retry-After": value}), lambda request: True)
    assert list(load_hot(where, tmp_path / "cache", LIMITS).values()) == [library]


def test_waits_grow_and_are_drawn_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    limits = Limits(backoff=1, longest_wait=8, attempts=9)
    deadline = Deadline(1e9, "url")
    monkeypatch.setattr(deadline, "wait", waits.append)
    for _ in range(200):
        retry = Retry(limits, deadline)
        for _ in range(6):
            retry.after(RemoteError("no", transient=True))
    by_attempt = [waits[number::6] for number in range(6)]
    for longest, drawn in zip((1, 2, 4, 8, 8, 8), by_attempt, strict=True):
        assert longest * 0.9 < max(drawn) <= longest  # of 200 draws, some are near the end …
        assert min(drawn) < longest * 0.1  # … and some at once


def test_progress_begins_the_count_of_attempts_anew(
    where: str, proxy: FaultProxy, source: Store, library: bytes, tmp_path: Path
) -> None:
    blob = blob_of(source)
    proxy.fault = times(20, Fault(cut_after=140_000), lambda request: request.path.endswith(blob))
    assert list(load_hot(where, tmp_path / "cache", LIMITS).values()) == [library]
    assert len(ranges(proxy, blob)) == 21 > LIMITS.attempts


# -- time limits ------------------------------------------------------------------------------------------------------


def test_a_document_has_a_time_limit_too(where: str, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.fault = lambda request: Fault(trickle=0.1) if request.method == "GET" else None
    began = time.monotonic()
    with pytest.raises(RemoteError, match="was not done within 2 s"):
        load_hot(where, tmp_path / "cache", Limits(connect=2, read=1, total=2, backoff=0.01, longest_wait=0.05))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("fault", [Fault(cut_after=1), Fault(trickle=0.1)], ids=["one byte a request", "trickle"])
def test_the_whole_has_a_time_limit_also_where_bytes_still_come(
    where: str, proxy: FaultProxy, source: Store, tmp_path: Path, fault: Fault
) -> None:
    proxy.fault = lambda request: fault if request.path.endswith(blob_of(source)) else None
    hasty = Limits(connect=2, read=1, total=2, backoff=0.01, longest_wait=0.05)
    began = time.monotonic()
    with pytest.raises(RemoteError, match="was not done within 2 s") as caught:
        load_hot(where, tmp_path / "cache", hasty)
    assert time.monotonic() - began < 10
    assert "AOTC_REMOTE_TOTAL" in caught.value.hint


def test_a_server_that_accepts_and_says_nothing_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}/r:t"
        limits = Limits(connect=0.5, read=0.5, total=30, attempts=2, backoff=0.01)
        with pytest.raises(RemoteError, match="sent nothing for too long") as caught:
            load_hot(f"oci://{where}", tmp_path / "cache", limits)
        assert "AOTC_REMOTE_READ" in caught.value.hint
        assert caught.value.attempts == 2
        with pytest.raises(RemoteError, match=r"sent nothing for too long|no connection within"):
            load_hot(f"oci+https://{where}", tmp_path / "cache", limits)  # in the middle of the TLS handshake


@pytest.mark.parametrize("begun_all", [True, False])
def test_ctrl_c_ends_the_threads(where: str, begun_all: bool) -> None:
    remote = remote_store(where.rpartition(":")[0], LIMITS)
    begun = threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        begun.wait(20)
        if not begun_all:
            raise KeyboardInterrupt
        yield 0

    def work(number: int) -> None:
        begun.set()
        if number == 0:
            raise KeyboardInterrupt
        retrying(LIMITS, remote.transfer._deadline, fail)

    def fail() -> None:
        raise RemoteError("no", transient=True, retry_after=20)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        remote.transfer.each(work, numbers())
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AOTC_REMOTE_READ", "2.5")
    monkeypatch.setenv("AOTC_REMOTE_JOBS", "3")
    assert Limits.from_environment() == Limits(read=2.5, jobs=3)
    monkeypatch.setenv("AOTC_REMOTE_JOBS", value)
    if value:
        with pytest.raises(StoreError, match="AOTC_REMOTE_JOBS"):
            Limits.from_environment()
    else:
        assert Limits.from_environment().jobs == Limits().jobs


# -- no answer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "message", "hint"),
    [
        ("oci://127.0.0.1:PORT/r", "the connection is refused", "is a registry running at 127.0.0.1:PORT?"),
        ("oci://no-such-host.invalid/r", "name has no address", "check the name no-such-host.invalid"),
        ("oci+https://REGISTRY/r", "TLS fails", "oci+http://"),
    ],
)
def test_where_nobody_answers_the_error_says_why(
    registry: RegistryServer, tmp_path: Path, store: str, message: str, hint: str
) -> None:
    port = str(free_port())
    url = store.replace("PORT", port).replace("REGISTRY", registry.host)
    with pytest.raises(RemoteError, match=message) as caught:
        load_hot(f"{url}:t", tmp_path / "cache", LIMITS)
    assert hint.replace("PORT", port) in caught.value.hint
    assert "0x" not in str(caught.value)


@pytest.mark.parametrize(("status", "told"), [(202, ""), (404, ""), (405, "removes no tags")])
def test_a_tag_is_removed_as_the_registry_answers(where: str, proxy: FaultProxy, status: int, told: str) -> None:
    """By the distribution specification 1.1: 202, and 400 or 405 of a registry that removes none. The tag was there a
    moment ago: 404 says that it is removed, as by an attempt whose answer was lost."""
    proxy.fault = lambda request: Fault(status=status) if request.method == "DELETE" else None
    reference = parse_reference(where)
    if told:
        with pytest.raises(StoreError, match=told):
            remove_tag(str(reference.store), reference)
    else:
        assert remove_tag(str(reference.store), reference).others is None
    (deleted,) = [request.path for request in proxy.seen if request.method == "DELETE"]
    assert deleted.endswith("/manifests/v1")
