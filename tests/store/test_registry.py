"""Bundles in a real registry: pushed, pulled, read in place; and that other tools see the same digests."""

from __future__ import annotations

import base64
import errno
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from registry_server import (
    PASSWORD,
    USER,
    Fault,
    FaultProxy,
    RegistryServer,
    TokenService,
    docker_config,
    free_port,
    htpasswd,
    needs,
    running_registry,
)
from remote_reading import LIBRARIES, QUICK, fetch_all, load_hot, remote_store
from sample_artifacts import (
    CREATED,
    finish,
    make_artifact,
    make_variant,
    put_file,
    python,
    stored_artifact,
)

from aotc.digest import sha256_bytes
from aotc.errors import CorruptError, NotFoundError, ReferenceFormatError, RemoteError, StoreError
from aotc.records import Artifact
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import each_file, read_artifact, read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.opening import open_readable
from aotc.store.reference import Reference, parse_reference
from aotc.store.remote.push import push
from aotc.store.remote.registry.authorization import Authorization
from aotc.store.remote.registry.repository import Registry

pytestmark = needs("docker-registry")

LOCAL = Reference(None, "tiny", tag="v1")


@pytest.fixture
def where(registry: RegistryServer, request: pytest.FixtureRequest) -> str:
    """A repository of this test's own."""
    return f"oci://{registry.host}/team/{request.node.name.replace('[', '-').rstrip(']').lower()}"


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials of whoever runs the tests; the cache folder is this test's own."""
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def published(store: Store, work: Path) -> Store:
    """tiny:v1 for two targets."""
    publish(store, "tiny", "v1", both_targets(store, work), created=CREATED, annotations={"commit": "abc"})
    return store


def both_targets(store: Store, work: Path, batches: tuple[int, ...] = (1, 8)) -> list[Artifact]:
    other = make_variant((put_file(store, work, "model.so", b"for the other CPU" * 99),))
    return [stored_artifact(store, work, batches), make_artifact((other,), target="cpu:amx")]


def ref(where: str, tag: str = "v1") -> Reference:
    return parse_reference(f"{where}:{tag}")


# -- push and pull ----------------------------------------------------------------------------------------------------


def test_what_is_pushed_comes_back_byte_for_byte_under_the_same_digests(
    published: Store, where: str, tmp_path: Path
) -> None:
    pushed = push(published, LOCAL, ref(where), limits=QUICK)
    pulled = fetch_all(ref(where), tmp_path / "copy", limits=QUICK)
    copy = Store.open(tmp_path / "copy")
    assert pushed.digest == pulled.digest == read_bundle(published, LOCAL).digest
    assert read_bundle(copy, LOCAL) == read_bundle(published, LOCAL)
    assert files_of(copy) == files_of(published)
    assert [(str(tag), tag.digest) for tag in copy.tags()] == [(str(tag), tag.digest) for tag in published.tags()]


def files_of(store: Store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (store.path / "blobs" / "sha256").iterdir()}


def test_a_second_push_uploads_no_blob_and_a_second_pull_downloads_nothing(
    published: Store, where: str, tmp_path: Path
) -> None:
    assert push(published, LOCAL, ref(where), limits=QUICK).moved > 0
    assert push(published, LOCAL, ref(where), limits=QUICK).moved == 0
    assert fetch_all(ref(where), tmp_path / "copy", limits=QUICK).moved > 0
    again = fetch_all(ref(where), tmp_path / "copy", limits=QUICK)
    assert (again.moved, again.received, again.requests) == (0, 0, 1)  # for the tag


def test_a_new_version_moves_only_what_changed(published: Store, work: Path, where: str, tmp_path: Path) -> None:
    push(published, LOCAL, ref(where), limits=QUICK)
    fetch_all(ref(where), tmp_path / "copy", limits=QUICK)
    publish(published, "tiny", "v2", both_targets(published, work, (1, 8, 32)), created=CREATED)
    pushed = push(published, Reference(None, "tiny", tag="v2"), ref(where, "v2"), limits=QUICK)
    pulled = fetch_all(ref(where, "v2"), tmp_path / "copy", limits=QUICK)
    assert pushed.moved == 4  # the new bucket's library and report, the record and the provenance
    assert pulled.moved == 3


