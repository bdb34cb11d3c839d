"""Signing a bundle for the names that it is released under."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from aotc.errors import SignatureError
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import Reference
from aotc.store.signing.keys import PrivateKey
from aotc.store.signing.signatures import Claims, sign

_LONGEST = 100 * 366 * 86400.0  # seconds
_NAME = re.compile(r"[A-Za-z0-9._/:-]{1,300}:[A-Za-z0-9._-]{1,128}")


def sign_release(
    store: Store,
    reference: Reference,
    key: PrivateKey,
    *,
    names: Sequence[str] = (),
    lifetime: float | None = None,
    identity: str | None = None,
    now: datetime | None = None,
) -> list[Claims]:
    """Sign the bundle that `reference` names, once for each name that it may be loaded under.

    Those are `names`, like `model:tag` or `host/repository:tag`, else `reference` itself. A digest without names is
    signed for none, and can be loaded by its digest only. `now` orders releases: signing an older bundle again makes
    it the newest. `lifetime` is in seconds. `identity` is the docker-reference, by default `aotc/<model>`.

    Raises ReferenceFormatError, NotFoundError, CorruptError, SignatureError, StoreError.
    """
    bundle = read_bundle(store, reference)
    now = now or datetime.now(UTC)
    if lifetime is not None and not 0 < lifetime < _LONGEST:
        said = f"a signature lasts more than 0 and less than {_LONGEST:g} s, and {lifetime:g} s were asked for"
        raise SignatureError(said, hint="give it some days: 30d")
    expires = None if lifetime is None else now + timedelta(seconds=lifetime)
    # cosign takes lower case only there, and two characters at least
    where = identity or f"aotc/{bundle.model.lower()}"
    chosen = [_checked_name(name) for name in dict.fromkeys(names)] or [reference.name if reference.tag else ""]
    claims = [Claims(bundle.digest, where, name, now, expires) for name in chosen]
    for claim in claims:
        sign(store, claim, key)
    return claims


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SignatureError(f"{name[:200]!r} is not a name", hint="write model:tag, or host/repository:tag")
    return name
