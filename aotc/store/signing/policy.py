"""`aotc.Trust`: which bundles and artifacts a load takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime

import msgspec

from aotc.records import Artifact

TrustedKey = str | os.PathLike[str]


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """Which bundles and artifacts may be loaded.

    Attributes:
        keys: public keys: PEM texts, files, or folders of `*.pub`; else `$AOTC_TRUSTED_KEYS`. Where there are any, a
            bundle that none of them signed for this very reference is refused before any of it is mapped.
        signed_after: a time (RFC 3339): also refuse what was signed before it; else `$AOTC_SIGNED_AFTER`. It says to a
            host that has never loaded the model how old a bundle may be.
        require_verified: refuse an artifact that has not passed `aotc verify --attest`. With trusted keys, one of them
            must have signed the attestation. Of a remote bundle, the attestations that are there now count.
        allow_untested: load code that was built on a machine without such a GPU or CPU, and that `aotc verify --attest`
            has not run since. Else it is refused as with `require_verified`.
        advisories: refuse an artifact that was built without a patch of torch which its graph needs: by the advisories
            of this aotc (True), or also by those that the store in this folder or at this URL has, which a trusted key
            must have signed (`aotc audit --publish`).
    """

    keys: Sequence[TrustedKey] | TrustedKey | None = None
    signed_after: datetime | str | None = None
    require_verified: bool = False
    allow_untested: bool = False
    advisories: bool | TrustedKey = False

    def asks_of(self, artifact: Artifact) -> bool:
        """Whether anything is to be looked at before the artifact is loaded."""
        return bool(self.advisories) or self.needs_attestation(artifact)

    def needs_attestation(self, artifact: Artifact) -> bool:
        """Whether the artifact is to be refused unless `aotc verify --attest` has passed it."""
        return self.require_verified or (artifact.untested and not self.allow_untested)