def test_the_tag_is_set_last_and_a_push_that_broke_leaves_the_old_one(
    published: Store, work: Path, registry: RegistryServer, where: str, proxy: FaultProxy
) -> None:
    through = where.replace(registry.host, proxy.host)
    first = push(published, LOCAL, ref(through), limits=QUICK).digest
    puts = [request.path.rpartition("/team/")[2].split("/")[1] for request in proxy.seen if request.method == "PUT"]
    assert puts == sorted(puts)  # every blob before any manifest
    assert [request.path for request in proxy.seen if request.method == "PUT"][-1].endswith("/manifests/v1")
    publish(published, "tiny", "v1", both_targets(published, work, (1, 8, 32)), created=CREATED)
    proxy.fault = lambda request: Fault(status=500) if request.method == "PUT" and "/blobs/" in request.path else None
    with pytest.raises(RemoteError, match="500"):
        push(published, LOCAL, ref(through), limits=QUICK)
    assert read_bundle(remote_store(where), ref(where)).digest == first


def test_fetching_one_target_keeps_the_bundle_and_its_digest(published: Store, where: str, tmp_path: Path) -> None:
    whole = push(published, LOCAL, ref(where), limits=QUICK)
    fetched = fetch_all(ref(where), tmp_path / "copy", targets=["cpu:amx"], tag="mine")
    copy, mine = Store.open(tmp_path / "copy"), Reference(None, "tiny", tag="mine")
    amx, other = sorted(read_bundle(copy, mine).artifacts, key=lambda entry: entry.target)
    assert read_artifact(copy, amx).target == "cpu:amx"
    with pytest.raises(NotFoundError, match=other.digest):
        read_artifact(copy, other)
    assert fetched.digest == whole.digest
    assert fetched.blobs == 2  # one file, and the provenance
    with pytest.raises(NotFoundError, match="fetched without its artifacts for cpu:x86-64-v3") as caught:
        push(copy, mine, ref(where, "again"), limits=QUICK)
    assert "--all" in caught.value.hint
    with pytest.raises(NotFoundError, match="cuda:sm_90") as caught:
        fetch_all(ref(where), tmp_path / "copy", targets=["cuda:sm_90"])
    assert "cpu:amx" in caught.value.hint
    fetch_all(ref(where), tmp_path / "copy", tag="mine")
    assert push(copy, mine, ref(where, "again"), limits=QUICK).digest == whole.digest


def test_a_blob_that_is_damaged_here_is_not_uploaded(published: Store, where: str) -> None:
    artifact = read_artifact(published, read_bundle(published, LOCAL).artifacts[0].digest)
    path = published.blobs.path(artifact.variants[0].files[0].blob)
    path.write_bytes(bytes(reversed(path.read_bytes())))
    with pytest.raises(CorruptError, match="not uploaded") as caught:
        push(published, LOCAL, ref(where), limits=QUICK)
    assert caught.value.expected == artifact.variants[0].files[0].blob
    with pytest.raises(NotFoundError):
        read_bundle(remote_store(where), ref(where))


def test_a_missing_blob_is_found_before_anything_is_uploaded(
    published: Store, registry: RegistryServer, where: str, proxy: FaultProxy
) -> None:
    artifact = read_artifact(published, read_bundle(published, LOCAL).artifacts[0].digest)
    published.blobs.path(artifact.variants[0].files[0].blob).unlink()
    with pytest.raises(NotFoundError, match="1 of the blobs"):
        push(published, LOCAL, ref(where.replace(registry.host, proxy.host)), limits=QUICK)
    assert not proxy.seen


@pytest.mark.parametrize(
    ("source", "destination"),
    [("tiny:v1", "elsewhere#tiny:v1"), ("tiny:v1", "oci://h/r@sha256:" + 64 * "0"), ("tiny:v1", "s3://b/p#other:v1")],
)
def test_a_push_needs_a_tag_of_a_remote_and_its_own_model(published: Store, source: str, destination: str) -> None:
    with pytest.raises(ReferenceFormatError):
        push(published, parse_reference(source), parse_reference(destination), limits=QUICK)


