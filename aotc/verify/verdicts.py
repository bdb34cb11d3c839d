"""The verdicts of `aotc verify`, and its `--json` document, which `aotc inspect --html --verified` reads."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aotc.errors import CorruptError
from aotc.records import LaunchPick

VerifyStatus = Literal["ok", "failed", "crashed", "could not run"]


class VerifyReport(msgspec.Struct, frozen=True):
    """The verdict on one bucket at one set of sizes, the worst over outputs and seeds.

    Errors are relative to the reference's size (rms); see `aotc.models.tolerance`. `bundle` is the digest of the bundle
    that was verified; "" where none could be read. `bisection`: why it differs, a
    `Bisection` of `aotc.tools.bisection.bisection_messages`. `launches`, with the last report on an artifact that had
    not run before and is right: how its variants are launched, as measured. `weights`: the factory's own, others as a
    checkpoint has them, or others that `update_weights` has set. `extremes`: the name of the draw of extreme inputs, ""
    with ordinary ones; with status `ok`, nothing could be compared, and `detail` says why.
    """

    model: str
    bucket: str
    target: str
    sizes: str
    status: VerifyStatus
    error: float | None = None
    eager_error: float | None = None
    allowed: float | None = None
    detail: str = ""
    bundle: str = ""
    bisection: dict[str, Any] | None = None
    launches: tuple[LaunchPick | None, ...] = ()
    weights: Literal["own", "other", "swapped"] = "own"
    extremes: Literal["", "extreme", "edges"] = ""


class _WithLimits(msgspec.Struct, frozen=True):
    """The document where a gate was given."""

    reports: list[VerifyReport]


def decode_reports(data: bytes, where: str) -> list[VerifyReport]:
    """What `aotc verify --json` has printed. Raises CorruptError."""
    try:
        found = msgspec.json.decode(data, type=list[VerifyReport] | _WithLimits)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptError(
            f"{where} is not a report of `aotc verify`: {error}",
            hint="write one with `aotc verify REF --json > FILE`",
            path=where,
        ) from error
    return found.reports if isinstance(found, _WithLimits) else found
