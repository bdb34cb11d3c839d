"""References: how a person names a bundle."""

from __future__ import annotations

import os

import msgspec

from aotc.store.layout.names import is_digest, name_flaw

DEFAULT_TAG = "latest"
DEFAULT_STORE = "aotc-store"

REGISTRY_SCHEMES = ("oci", "oci+http", "oci+https")


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
        store, tag, digest = self.store, self.tag, self.digest
        named = is_digest(digest or "") if tag is None else digest is None and not name_flaw(tag)
        local = store is None or (store != "" and store.isprintable() and not self.in_registry)
        if not (named and local) or name_flaw(self.model):
            from aotc.store.reference_errors import check_reference

            check_reference(store, self.model, tag, digest, in_registry=self.in_registry)

    def __str__(self) -> str:
        return self.name if self.store is None or self.in_registry else f"{self.store}#{self.name}"

    @property
    def in_registry(self) -> bool:
        return is_registry(self.store)

    @property
    def name(self) -> str:
        """The reference without its store; whole where the store is a registry's repository."""
        of = self.store if self.in_registry else self.model
        return f"{of}:{self.tag}" if self.digest is None else f"{of}@{self.digest}"


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
    named, at, digest = name.partition("@")
    model, colon, tag = named.partition(":")
    if "/" in name or (at and colon):
        from aotc.store.reference_errors import form_error

        raise form_error(text)
    return Reference(store, model, digest=digest) if at else Reference(store, model, tag=tag if colon else DEFAULT_TAG)


def store_named(reference: Reference, given: str | None, argument: str) -> str | None:
    """The store of a reference, else the one that `argument` gives. Raises ReferenceFormatError where they differ."""
    if given is not None and reference.store not in (None, given):
        from aotc.store.reference_errors import check_same_store

        check_same_store(reference.store, reference.name, given, argument, in_registry=reference.in_registry)
    return reference.store if given is None else given


def is_remote(store: str | None) -> bool:
    """Whether the store part of a reference is a URL and not a folder."""
    return store is not None and "://" in store


def is_registry(text: str | None) -> bool:
    """Whether the store part of a reference is in a registry."""
    scheme, separator, _ = (text or "").partition("://")
    return separator != "" and scheme in REGISTRY_SCHEMES


def store_of(store: str | os.PathLike[str] | None) -> str:
    """The store that is named, else `$AOTC_STORE`, else `aotc-store`."""
    return os.fspath(store or os.environ.get("AOTC_STORE") or DEFAULT_STORE)
