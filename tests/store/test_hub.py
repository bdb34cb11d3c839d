"""Stores in a repository of the Hugging Face Hub: what is one commit, and what is said where the Hub refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, running_hub
from sample_artifacts import CREATED, stored_artifact
from signing import NOW, bundle_in, key_by_openssl, needs_openssl, private_key, signed, trusting
from store_backends import needs_hub

from aotc.errors import NotFoundError, ReferenceFormatError, RemoteError, SignatureError
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.opening import open_readable, open_remote
from aotc.store.reference import Reference, parse_reference
from aotc.store.remote.fetching import fetch, of_targets
from aotc.store.remote.interface import Limits
from aotc.store.remote.push import push
from aotc.store.signing.attachments import reader_of
from aotc.store.signing.trust import check_signatures

pytestmark = needs_hub
QUICK = Limits(connect=5, read=5, total=60, attempts=3, backoff=0.01)
LOCAL = Reference(None, "tiny", tag="v1")


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A Hub with the repository org/models, and a token that may write."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    server.new("org/models")
    return server


@pytest.fixture
def local(tmp_path: Path, work: Path) -> Store:
    store = Store.create(tmp_path / "local")
    publish(store, "tiny", "v1", [stored_artifact(store, work)], created=CREATED)
    return store


def pushed(local: Store, to: str = "hf://org/models#tiny:v1") -> str:
    return push(local, LOCAL, parse_reference(to), limits=QUICK).digest


def refused(url: str = "hf://org/models") -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        open_remote(url, QUICK).resolve(parse_reference(f"{url}#tiny:v1"))
    assert not caught.value.fields["transient"]
    return caught.value


def test_a_push_is_one_commit_with_all_its_blobs(hub: Hub, local: Store) -> None:
    """After those by which a repository becomes a store: `index.json`, and `oci-layout`."""
    pushed(local)
    before = len(hub.repositories["org/models"].trees)
    pushed(local, "hf://org/models#tiny:v2")
    assert before == len(("created by the Hub", "index.json", "oci-layout", "the push"))
    assert len(hub.repositories["org/models"].trees) == before + 1


def test_a_revision_is_read_and_written(hub: Hub, local: Store, tmp_path: Path) -> None:
    """A branch has tags of its own; a commit is a store that does not change."""
    repository = hub.repositories["org/models"]
    repository.names["refs/pr/1"] = repository.names["main"]
    digest = pushed(local, "hf://org/models@refs/pr/1#tiny:v1")
    with pytest.raises(NotFoundError, match="no store at hf://org/models"):
        read_bundle(open_readable("hf://org/models"), LOCAL)
    for revision in ("refs/pr/1", repository.names["refs/pr/1"]):
        reference = parse_reference(f"hf://org/models@{revision}#tiny:v1")
        assert fetch(reference, tmp_path / revision[-6:], of_targets(), limits=QUICK).digest == digest


def test_a_busy_hub_is_asked_again(hub: Hub, local: Store, tmp_path: Path) -> None:
    digest = pushed(local)
    hub.failures[:] = [503, 429]
    assert (
        fetch(parse_reference("hf://org/models#tiny:v1"), tmp_path / "s", of_targets(), limits=QUICK).digest == digest
    )
    assert hub.failures == []


@needs_openssl
def test_signatures_go_along_and_are_checked(hub: Hub, work: Path, tmp_path: Path) -> None:
    key, other = (private_key(key_by_openssl(tmp_path, name)[0]) for name in "ab")
    store = Store.create(tmp_path / "signed")
    digest = bundle_in(store, work)
    signed(store, digest, key)
    push(store, parse_reference("tiny"), parse_reference("hf://org/models#tiny:latest"), limits=QUICK)
    there = open_readable("hf://org/models")
    reference = parse_reference("hf://org/models#tiny")
    check_signatures(reader_of(there), there.attachment, digest, reference, trusting(key), NOW)
    with pytest.raises(SignatureError):
        check_signatures(reader_of(there), there.attachment, digest, reference, trusting(other), NOW)


@pytest.mark.parametrize("url", ["hf://org", "hf://org/models/folder", "hf://org/models@", "hf:///models"])
def test_what_names_no_repository_is_refused(url: str) -> None:
    with pytest.raises(ReferenceFormatError, match=r"not a repository of the Hub|the URL of a store"):
        open_remote(url, QUICK)


def test_a_repository_that_is_not_there(hub: Hub) -> None:
    error = refused("hf://org/none")
    assert error.fields["status"] == 404 and "hf repos create org/none" in error.hint


def test_a_private_repository_without_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.new("org/private", private=True)
    without_token(monkeypatch, tmp_path)
    error = refused("hf://org/private")
    assert error.fields["status"] == 401 and "hf auth login" in error.hint and "HF_TOKEN" in error.hint


def test_a_gated_repository(hub: Hub) -> None:
    hub.new("org/gated", gated=True)
    error = refused("hf://org/gated")
    assert error.fields["status"] == 403 and f"ask for access at {os.environ['HF_ENDPOINT']}/org/gated" in error.hint


def test_a_revision_that_is_not_there(hub: Hub) -> None:
    error = refused("hf://org/models@v9")
    assert error.fields["status"] == 404 and "a branch, a tag or a commit of org/models" in error.hint


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused().hint


def test_a_push_without_a_token(hub: Hub, local: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_token(monkeypatch, tmp_path)
    with pytest.raises(RemoteError, match="cannot write hf://org/models/") as caught:
        pushed(local)
    assert caught.value.fields["status"] == 401 and "hf auth login" in caught.value.hint
    assert hub.repositories["org/models"].trees.keys() == {hub.repositories["org/models"].names["main"]}


def test_nobody_listens(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RemoteError) as caught:
        open_remote("hf://org/models", QUICK).resolve(LOCAL)
    assert caught.value.fields["transient"]


def without_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As of whoever never logged in."""
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    assert "HUGGING_FACE_HUB_TOKEN" not in os.environ
