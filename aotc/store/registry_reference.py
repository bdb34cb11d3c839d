"""References to a bundle in a registry."""

from __future__ import annotations

import re

from aotc.errors import ReferenceFormatError

FORM = "oci://HOST[:PORT]/REPOSITORY[:tag] or oci://HOST[:PORT]/REPOSITORY@sha256:<64 hex>"
_HOST = re.compile(r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?")
# The OCI distribution specification, "Pulling manifests".
_REPOSITORY = re.compile(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*")


def split(text: str, default_tag: str) -> tuple[str, str, str | None, str | None]:
    """The repository, no model, and a tag or a digest. Raises ReferenceFormatError."""
    store, at, digest = text.partition("@")
    before, slash, last = store.rpartition("/")
    last, colon, tag = last.partition(":")
    if at and "/" in digest:
        raise ReferenceFormatError(
            "a reference to a registry holds no user or password",  # and no message repeats them
            hint=f"write {FORM}; credentials are those of `docker login` or `podman login`",
        )
    if at and colon:
        raise ReferenceFormatError(
            f"{text[:200]!r} is not a reference: it has a tag and a digest",
            hint=f"leave one of them out: {FORM}",
        )
    store = f"{before}{slash}{last}"
    if at:
        return store, "", None, digest
    return store, "", tag if colon else default_tag, None


def check_repository(store: str) -> None:
    """Raises ReferenceFormatError."""
    host, _, repository = store.partition("://")[2].partition("/")
    if not _HOST.fullmatch(host):
        flaw = f"{host[:100]!r} is not a host"
    elif not _REPOSITORY.fullmatch(repository):
        flaw = (
            f"{repository[:100]!r} is not a repository: lower-case letters, digits, single '.', '_', '-' between, '/'"
        )
    else:
        return
    raise ReferenceFormatError(f"{store[:200]!r} is not a repository of a registry: {flaw}", hint=f"write {FORM}")
