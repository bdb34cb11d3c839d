"""Where credentials come from: what docker, podman, Kubernetes and credential helpers leave."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aotc.store.remote.registry.credentials as credentials_module
from aotc.store.remote.registry.authorization import Challenge, parse_challenge
from aotc.store.remote.registry.credentials import Credentials, credential_files, find_credentials

HOST = "registry.test:5000"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "home"


def auth(user: str, password: str = "p") -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def write(path: Path, **content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a credential helper on the PATH: a shell script called docker-credential-NAME."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(name: str, script: str) -> None:
        path = folder / f"docker-credential-{name}"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make


def user_of(repository: str = "team/model", host: str = HOST) -> str | None:
    found = find_credentials(host, repository)
    return found and found.username


def test_each_place_is_looked_at_and_an_earlier_one_wins(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert user_of() is None
    places = [
        home / ".docker" / "config.json",
        home / ".config" / "containers" / "auth.json",
        tmp_path / "run" / "containers" / "auth.json",
    ]
    for number, path in enumerate(places):
        write(path, auths={HOST: auth(f"user{number}")})
        assert user_of() == f"user{number}"
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "secret"))
    write(tmp_path / "secret" / ".dockerconfigjson", auths={HOST: auth("kubernetes")})
    assert user_of() == "kubernetes"
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "alone.json"))
    assert user_of() is None  # it alone, though it is not there
    write(tmp_path / "alone.json", auths={HOST: auth("alone")})
    assert user_of() == "alone"


def test_a_home_that_may_not_be_entered_is_passed_over(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As another user's, where a container runs under a number that is nobody's."""
    write(tmp_path / "run" / "containers" / "auth.json", auths={HOST: auth("runtime")})
    stat = Path.stat

    def refusing(path: Path, **options: Any) -> os.stat_result:
        if path.is_relative_to(home):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refusing)
    monkeypatch.setenv("DOCKER_CONFIG", str(home / "secret"))
    with caplog.at_level(logging.WARNING, "aotc"):
        assert user_of() == "runtime"
        assert user_of(host="another.test") is None
    assert f"credentials in {home / 'secret' / 'config.json'} are not used: " in caplog.text


def test_a_file_without_the_host_does_not_hide_a_later_one(home: Path, tmp_path: Path) -> None:
    write(tmp_path / "run" / "containers" / "auth.json", auths={"other.test": auth("other")})
    write(home / ".docker" / "config.json", auths={HOST: auth("docker")})
    assert user_of() == "docker"


def test_the_most_specific_path_wins_as_podman_has_it(home: Path) -> None:
    keys = (HOST, f"{HOST}/team", f"{HOST}/team/model")
    write(home / ".docker" / "config.json", auths={key: auth(f"user{number}") for number, key in enumerate(keys)})
    assert [user_of(name) for name in ("other", "team/other", "team/model", "team/model/sub")] == [
        "user0",
        "user1",
        "user2",
        "user2",
    ]


@pytest.mark.parametrize("key", [f"https://{HOST}", f"http://{HOST}/", f"https://{HOST}/v2/", f"https://{HOST}/v1/"])
def test_keys_of_old_dockers_are_understood(home: Path, key: str) -> None:
    write(home / ".docker" / "config.json", auths={key: auth("old")})
    assert user_of() == "old"


def test_docker_hub_has_a_key_of_its_own(home: Path) -> None:
    write(home / ".docker" / "config.json", auths={"https://index.docker.io/v1/": auth("hub")})
    assert user_of("library/x", "registry-1.docker.io") == "hub"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (auth("u", "a:b"), ("u", "a:b", "")),
        ({"username": "u", "password": "p"}, ("u", "p", "")),
        ({**auth("00000000-0000-0000-0000-000000000000", ""), "identitytoken": "t"}, ("", "", "t")),
        ({"auth": base64.b64encode(b"u:p\0\0").decode()}, ("u", "p", "")),
        ({}, None),
        ({"auth": "***"}, None),
        ({"auth": base64.b64encode(b"no colon").decode()}, None),
    ],
)
def test_the_forms_of_an_entry(home: Path, entry: dict[str, str], expected: tuple[str, str, str] | None) -> None:
    write(home / ".docker" / "config.json", auths={HOST: entry})
    found = find_credentials(HOST, "r")
    assert (found and (found.username, found.password, found.refresh_token)) == expected