def test_a_digest_is_fetched_under_the_tag_that_is_asked_for(published: Store, where: str, tmp_path: Path) -> None:
    digest = push(published, LOCAL, ref(where), limits=QUICK).digest
    pinned = parse_reference(f"{where}@{digest}")
    assert fetch_all(pinned, tmp_path / "copy").digest == digest
    assert fetch_all(pinned, tmp_path / "copy", tag="pinned").digest == digest
    named = f"tiny:sha256-{digest.removeprefix('sha256:')[:16]}"
    assert [str(entry) for entry in Store.open(tmp_path / "copy").tags()] == ["tiny:pinned", named]


def test_the_commands_say_what_moved(published: Store, where: str, tmp_path: Path) -> None:
    command = "from aotc.cli import main; import sys; main(sys.argv[1:])"
    pushed = json.loads(finish(python(command, "push", f"{published.path}#tiny:v1", f"{where}:v1", "--json")))
    assert pushed["moved"] == pushed["blobs"]
    text = finish(python(command, "fetch", f"{where}:v1", "--target", "cpu:amx", "--store", tmp_path / "copy"))
    assert pushed["digest"] in text
    assert "tiny:v1" in text
    failed = python(command, "fetch", f"{where}:v2", "--store", tmp_path / "new")
    assert failed.wait(60) == 2
    assert f"there is {where}:v1" in failed.communicate()[1]
    assert not (tmp_path / "new").exists()


# -- other tools ------------------------------------------------------------------------------------------------------


