"""References: how a person names a bundle."""

from __future__ import annotations

import msgspec

from aotc.errors import ReferenceFormatError
from aotc.store.names import is_digest, name_flaw

DEFAULT_TAG = "latest"

_FORM = "[STORE#]model[:tag] or [STORE#]model@sha256:<64 hex>"


class Reference(msgspec.Struct, frozen=True):
    """`[STORE#]model:tag` or `[STORE#]model@sha256:…`: exactly one of `tag` and `digest` is set.

    Creating one with a bad model, tag or digest raises ReferenceFormatError.
    """

    store: str | None
    model: str
    tag: str | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        _check_store(self.store)
        _check_name("model", self.model)
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
                f"{self.digest[:100]!r} is no digest",
                hint="a digest is sha256: and 64 lower-case hexadecimal digits; `aotc ls` prints them",
            )

    def __str__(self) -> str:
        store = "" if self.store is None else f"{self.store}#"
        return f"{store}{self.name}"

    @property
    def name(self) -> str:
        """The reference without its store."""
        return f"{self.model}@{self.digest}" if self.digest is not None else f"{self.model}:{self.tag}"


def parse_reference(text: str) -> Reference:
    """Read `[STORE#]model[:tag | @sha256:<64 hex>]`; the default tag is `latest`. Raises ReferenceFormatError.

    The last `#` ends the store, so that a store's path may hold one.
    """
    before, hash_sign, name = text.rpartition("#")
    store = before if hash_sign else None
    if "/" in name:
        raise ReferenceFormatError(
            f"{text[:200]!r} is no reference: the model {name[:100]!r} contains '/'",
            hint=f"write {_FORM}; the part before '#' is the store's folder",
        )
    if "@" in name:
        model, _, digest = name.partition("@")
        if ":" in model:
            raise ReferenceFormatError(
                f"{text[:200]!r} is no reference: it has a tag and a digest",
                hint=f"leave one of them out: {_FORM}",
            )
        return Reference(store, model, digest=digest)
    model, colon, tag = name.partition(":")
    return Reference(store, model, tag=tag if colon else DEFAULT_TAG)


def _check_store(store: str | None) -> None:
    if store is None:
        return
    if not store or not store.isprintable():
        raise ReferenceFormatError(
            f"the store before '#' is {'empty' if not store else repr(store[:100])}",
            hint="name the store's folder before '#', or leave '#' out to use the default store",
        )


def _check_name(what: str, name: str) -> None:
    if flaw := name_flaw(name):
        raise ReferenceFormatError(f"{name[:100]!r} is no {what}: {flaw}", hint=f"write {_FORM}")
