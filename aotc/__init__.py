"""aotc: compile PyTorch models ahead of time; start services with no compiler in the process.

`aotc.load` is what a service calls. Building (`aotc build`), checking (`aotc verify`) and looking (`aotc ls`,
`aotc inspect`) are commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotc.errors import (
    AotcError,
    BindError,
    BuildError,
    CorruptError,
    EnvironmentMismatchError,
    Issue,
    LibraryError,
    ManifestError,
    MissError,
    NotFoundError,
    OperatorError,
    ReferenceFormatError,
    RemoteError,
    SchemaVersionError,
    SignatureError,
    StoreError,
    VerifyError,
)

if TYPE_CHECKING:
    from aotc.runtime import Compiled, load

__version__ = "0.1.0"

__all__ = [
    "AotcError",
    "BindError",
    "BuildError",
    "Compiled",
    "CorruptError",
    "EnvironmentMismatchError",
    "Issue",
    "LibraryError",
    "ManifestError",
    "MissError",
    "NotFoundError",
    "OperatorError",
    "ReferenceFormatError",
    "RemoteError",
    "SchemaVersionError",
    "SignatureError",
    "StoreError",
    "VerifyError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    """`load` and `Compiled` import torch, so they come with their first use."""
    if name in ("Compiled", "load"):
        from aotc.garbage import no_collection

        with no_collection():
            from aotc import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module 'aotc' has no attribute '{name}'")
