"""Options of `aotc.load` that belong together, as one argument each."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from aotc.records import Artifact
    from aotc.runtime.load import LoadRequest, OptionCheck

TrustedKey = str | os.PathLike[str]
Use = Literal["picked", "always", "never"]
GraphCapture = Literal["eager", "lazy"]
OutputMode = Literal["copy", "view"]


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


class Graphs(msgspec.Struct, frozen=True, kw_only=True):
    """How a GPU launches compiled code.

    Attributes:
        use: launch as a CUDA graph what measured faster so at build ("picked"), or all, or nothing.
        capture: capture the graphs now ("eager"), or each at its first call ("lazy").
        outputs: of a graph: copies that are the caller's to keep, or views that the next call overwrites, as
            torch.compile's CUDA graphs give (then only one thread may call; in another one it is a LibraryError).
    """

    use: Use = "picked"
    capture: GraphCapture = "eager"
    outputs: OutputMode = "copy"


class Ranks(msgspec.Struct, frozen=True):
    """The ranks of a model that was built for several (`parallel:` in its manifest).

    Attributes:
        group: the process group of this one, of any backend that runs on the device, or a DeviceMesh. Every rank of the
            group must load, and call, alike.
        timeout: seconds that this rank waits for the others, in a load and in a call.
    """

    group: Any
    timeout: float = 300.0


def checks_of_groups(asked: LoadRequest) -> Iterator[OptionCheck]:
    """Of each option in a group: its name, its value, whether it may be that, and what it may be."""
    for name, value, group in (
        ("trust", asked.trust, Trust),
        ("graphs", asked.graphs, Graphs),
        ("ranks", asked.ranks, Ranks),
    ):
        yield name, value, value is None or isinstance(value, group), f"an aotc.{group.__name__}"
    if isinstance(asked.graphs, Graphs):
        for name, of in (("use", Use), ("capture", GraphCapture), ("outputs", OutputMode)):
            value, choices = getattr(asked.graphs, name), get_args(of)
            yield f"graphs.{name}", value, value in choices, " or ".join(map(repr, choices))
    if isinstance(asked.ranks, Ranks):
        seconds = asked.ranks.timeout
        fits = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < math.inf
        yield "ranks.timeout", seconds, fits, "seconds, more than 0"