def skopeo(*arguments: object) -> str:
    ran = subprocess.run(["skopeo", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@needs("skopeo")
def test_skopeo_and_push_give_the_same_digests_in_both_directions(
    published: Store, registry: RegistryServer, where: str, tmp_path: Path
) -> None:
    remote = where.removeprefix("oci://")
    digest = read_bundle(published, LOCAL).digest
    copy = ("copy", "--quiet", "--all", "--preserve-digests")
    skopeo(*copy, "--dest-tls-verify=false", f"oci:{published.path}:tiny:v1", f"docker://{remote}:copied")
    assert fetch_all(ref(where, "copied"), tmp_path / "pulled", limits=QUICK).digest == digest
    assert push(published, LOCAL, ref(where, "pushed"), limits=QUICK).moved == 0
    skopeo(*copy, "--src-tls-verify=false", f"docker://{remote}:pushed", f"oci:{tmp_path / 'back'}:tiny:v1")
    back = Store.open(tmp_path / "back")
    assert read_bundle(back, LOCAL) == read_bundle(published, LOCAL)
    assert files_of(back) == files_of(published)
    raw = skopeo("inspect", "--raw", "--tls-verify=false", f"docker://{remote}:pushed")
    assert raw.encode() == published.blobs.read(digest, 1 << 20)


# -- read in place ----------------------------------------------------------------------------------------------------


def test_a_start_fetches_one_target_then_asks_once_for_a_tag_and_never_for_a_digest(
    published: Store, registry: RegistryServer, where: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    digest = push(published, LOCAL, ref(where), limits=QUICK).digest
    (entry,) = [one for one in read_bundle(published, LOCAL).artifacts if one.target == "cpu:x86-64-v3"]
    artifact = read_artifact(published, entry)
    through, cache = where.replace(registry.host, proxy.host), tmp_path / "cache"
    assert load_hot(f"{through}:v1", cache) == LIBRARIES
    # tag, bundle, manifest, record, files, whether there are signatures and attestations: nothing of the other target
    assert len(proxy.seen) == 6 + len({*each_file(artifact), *each_file(read_built(published, entry))})
    proxy.seen.clear()
    assert load_hot(f"{through}:v1", cache) == LIBRARIES
    assert [request.method for request in proxy.seen] == ["HEAD"]
    proxy.seen.clear()
    assert load_hot(f"{through}@{digest}", cache) == LIBRARIES
    assert not proxy.seen


def test_a_start_by_digest_with_everything_here_imports_no_http_library(
    published: Store, where: str, tmp_path: Path
) -> None:
    digest = push(published, LOCAL, ref(where), limits=QUICK).digest
    load_hot(f"{where}:v1", tmp_path / "cache")
    code = """
import sys
from remote_reading import *
assert load_hot(sys.argv[1], Path(sys.argv[2])) == LIBRARIES
print(*{"requests", "urllib3"} & set(sys.modules))
"""
    assert finish(python(code, f"{where}@{digest}", tmp_path / "cache")).split() == []


def test_a_repository_and_a_tag_that_are_not_there_name_the_nearest(published: Store, where: str) -> None:
    push(published, LOCAL, ref(where), limits=QUICK)
    with pytest.raises(NotFoundError, match="v12 is not in the registry") as caught:
        read_bundle(remote_store(where), ref(where, "v12"))
    assert caught.value.known == (f"{where}:v1",)
    with pytest.raises(NotFoundError, match="not in the registry") as caught:
        read_bundle(remote_store(f"{where}-no"), ref(f"{where}-no"))
    assert caught.value.known == ()


def test_a_registry_that_does_not_say_digests_is_read_to_know_them(
    published: Store, registry: RegistryServer, where: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    push(published, LOCAL, ref(where), limits=QUICK)
    proxy.fault = lambda request: Fault(headers={"Docker-Content-Digest": ""})
    assert load_hot(f"{where.replace(registry.host, proxy.host)}:v1", tmp_path / "cache") == LIBRARIES


def test_a_registry_that_rewrites_manifests_is_refused(
    published: Store, registry: RegistryServer, where: str, proxy: FaultProxy
) -> None:
    other = "sha256:" + 64 * "0"
    proxy.fault = lambda r: Fault(headers={"Docker-Content-Digest": other}) if "/manifests/" in r.path else None
    with pytest.raises(CorruptError, match="rewrites manifests") as caught:
        push(published, LOCAL, ref(where.replace(registry.host, proxy.host)), limits=QUICK)
    assert caught.value.actual == other


def test_an_image_that_is_no_bundle_is_refused(published: Store, where: str) -> None:
    push(published, LOCAL, ref(where), limits=QUICK)
    entry = read_bundle(published, LOCAL).artifacts[0]
    remote = remote_store(where)
    remote.transfer.remote.set_tag(
        ref(where, "image"), "application/vnd.oci.image.manifest.v1+json", published.blobs.read(entry.digest, 1 << 20)
    )
    with pytest.raises(CorruptError, match="not an aotc bundle"):
        read_bundle(remote, ref(where, "image"))
    found = remote.attachment("image")
    assert found is not None
    assert found.digest == entry.digest
    assert remote.blobs.read(found.digest, 1 << 20) == published.blobs.read(entry.digest, 1 << 20)
    assert remote.attachment("sha256-none.sig") is None


HERD = """
import sys, time
from remote_reading import *
ready, go = Path(sys.argv[3]), Path(sys.argv[4])
ready.touch()
while not go.exists():
    time.sleep(0.001)
assert load_hot(sys.argv[1], Path(sys.argv[2])) == LIBRARIES
"""


def test_of_many_processes_on_a_host_one_downloads_each_thing(
    published: Store, registry: RegistryServer, where: str, tmp_path: Path, proxy: FaultProxy
) -> None:
    digest = push(published, LOCAL, ref(where), limits=QUICK).digest
    through = where.replace(registry.host, proxy.host)
    ready = [tmp_path / f"ready-{number}" for number in range(6)]
    herd = [python(HERD, f"{through}@{digest}", tmp_path / "cache", path, tmp_path / "go") for path in ready]
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in ready) and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    for process in herd:
        finish(process)
    gets = [request.path.rpartition("/")[2] for request in proxy.seen if request.method == "GET"]
    assert len(gets) == len(set(gets))


# -- who asks ---------------------------------------------------------------------------------------------------------


def test_with_passwords_those_of_docker_login_are_used(
    published: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_registry(tmp_path / "registry", **htpasswd(tmp_path / "registry")) as server:
        where = f"oci://{server.host}/team/private"
        with pytest.raises(RemoteError, match="401") as caught:
            push(published, LOCAL, ref(where), limits=QUICK)
        assert f"docker login {server.host}" in caught.value.hint
        monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(tmp_path / "wrong", server.host, password="wrong")))
        with pytest.raises(RemoteError, match="401") as caught:
            push(published, LOCAL, ref(where), limits=QUICK)
        assert USER in caught.value.hint
        assert "wrong/config.json" in caught.value.hint
        monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(tmp_path / "docker", server.host)))
        push(published, LOCAL, ref(where), limits=QUICK)
        assert load_hot(f"{where}:v1", tmp_path / "cache") == LIBRARIES