@pytest.mark.parametrize("content", ["", "{", "[]", '{"auths": []}', '{"auths": {"registry.test:5000": 1}}', "\xff"])
def test_a_file_that_cannot_be_read_is_skipped(home: Path, tmp_path: Path, content: str) -> None:
    broken = tmp_path / "run" / "containers" / "auth.json"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(content.encode("latin-1"))
    write(home / ".docker" / "config.json", auths={HOST: auth("docker")})
    assert user_of() == "docker"


# -- helpers ----------------------------------------------------------------------------------------------------------

ECHO = """read server; echo "{\\"Username\\": \\"$1-for\\", \\"Secret\\": \\"$server\\"}" """


def test_a_helper_is_asked_for_its_host(home: Path, helper: Callable[[str, str], None]) -> None:
    helper("cloud", ECHO)
    write(home / ".docker" / "config.json", credHelpers={HOST: "cloud"}, auths={HOST: auth("inline")})
    found = find_credentials(HOST, "r")
    assert found == Credentials(f"docker-credential-cloud, named by {home}/.docker/config.json", "get-for", HOST)


def test_the_store_of_all_credentials_is_asked_last(home: Path, helper: Callable[[str, str], None]) -> None:
    helper("desktop", ECHO)
    write(home / ".docker" / "config.json", credsStore="desktop", auths={HOST: {}, "other.test": auth("inline")})
    assert user_of() == "get-for"
    assert user_of(host="other.test") == "inline"


def test_a_helper_s_token_is_a_refresh_token(home: Path, helper: Callable[[str, str], None]) -> None:
    helper("acr", """echo '{"Username": "<token>", "Secret": "refresh"}'""")
    write(home / ".docker" / "config.json", credHelpers={HOST: "acr"})
    found = find_credentials(HOST, "r")
    assert found is not None
    assert (found.username, found.refresh_token) == ("", "refresh")


@pytest.mark.parametrize(
    "script", ["echo 'credentials not found' ; exit 1", "echo nothing", "echo '[]'", "exec sleep 60", "exit 127"]
)
def test_a_helper_that_fails_is_said_and_passed_over(
    home: Path,
    helper: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str,
) -> None:
    monkeypatch.setattr(credentials_module, "HELPER_TIMEOUT", 0.3)
    helper("bad", script)
    write(home / ".docker" / "config.json", credHelpers={HOST: "bad", "other": "missing"}, auths={HOST: auth("inline")})
    with caplog.at_level(logging.WARNING):
        assert user_of() == "inline"
        assert user_of(host="other") is None
    assert "docker-credential-bad" in caplog.text
    assert "docker-credential-missing" in caplog.text


def test_a_helper_s_name_is_no_path(home: Path, tmp_path: Path) -> None:
    script = tmp_path / "docker-credential-" / "evil"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\ntouch $0.ran\n")
    script.chmod(0o755)
    write(home / ".docker" / "config.json", credHelpers={HOST: f"/../..{script.parent.parent}/evil"})
    assert user_of() is None
    assert not list(tmp_path.rglob("*.ran"))


def test_a_secret_is_in_no_repr() -> None:
    shown = repr(Credentials("file", "user", "hunter2", "refresh-secret"))
    assert "hunter2" not in shown
    assert "refresh-secret" not in shown


def test_without_a_home_folder_there_is_a_list_still(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", nowhere)
    assert Path("/.docker/config.json") in credential_files()


# -- challenges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "challenge"),
    [
        ('Basic realm="a, b"', Challenge("Basic", "a, b")),
        ("basic", Challenge("Basic")),
        (
            'Bearer realm="https://a/t",service="s",scope="repository:r:pull,push"',
            Challenge("Bearer", "https://a/t", "s", "repository:r:pull,push"),
        ),
        ('Basic realm="x", Bearer realm="https://a/t"', Challenge("Bearer", "https://a/t")),
        ('Bearer realm="https://a/t", Basic realm="x"', Challenge("Bearer", "https://a/t")),
        ('Negotiate, Basic realm="x"', Challenge("Basic", "x")),
        ("Bearer realm=", Challenge("Bearer")),
        ("Negotiate", None),
        ("", None),
    ],
)
def test_what_a_401_asks_for(header: str, challenge: Challenge | None) -> None:
    assert parse_challenge(header) == challenge
