"""One small artifact, which tests change where it matters to them; made without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from aotc.provenance import BuiltArtifact
from aotc.records import SCHEMA_VERSION, Ambient, Environment, ModuleGuard, Parameter, Signature, TensorLeaf
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store


def small_artifact(**fields: Any) -> BuiltArtifact:
    """A live artifact for a CPU, of one input `x` and no variant."""
    whole: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "aotc": "0.1.0",
        "model": "small",
        "target": "cpu:x86-64-v3",
        "environment": Environment(os="linux", machine="x86_64", torch="2.13.0"),
        "weights": "live",
        "signature": Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", ("batch", 4)),)),
        "state": (),
        "module": ModuleGuard("Model", False, {}, ""),
        "ambient": Ambient(None, "float32", "highest", False),
        "variants": (),
        "options": {},
        "manifest": {},
    }
    return BuiltArtifact(**{**whole, **fields})


def publish_unchecked(store: Store, model: str, tag: str, artifacts: Sequence[BuiltArtifact], **fields: Any) -> str:
    """As `publish`, of records that make no sense too: what somebody writes with tools of his own."""
    with patch("aotc.store.layout.publishing.check_record"):
        return publish(store, model, tag, artifacts, **fields)
