"""One small artifact, which tests change where it matters to them; made without torch."""

from __future__ import annotations

from typing import Any

from aotc.records import Ambient, Artifact, Environment, ModuleGuard, Parameter, Signature, TensorLeaf


def small_artifact(**fields: Any) -> Artifact:
    """A live artifact for a CPU, of one input `x` and no variant."""
    whole: dict[str, Any] = {
        "schema": 1,
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
    return Artifact(**{**whole, **fields})
