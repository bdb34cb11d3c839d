"""References: how a person names a bundle."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from aotc.errors import ReferenceFormatError
from aotc.store.layout.names import is_digest, name_flaw

DEFAULT_TAG = "latest"

REGISTRY_SCHEMES = ("oci", "oci+http", "oci+https")

_FORM = "[STORE#]model[:tag] or [STORE#]model@sha256:<64 hex>"
_HOST_FIRST = re.compile(r"(localhost|[A-Za-z0-9-]+([.:][A-Za-z0-9.-]+)+)/[a-z0-9]")
"""How Docker tells a registry from a folder: a dot or a port in front of the first slash."""


class Reference(msgspec.Struct, frozen=True):
    """`[STORE#]model:tag` or `[STORE#]model@sha256:…`: exactly one of `tag` and `digest` is set.

    In a registry the store is `oci://HOST/REPOSITORY` and there is no `model` (""): the bundle itself says which it is.
    Creating one with a bad store, model, tag or digest raises ReferenceFormatError.
    """

    store: str | None
    model: str
    tag: str | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        _check_store(self.store)
        if not self.in_registry:
            _check_name("model", self.model)
        elif self.model:
            raise ReferenceFormatError(
                f"{self.store}#{self.model} is not a reference: a tag of a registry's repository names one bundle",
                hint="write oci://HOST[:PORT]/REPOSITORY[:tag]",
            )
        if (self.tag is None) == (self.digest is None):
            raise ReferenceFormatError(
                f"a reference to {self.model!r} needs a tag or a digest, and not both; "
                f"it has tag {self.tag!r} and digest {self.digest!r}",
                hint=f"write {_FORM}",
            )
        if self.tag is not None:
            _check_name("tag", self.tag)
        if self.digest is not None and not is_digest(self.digest):
            raise ReferenceFormatError(
                f"{self.digest[:100]!r} is not a digest",
                hint="a digest is sha256: and 64 lower-case hexadecimal digits; `aotc ls --json` prints them",
            )

    def __str__(self) -> str:
        store = "" if self.store is None or self.in_registry else f"{self.store}#"
        return f"{store}{self.name}"

    @property
    def in_registry(self) -> bool:
        return is_registry(self.store)

    @property
    def name(self) -> str:
        """The reference without its store; whole where the store is a registry's repository."""
        if self.in_registry:
            return f"{self.store}@{self.digest}" if self.digest is not None else f"{self.store}:{self.tag}"
        return f"{self.model}@{self.digest}" if self.digest is not None else f"{self.model}:{self.tag}"


def parse_reference(text: str) -> Reference:
    """Read `[STORE#]model[:tag | @sha256:<64 hex>]`, or `oci://HOST[:PORT]/REPOSITORY[:tag | @sha256:<64 hex>]`.

    The default tag is `latest`. The last `#` ends the store, so that a store's path may hold one.
    Raises ReferenceFormatError.
    """
    if is_registry(text):
        from aotc.store.registry_reference import split

        return Reference(*split(text, DEFAULT_TAG))
    before, hash_sign, name = text.rpartition("#")
    store = before if hash_sign else None
    if "/" in name:
        if not hash_sign and _HOST_FIRST.match(name):
            raise ReferenceFormatError(
                f"{text[:200]!r} names a registry, and no scheme", hint=f"did you mean oci://{text[:200]}?"
            )
        raise ReferenceFormatError(
            f"{text[:200]!r} is not a reference: the model {name[:100]!r} contains '/'",
            hint=f"write {_FORM}; the part before '#' is the store's folder",
        )
    if "@" in name:
        model, _, digest = name.partition("@")
        if ":" in model:
            raise ReferenceFormatError(
                f"{text[:200]!r} is not a reference: it has a tag and a digest",
                hint=f"leave one of them out: {_FORM}",
            )
        return Reference(store, model, digest=digest)
    model, colon, tag = name.partition(":")
    return Reference(store, model, tag=tag if colon else DEFAULT_TAG)


def store_named(reference: Reference, given: str | None, argument: str) -> str | None:
    """The store of a reference, else the one that `argument` gives. Raises ReferenceFormatError where they differ."""
    if reference.store is None or given is None or _place(reference.store) == _place(given):
        return reference.store if given is None else given
    raise ReferenceFormatError(
        f"the reference names the store {reference.store}, and {argument} names {given}",
        hint=f"leave out one of them: write {reference.name} or drop {argument}"
        if not reference.in_registry
        else f"leave out {argument}: the reference names its repository",
    )


def _place(store: str) -> str:
    return store.rstrip("/") if is_remote(store) else str(Path(store).absolute())


def is_remote(store: str | None) -> bool:
    """Whether the store part of a reference is a URL and not a folder."""
    return store is not None and "://" in store


def is_registry(text: str | None) -> bool:
    """Whether the store part of a reference is in a registry."""
    scheme, separator, _ = (text or "").partition("://")
    return bool(separator) and scheme in REGISTRY_SCHEMES


def _check_store(store: str | None) -> None:
    if store is None:
        return
    if is_registry(store):
        from aotc.store.registry_reference import check_repository

        check_repository(store)
    if not store or not store.isprintable():
        raise ReferenceFormatError(
            f"the store before '#' is {'empty' if not store else repr(store[:100])}",
            hint="name the store's folder before '#', or leave '#' out to use the default store",
        )


def _check_name(what: str, name: str) -> None:
    if flaw := name_flaw(name):
        raise ReferenceFormatError(f"{name[:100]!r} is not a {what} name: {flaw}", hint=f"write {_FORM}")