def test_bearer_tokens_are_got_for_what_is_asked_and_again_when_they_expire(
    published: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TokenService(tmp_path / "tokens")
    with running_registry(tmp_path / "registry", **tokens.config) as server:
        where = f"oci://{server.host}/team/private"
        with pytest.raises(RemoteError, match="401"):
            push(published, LOCAL, ref(where), limits=QUICK)
        monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(tmp_path / "docker", server.host)))
        tokens.asked.clear()
        push(published, LOCAL, ref(where), limits=QUICK)
        assert {carried.partition(" ")[0] for carried, _ in tokens.asked} == {"Basic"}
        assert len(tokens.asked) == 2  # one to look, one to upload; not one for each thread or blob
        monkeypatch.delenv("DOCKER_CONFIG")
        tokens.asked.clear()
        tokens.lifetime = -200  # beyond the minute that the registry allows for slow clocks
        with pytest.raises(RemoteError, match="401"):
            load_hot(f"{where}:v1", tmp_path / "cache")
        tokens.lifetime = 300
        assert load_hot(f"{where}:v1", tmp_path / "cache") == LIBRARIES
        assert tokens.asked[-1] == ("", "repository:team/private:pull")
    tokens.close()


def test_a_token_that_expires_in_the_middle_is_renewed(published: Store, tmp_path: Path) -> None:
    tokens = TokenService(tmp_path / "tokens")
    with running_registry(tmp_path / "registry", **tokens.config) as server:
        where = f"oci://{server.host}/team/private"
        remote = remote_store(where)
        with pytest.raises(NotFoundError):
            read_bundle(remote, ref(where))
        session = remote.transfer.remote._session  # type: ignore[attr-defined]
        session._authorization.header = "Bearer an.expired.token"
        with pytest.raises(NotFoundError):
            read_bundle(remote, ref(where))
        assert len(tokens.asked) == 2
    tokens.close()


def test_a_refresh_token_is_exchanged_by_oauth(
    published: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TokenService(tmp_path / "tokens")
    with running_registry(tmp_path / "registry", **tokens.config) as server:
        where = f"oci://{server.host}/team/private"
        (tmp_path / "auth.json").write_text(json.dumps({"auths": {server.host: {"identitytoken": "a refresh token"}}}))
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
        push(published, LOCAL, ref(where), limits=QUICK)
        assert {carried for carried, _ in tokens.asked} == {"refresh_token"}
    tokens.close()


def test_a_token_is_asked_for_all_that_was_ever_refused_whichever_thread_renews_it() -> None:
    """One that only looks renews it for those that upload."""
    asked: list[Any] = []

    def send(method: str, url: str, *, params: Any, **_: Any) -> bytes:
        asked.append(params["scope"])
        return b'{"token": "%d"}' % len(asked)

    def challenge(scope: str) -> str:
        return f'Bearer realm="http://tokens.test/token",service="registry.test",scope="{scope}"'

    authorization = Authorization("http://registry.test", "registry.test", "team/x", send)
    for scope in (
        "repository:team/x:pull",
        "repository:team/x:pull,push repository:other:pull",
        "repository:team/x:pull",
    ):
        assert authorization.renew(authorization.header, challenge(scope))
    uploading = ["repository:team/x:pull,push", "repository:other:pull"]
    assert asked == [["repository:team/x:pull"], uploading, uploading]


def test_a_request_that_another_thread_renewed_a_token_for_may_need_one_of_its_own(
    published: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TokenService(tmp_path / "tokens")
    with running_registry(tmp_path / "registry", **tokens.config) as server:
        monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(tmp_path / "docker", server.host)))
        session = remote_store(f"oci://{server.host}/team/x").transfer.remote._session  # type: ignore[attr-defined]
        url = f"http://{server.host}/v2/team/x/blobs/uploads/"
        attempt = session._attempt

        def overtaken(*arguments: Any) -> Any:
            """The first attempt: then another thread gets a token to look."""
            answer = attempt(*arguments)
            monkeypatch.setattr(session, "_attempt", attempt)
            with session.send("GET", f"http://{server.host}/v2/team/x/tags/list", "look", expected=(404,)):
                return answer

        monkeypatch.setattr(session, "_attempt", overtaken)
        with session.send("POST", url, "upload", expected=(202,)):
            assert [scope for _, scope in tokens.asked] == ["repository:team/x:pull", "repository:team/x:pull,push"]
    tokens.close()


