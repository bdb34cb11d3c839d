"""Is a bundle signed as the trusted keys of this machine ask."""

from __future__ import annotations

from aotc.store.layout.bundle import Bundle
from aotc.store.readable import ReadableStore
from aotc.store.reference import Reference
from aotc.store.signing.attachments import reader_of
from aotc.store.signing.trust import check_signatures, read_trust
from aotc.tools.doctor.checks import Check, failing


def check_signature(store: ReadableStore, bundle: Bundle, reference: Reference) -> list[Check]:
    checks: list[Check] = []
    with failing(checks, "bundle", "signature"):
        trust = read_trust()
        if trust is None:
            return [Check("bundle", "signature", "ok", "not checked: no AOTC_TRUSTED_KEYS are set")]
        read, resolve = reader_of(store), store.attachment
        signer = check_signatures(read, resolve, bundle.digest, reference, trust, remember=False)
        checks.append(Check("bundle", "signature", "ok", f"trusted, by {signer.key.fingerprint[:23]}"))
    return checks
