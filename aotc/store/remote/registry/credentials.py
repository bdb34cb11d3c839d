"""Credentials for a registry, from where docker, podman and Kubernetes leave them."""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

HELPER_TIMEOUT = 30.0  # seconds; a helper may ask a cloud's metadata service

_log = logging.getLogger("aotc")

_DOCKER_HUB = {"docker.io", "index.docker.io", "registry-1.docker.io"}
_TOKEN_USER = "<token>"  # docker's convention: the secret is an OAuth2 refresh token


class Credentials(msgspec.Struct, frozen=True):
    """A user and a password, or a refresh token; `source` is the file that named them."""

    source: str
    username: str = ""
    password: str = ""
    refresh_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.username!r} of {self.source})"  # never the secret


def find_credentials(host: str, repository: str) -> Credentials | None:
    """The first that `credential_files` hold for the registry `host` (with port) or a part of its paths.

    Within a file: a helper of that host, then the most specific entry (podman allows `host/namespace`), then the
    file's store of all credentials. A file that cannot be read and a helper that fails are skipped with a warning.
    """
    for path in credential_files():
        if found := _in_file(path, host, repository):
            return found
    return None


def credential_files() -> list[Path]:
    """Where credentials are looked for, in the order of containers-auth.json(5) with docker's files after them.

    `$REGISTRY_AUTH_FILE` alone, where it is set. A Kubernetes secret mounted as a folder has the file
    `.dockerconfigjson`; name the folder with `$DOCKER_CONFIG`.
    """
    if chosen := os.environ.get("REGISTRY_AUTH_FILE"):
        return [Path(chosen)]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    home = home_folder()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    docker = [Path(folder) for folder in (os.environ.get("DOCKER_CONFIG"),) if folder]
    return [
        *(folder / name for folder in docker for name in ("config.json", ".dockerconfigjson")),
        (Path(runtime) if runtime else Path(f"/run/containers/{os.getuid()}")) / "containers" / "auth.json",
        config / "containers" / "auth.json",
        *(home / ".docker" / name for name in ("config.json", ".dockerconfigjson")),
    ]


def home_folder() -> Path:
    """The user's; the root folder where there is none, as container runtimes do it."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


class NamedIn(msgspec.Struct, frozen=True):
    """A file of credentials: the registries that it names, the helper programs to be asked, and why it is not used."""

    path: Path
    hosts: tuple[str, ...] = ()
    helpers: tuple[str, ...] = ()
    flaw: str = ""


def credentials_named() -> list[NamedIn]:
    """What each of `credential_files` names; those that do not exist are left out. No helper is asked."""
    found = []
    for path in credential_files():
        try:
            content = _read(path)
        except _UNREADABLE as error:
            found.append(NamedIn(path, flaw=str(error)))
            continue
        if content is not None:
            entries, helpers, store = content
            programs = dict.fromkeys(f"docker-credential-{one}" for one in (*helpers.values(), store) if one)
            found.append(NamedIn(path, tuple(dict.fromkeys([*entries, *helpers])), tuple(programs)))
    return found


_UNREADABLE = (OSError, ValueError, AttributeError)


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any], str] | None:
    """Its entries by host, the helpers of hosts, and the helper for all others; None where there is no such file.

    Raises one of `_UNREADABLE`.
    """
    if not path.is_file():  # PermissionError in a folder that may not be entered
        return None
    content = json.loads(path.read_bytes())
    auths, helpers = content.get("auths") or {}, content.get("credHelpers") or {}
    entries = {_normal(key): entry for key, entry in auths.items() if isinstance(entry, dict)}
    return entries, dict(helpers.items()), content.get("credsStore") or ""


def _in_file(path: Path, host: str, repository: str) -> Credentials | None:
    try:
        content = _read(path)
    except _UNREADABLE as error:
        _log.warning("credentials in %s are not used: %s", path, error)
        return None
    if content is None:
        return None
    entries, helpers, all_of_them = content
    if host in helpers and (found := _from_helper(helpers[host], host, path)):
        return found
    for key in _keys(host, repository):
        if key in entries and (found := _from_entry(entries[key], path)):
            return found
    if all_of_them:
        return _from_helper(all_of_them, _server(host), path)
    return None


def _normal(key: str) -> str:
    """`https://index.docker.io/v1/` and the like are keys of old dockers."""
    return (
        key.removeprefix("https://").removeprefix("http://").removesuffix("/").removesuffix("/v1").removesuffix("/v2")
    )


def _keys(host: str, repository: str) -> Iterator[str]:
    parts = [host, *repository.split("/")]
    for count in range(len(parts), 0, -1):
        yield "/".join(parts[:count])
    if host in _DOCKER_HUB:
        yield from _DOCKER_HUB


def _server(host: str) -> str:
    return "https://index.docker.io/v1/" if host in _DOCKER_HUB else host


def _from_entry(entry: dict[str, Any], path: Path) -> Credentials | None:
    if token := entry.get("identitytoken"):
        return Credentials(str(path), refresh_token=str(token))
    if entry.get("username") and entry.get("password"):
        return Credentials(str(path), str(entry["username"]), str(entry["password"]))
    try:
        user, colon, password = base64.b64decode(str(entry.get("auth") or "")).decode().rstrip("\0").partition(":")
    except (binascii.Error, UnicodeDecodeError) as error:
        _log.warning("an entry of %s is not used: its `auth` is not base64 of user:password (%s)", path, error)
        return None
    return Credentials(str(path), user, password) if colon else None


def _from_helper(name: str, server: str, path: Path) -> Credentials | None:
    """Ask `docker-credential-<name>`, as docker does: the server on its input, JSON on its output."""
    program = f"docker-credential-{name}"
    try:
        if Path(program).name != program:
            raise ValueError("its name holds a path")
        ran = subprocess.run(
            [program, "get"], input=server.encode(), capture_output=True, timeout=HELPER_TIMEOUT, check=False
        )
        if ran.returncode:
            raise ValueError(ran.stdout.decode(errors="replace").strip()[:200] or f"it ended with {ran.returncode}")
        answer = json.loads(ran.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        _log.warning("the credential helper %s, which %s names, gave none for %s: %s", program, path, server, error)
        return None
    source = f"{program}, named by {path}"
    return Credentials(source, refresh_token=secret) if user == _TOKEN_USER else Credentials(source, user, secret)