def test_what_a_redirect_leads_to_gets_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, registry = FaultProxy(0), FaultProxy(0)
    monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(tmp_path / "docker", registry.host)))
    realm = f'Bearer realm="http://{elsewhere.host}/token",service="s",scope="repository:team/x:pull"'
    elsewhere.fault = lambda request: Fault(401, {"WWW-Authenticate": realm})
    registry.fault = lambda request: Fault(307, {"Location": f"http://{elsewhere.host}/blob"})
    digest = sha256_bytes(b"")
    with (
        pytest.raises(RemoteError, match="401"),
        Registry(f"oci://{registry.host}/team/x", QUICK).open_blob(digest, 0, 0),
    ):
        pass
    assert [(request.path, request.headers.get("Authorization")) for request in elsewhere.seen] == [("/blob", None)]
    elsewhere.close()
    registry.close()


@pytest.mark.parametrize("line", ["default", "machine 127.0.0.1"])
def test_a_redirect_gets_nothing_of_a_netrc_and_the_registry_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    elsewhere, registry = FaultProxy(0), FaultProxy(0)
    monkeypatch.setenv("DOCKER_CONFIG", str(docker_config(tmp_path / "docker", registry.host)))
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / ".netrc").write_text(f"{line} login other password secret\n")
    challenge = Fault(401, {"WWW-Authenticate": 'Basic realm="x"'})
    digest = sha256_bytes(b"blob")
    steps = {
        f"/v2/team/x/blobs/{digest}": Fault(307, {"Location": "/second"}),
        "/second": Fault(307, {"Location": f"http://{elsewhere.host}/blob"}),
    }
    registry.fault = lambda request: steps[request.path] if "Authorization" in request.headers else challenge
    elsewhere.fault = lambda request: Fault(200, body=b"blob")
    with Registry(f"oci://{registry.host}/team/x", QUICK).open_blob(digest, 4, 0) as pieces:
        assert b"".join(pieces) == b"blob"
    basic = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    assert [request.headers.get("Authorization") for request in registry.seen] == [None, basic, basic]
    assert [request.headers.get("Authorization") for request in elsewhere.seen] == [None]
    elsewhere.close()
    registry.close()


def test_a_refresh_token_is_not_sent_where_the_token_service_redirects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, registry = FaultProxy(0), FaultProxy(0)
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {registry.host: {"identitytoken": "a refresh token"}}}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    challenge = Fault(401, {"WWW-Authenticate": f'Bearer realm="http://{registry.host}/token"'})
    away = Fault(307, {"Location": f"http://{elsewhere.host}/token"})
    registry.fault = lambda request: away if request.path == "/token" else challenge
    with pytest.raises(RemoteError, match="/token answers 307"):
        Registry(f"oci://{registry.host}/team/x", QUICK).has_blob(sha256_bytes(b""), 0)
    assert elsewhere.seen == []
    elsewhere.close()
    registry.close()


