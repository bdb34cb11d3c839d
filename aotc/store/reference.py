"""References: how a person names a bundle."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from aotc.errors import ReferenceFormatError
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
        store, model, tag, digest = self.store, self.model, self.tag, self.digest
        if store is not None and self.in_registry:
            _check_repository(store)
        if store is not None and not (store and store.isprintable()):
            raise ReferenceFormatError(
                f"the store before '#' is {'empty' if not store else repr(store[:100])}",
                hint="name the store's folder before '#', or leave '#' out to use the default store",
            )
        if not self.in_registry:
            _check_name("model", model)
        elif model:
            raise ReferenceFormatError(
                f"{store}#{model} is not a reference: a tag of a registry's repository names one bundle",
                hint="write oci://HOST[:PORT]/REPOSITORY[:tag]",
            )
        if (tag is None) == (digest is None):
            raise ReferenceFormatError(
                f"a reference to {model!r} needs a tag or a digest, and not both; it has tag {tag!r} and digest "
                f"{digest!r}",
                hint=f"write {_FORM}",
            )
        if tag is not None:
            _check_name("tag", tag)
        if digest is not None and not is_digest(digest):
            raise ReferenceFormatError(
                f"{digest[:100]!r} is not a digest",
                hint="a digest is sha256: and 64 lower-case hexadecimal digits; `aotc ls --json` prints them",
            )

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
        return _parse_in_registry(text)
    before, hash_sign, name = text.rpartition("#")
    store = before if hash_sign else None
    named, at, digest = name.partition("@")
    model, colon, tag = named.partition(":")
    if "/" in name or (at and colon):
        raise _form_error(text)
    return Reference(store, model, digest=digest) if at else Reference(store, model, tag=tag if colon else DEFAULT_TAG)


def store_named(reference: Reference, given: str | None, argument: str) -> str | None:
    """The store of a reference, else the one that `argument` gives. Raises ReferenceFormatError where they differ."""
    store = reference.store
    if given is None or store is None:
        return store if given is None else given
    if store != given and _place(store) != _place(given):
        drop = f"leave out {argument}: the reference names its repository"
        raise ReferenceFormatError(
            f"the reference names the store {store}, and {argument} names {given}",
            hint=drop if reference.in_registry else f"leave out one of them: write {reference.name} or drop {argument}",
        )
    return given


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


# -- what is wrong with one --------------------------------------------------------------------------------------------


_FORM = "[STORE#]model[:tag] or [STORE#]model@sha256:<64 hex>"


def _form_error(text: str) -> ReferenceFormatError:
    """Of a text whose name holds a slash, or a tag and a digest."""
    _, hash_sign, name = text.rpartition("#")
    if "/" not in name:
        return ReferenceFormatError(
            f"{text[:200]!r} is not a reference: it has a tag and a digest",
            hint=f"leave one of them out: {_FORM}",
        )
    # Docker tells a registry from a folder by a dot or a port in front of the first slash.
    if not hash_sign and re.match(r"(localhost|[A-Za-z0-9-]+([.:][A-Za-z0-9.-]+)+)/[a-z0-9]", name):
        return ReferenceFormatError(
            f"{text[:200]!r} names a registry, and no scheme", hint=f"did you mean oci://{text[:200]}?"
        )
    return ReferenceFormatError(
        f"{text[:200]!r} is not a reference: the model {name[:100]!r} contains '/'",
        hint=f"write {_FORM}; the part before '#' is the store's folder",
    )


def _place(store: str) -> str:
    return store.rstrip("/") if "://" in store else str(Path(store).absolute())


def _check_name(what: str, name: str) -> None:
    if flaw := name_flaw(name):
        raise ReferenceFormatError(f"{name[:100]!r} is not a {what} name: {flaw}", hint=f"write {_FORM}")


# -- references to a registry ------------------------------------------------------------------------------------------


_REGISTRY_FORM = "oci://HOST[:PORT]/REPOSITORY[:tag] or oci://HOST[:PORT]/REPOSITORY@sha256:<64 hex>"
_HOST = r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?"
_REPOSITORY = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*"
"""Source: the OCI distribution specification, "Pulling manifests"."""


def _parse_in_registry(text: str) -> Reference:
    """Raises ReferenceFormatError."""
    store, at, digest = text.partition("@")
    before, slash, last = store.rpartition("/")
    last, colon, tag = last.partition(":")
    if at and "/" in digest:
        raise ReferenceFormatError(
            "a reference to a registry holds no user or password",  # and no message repeats them
            hint=f"write {_REGISTRY_FORM}; credentials are those of `docker login` or `podman login`",
        )
    if at and colon:
        raise ReferenceFormatError(
            f"{text[:200]!r} is not a reference: it has a tag and a digest",
            hint=f"leave one of them out: {_REGISTRY_FORM}",
        )
    store = f"{before}{slash}{last}"
    return Reference(store, "", digest=digest) if at else Reference(store, "", tag if colon else DEFAULT_TAG)


def _check_repository(store: str) -> None:
    """Raises ReferenceFormatError."""
    host, _, repository = store.partition("://")[2].partition("/")
    if not re.fullmatch(_HOST, host):
        flaw = f"{host[:100]!r} is not a host"
    elif not re.fullmatch(_REPOSITORY, repository):
        flaw = (
            f"{repository[:100]!r} is not a repository: lower-case letters, digits, single '.', '_', '-' between, '/'"
        )
    else:
        return
    raise ReferenceFormatError(
        f"{store[:200]!r} is not a repository of a registry: {flaw}", hint=f"write {_REGISTRY_FORM}"
    )
