"""What a build states of its bundle, in the forms that scanners read: SLSA's provenance and a CycloneDX SBOM.

`aotc build --attest` attaches both (`aotc.compiler.publish.supply_chain`). A fetch requires them where
`AOTC_REQUIRE` asks, `provenance,sbom` or `provenance=BUILDER,sbom`: each is then signed by a trusted key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from aotc.errors import CorruptError, SignatureError, UnverifiedError
from aotc.records import Record, decode
from aotc.store.readable import ReadableStore
from aotc.store.signing.attachments import attached_name, reader_of
from aotc.store.signing.attestations import ATTESTATIONS, SignedStatement, decode_statement, read_envelopes
from aotc.store.signing.keys import PublicKey

PREDICATES = {"provenance": "https://slsa.dev/provenance/v1", "sbom": "https://cyclonedx.org/bom"}
"""By the names that a policy has for them."""


class Requirement(NamedTuple):
    """A statement that a fetch requires: of `PREDICATES`, and of provenance the builder's id ("" for any)."""

    kind: str
    builder: str = ""


def parse_requirements(text: str) -> tuple[Requirement, ...]:
    """Of `provenance=BUILDER,sbom`. Raises SignatureError."""
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        kind, _, builder = part.partition("=")
        if kind not in PREDICATES or (builder and kind != "provenance"):
            raise SignatureError(
                f"AOTC_REQUIRE asks for {part[:100]!r}, which is not a statement that aotc knows",
                hint="write provenance, provenance=BUILDER or sbom, separated by commas",
            )
        found.append(Requirement(kind, builder))
    return tuple(found)


class _Builder(msgspec.Struct):
    id: str


class _RunDetails(msgspec.Struct):
    builder: _Builder


class _SlsaProvenance(msgspec.Struct, rename="camel"):
    run_details: _RunDetails


class _Sbom(msgspec.Struct, rename="camel"):
    bom_format: str
    spec_version: str
    components: list[dict[str, Any]] = []


class SeenStatement(Record, frozen=True):
    """What `aotc inspect` shows of one. Without `key` no trusted key signed it: it may be a lie.

    said: of provenance the builder's id, of an SBOM how many components it lists.
    """

    kind: str
    said: str
    key: str = ""


def statements_of(store: ReadableStore, digest: str, keys: Sequence[PublicKey] = ()) -> Iterator[SeenStatement]:
    """Those of `PREDICATES` that are attached to the bundle. Raises CorruptError, NotFoundError, StoreError."""
    found = store.attachment(attached_name(digest, ATTESTATIONS))
    for layer in read_envelopes(reader_of(store), found).layers if found else ():
        try:
            statement = decode_statement(layer.data, keys)
            if statement is not None and statement.subject() == digest:
                yield from _seen(statement)
        except CorruptError:
            continue  # of another writer; `read_attestations` has an issue for it


def _seen(statement: SignedStatement) -> Iterator[SeenStatement]:
    key = next(iter(statement.signers), "")
    if statement.predicate_type == PREDICATES["provenance"]:
        yield SeenStatement("provenance", decode(statement.predicate, _SlsaProvenance).run_details.builder.id, key)
    if statement.predicate_type.partition("/v")[0] == PREDICATES["sbom"]:
        bom = decode(statement.predicate, _Sbom)
        yield SeenStatement("sbom", f"{bom.bom_format} {bom.spec_version}, {len(bom.components)} components", key)


def check_required(
    store: ReadableStore, digest: str, name: str, required: Sequence[Requirement], keys: Sequence[PublicKey]
) -> None:
    """Whether a trusted key has signed each required statement of the bundle. `name` is the reference, for messages.

    Raises UnverifiedError, whose `reason` is `unverified` where there is none, `untrusted` where none is signed by a
    trusted key or made by the builder; CorruptError, NotFoundError, StoreError where they cannot be read.
    """
    if not required:
        return
    there = list(statements_of(store, digest, keys))
    for one in required:
        ours = [each for each in there if each.kind == one.kind]
        signed = [each for each in ours if each.key]
        if any(not one.builder or each.said == one.builder for each in signed):
            continue
        expected = f"{one.kind} of {one.builder}" if one.builder else f"{one.kind}, signed by a trusted key"
        actual = ", ".join(f"{each.said} ({'signed' if each.key else 'by no trusted key'})" for each in ours) or "none"
        raise UnverifiedError(
            f"{name} ({digest}): AOTC_REQUIRE asks for {expected}; there is {actual}",
            hint="build it with `aotc build --attest --sign KEY` and push it, or trust the key that signed them",
            digest=digest,
            expected=expected,
            actual=actual,
            reason="untrusted" if ours else "unverified",
        )