def test_tls_by_a_private_authority(published: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trustme

    authority = trustme.CA()
    folder = tmp_path / "registry"
    folder.mkdir()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    tls = {"tls": {"certificate": str(folder / "cert.pem"), "key": str(folder / "key.pem")}}
    with running_registry(folder, http=tls) as server:
        where = f"oci+https://{server.host}/team/private"
        with pytest.raises(RemoteError, match="certificate is not trusted") as caught:
            push(published, LOCAL, ref(where), limits=QUICK)
        assert "SSL_CERT_FILE" in caught.value.hint
        with pytest.raises(RemoteError) as caught:
            push(published, LOCAL, ref(f"oci://{server.host}/team/private"), limits=QUICK)
        assert "oci+https://" in caught.value.hint
        with pytest.raises(RemoteError, match="certificate is not trusted") as caught:
            push(published, LOCAL, ref(f"oci+https://localhost:{server.port}/team/private"), limits=QUICK)
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.crt"))
        with pytest.raises(RemoteError, match="certificate is not trusted") as caught:
            push(published, LOCAL, ref(f"oci+https://localhost:{server.port}/team/private"), limits=QUICK)
        assert "another name" in caught.value.hint
        push(published, LOCAL, ref(where), limits=QUICK)
        monkeypatch.delenv("SSL_CERT_FILE")
        trusted = tmp_path / "home" / ".config" / "containers" / "certs.d" / server.host
        trusted.mkdir(parents=True)
        (trusted / "ca.crt").write_bytes((folder / "ca.crt").read_bytes())
        assert load_hot(f"{where}:v1", tmp_path / "cache") == LIBRARIES


def own_certificate(folder: Path) -> None:
    import trustme

    certificate = trustme.CA().issue_cert("me")
    certificate.cert_chain_pems[0].write_to_path(str(folder / "me.cert"))
    certificate.private_key_pem.write_to_path(str(folder / "me.key"))


def encrypt(path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as forms

    key = forms.load_pem_private_key(path.read_bytes(), None)
    secret = forms.BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, secret))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: (folder / "ca.crt").write_text("no PEM"), "ca.crt"),
        (lambda folder: (folder / "ca.crt").touch(), "ca.crt"),
        (lambda folder: os.mkfifo(folder / "ca.crt"), "ca.crt"),
        (lambda folder: (folder / "ca.crt").symlink_to("nothing"), "ca.crt"),
        (lambda folder: (folder / "me.key").unlink(), "me.key"),
        (lambda folder: (folder / "me.key").write_text("no PEM"), "me.key"),
        (lambda folder: (folder / "me.cert").write_text("no PEM"), "me.cert"),
        (lambda folder: encrypt(folder / "me.key"), "me.key"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_named(
    tmp_path: Path, change: Callable[[Path], object], named: str
) -> None:
    folder = tmp_path / "home" / ".config" / "containers" / "certs.d" / "registry.test:5000"
    folder.mkdir(parents=True)
    own_certificate(folder)
    (folder / "README").write_text("no certificate, and no harm")
    Registry("oci+https://registry.test:5000/team/x", QUICK)
    change(folder)
    with pytest.raises(StoreError) as caught:
        Registry("oci+https://registry.test:5000/team/x", QUICK)
    assert str(folder / named) in caught.value.message
    assert caught.value.hint


def test_a_folder_of_certificates_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "home" / ".docker" / "certs.d" / "registry.test"
    folder.mkdir(parents=True)
    listed = Path.iterdir

    def refuse(path: Path) -> Any:
        if path == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(StoreError, match=f"cannot look into {folder}: Permission denied"):
        Registry("oci+https://registry.test/team/x", QUICK)


def test_without_the_library_the_error_says_what_to_install(published: Store, tmp_path: Path) -> None:
    code = """
import sys
sys.modules["requests"] = None
from aotc.errors import StoreError
from aotc.store.opening import open_readable
from aotc.store.reference import parse_reference
try:
    open_readable("oci://127.0.0.1:1/r").resolve(parse_reference("oci://127.0.0.1:1/r:t"))
except StoreError as error:
    print(error.hint)
"""
    hint = finish(python(code)).strip()
    assert hint == "pip install 'requests>=2.32' 'urllib3>=2.2' (what pip install 'aotc[oci]' installs)"


def test_nobody_is_asked_before_something_is_read() -> None:
    open_readable(f"oci://127.0.0.1:{free_port()}/r")
