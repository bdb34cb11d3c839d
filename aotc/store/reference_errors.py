"""Why a text or a reference names nothing, and how to write what was meant."""

from __future__ import annotations

import re
from pathlib import Path

from aotc.errors import ReferenceFormatError
from aotc.store.layout.names import is_digest, name_flaw
from aotc.store.registry_reference import check_repository

_FORM = "[STORE#]model[:tag] or [STORE#]model@sha256:<64 hex>"
_HOST_FIRST = re.compile(r"(localhost|[A-Za-z0-9-]+([.:][A-Za-z0-9.-]+)+)/[a-z0-9]")
"""How Docker tells a registry from a folder: a dot or a port in front of the first slash."""


def check_reference(store: str | None, model: str, tag: str | None, digest: str | None, *, in_registry: bool) -> None:
    """Raises ReferenceFormatError for a bad store, model, tag or digest."""
    _check_store(store, in_registry=in_registry)
    if not in_registry:
        _check_name("model", model)
    elif model:
        raise ReferenceFormatError(
            f"{store}#{model} is not a reference: a tag of a registry's repository names one bundle",
            hint="write oci://HOST[:PORT]/REPOSITORY[:tag]",
        )
    if (tag is None) == (digest is None):
        raise ReferenceFormatError(
            f"a reference to {model!r} needs a tag or a digest, and not both; it has tag {tag!r} and digest {digest!r}",
            hint=f"write {_FORM}",
        )
    if tag is not None:
        _check_name("tag", tag)
    if digest is not None and not is_digest(digest):
        raise ReferenceFormatError(
            f"{digest[:100]!r} is not a digest",
            hint="a digest is sha256: and 64 lower-case hexadecimal digits; `aotc ls --json` prints them",
        )


def form_error(text: str) -> ReferenceFormatError:
    """Of a text whose name holds a slash, or a tag and a digest."""
    _, hash_sign, name = text.rpartition("#")
    if "/" not in name:
        return ReferenceFormatError(
            f"{text[:200]!r} is not a reference: it has a tag and a digest",
            hint=f"leave one of them out: {_FORM}",
        )
    if not hash_sign and _HOST_FIRST.match(name):
        return ReferenceFormatError(
            f"{text[:200]!r} names a registry, and no scheme", hint=f"did you mean oci://{text[:200]}?"
        )
    return ReferenceFormatError(
        f"{text[:200]!r} is not a reference: the model {name[:100]!r} contains '/'",
        hint=f"write {_FORM}; the part before '#' is the store's folder",
    )


def check_same_store(store: str, name: str, given: str, argument: str, *, in_registry: bool) -> None:
    """Raises ReferenceFormatError where a reference names one store, and `argument` another."""
    if _place(store) != _place(given):
        raise ReferenceFormatError(
            f"the reference names the store {store}, and {argument} names {given}",
            hint=f"leave out one of them: write {name} or drop {argument}"
            if not in_registry
            else f"leave out {argument}: the reference names its repository",
        )


def _place(store: str) -> str:
    return store.rstrip("/") if "://" in store else str(Path(store).absolute())


def _check_store(store: str | None, *, in_registry: bool) -> None:
    if store is None:
        return
    if in_registry:
        check_repository(store)
    if not store or not store.isprintable():
        raise ReferenceFormatError(
            f"the store before '#' is {'empty' if not store else repr(store[:100])}",
            hint="name the store's folder before '#', or leave '#' out to use the default store",
        )


def _check_name(what: str, name: str) -> None:
    if flaw := name_flaw(name):
        raise ReferenceFormatError(f"{name[:100]!r} is not a {what} name: {flaw}", hint=f"write {_FORM}")
