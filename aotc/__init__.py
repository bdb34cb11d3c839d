"""aotc: compile PyTorch models ahead of time; start services with no compiler in the process.

`aotc.load` is what a service calls, or `aotc.attach` for the components of a pipeline; `aotc.fetch` brings an artifact
to its machine before, and `aotc.prepare` loads all that needs no device, before a fork. Building (`aotc build`),
checking (`aotc verify`) and looking (`aotc ls`, `aotc inspect`) are commands.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from aotc.garbage import no_collection

if TYPE_CHECKING:
    from aotc import adapters, optim, telemetry
    from aotc.errors import (
        AdvisoryError,
        AotcError,
        BindError,
        BuildError,
        CorruptError,
        EnvironmentMismatchError,
        ForkError,
        GradientError,
        GroupError,
        Issue,
        LibraryError,
        ManifestError,
        MemoryLimitError,
        MissError,
        NotFoundError,
        OperatorError,
        ReferenceFormatError,
        RemoteError,
        SchemaVersionError,
        SignatureError,
        StoreError,
        TorchMissingError,
        TraceError,
        UnverifiedError,
        VerifyError,
    )
    from aotc.runtime.attach import attach
    from aotc.runtime.compiled import Compiled
    from aotc.runtime.fetch import fetch
    from aotc.runtime.load import load
    from aotc.runtime.options import Graphs, Ranks
    from aotc.runtime.prepare import prepare
    from aotc.runtime.training.step import TrainingStep
    from aotc.store.signing.policy import Trust
    from aotc.tools.recording.record import record
    from aotc.tools.remembering.compile import compile

__version__ = "0.2.0"

__all__ = [
    "AdvisoryError",
    "AotcError",
    "BindError",
    "BuildError",
    "Compiled",
    "CorruptError",
    "EnvironmentMismatchError",
    "ForkError",
    "GradientError",
    "Graphs",
    "GroupError",
    "Issue",
    "LibraryError",
    "ManifestError",
    "MemoryLimitError",
    "MissError",
    "NotFoundError",
    "OperatorError",
    "Ranks",
    "ReferenceFormatError",
    "RemoteError",
    "SchemaVersionError",
    "SignatureError",
    "StoreError",
    "TorchMissingError",
    "TraceError",
    "TrainingStep",
    "Trust",
    "UnverifiedError",
    "VerifyError",
    "__version__",
    "adapters",
    "attach",
    "compile",
    "fetch",
    "load",
    "optim",
    "prepare",
    "record",
    "telemetry",
]

if level := os.environ.get("AOTC_LOG"):
    from aotc.log import log_to_stderr

    log_to_stderr(level)
del level

_MODULES = {
    **dict.fromkeys(("errors", "Issue", *(name for name in __all__ if name.endswith("Error"))), "aotc.errors"),
    "Compiled": "aotc.runtime.compiled",
    "Graphs": "aotc.runtime.options",
    "Ranks": "aotc.runtime.options",
    "TrainingStep": "aotc.runtime.training.step",
    "Trust": "aotc.store.signing.policy",
    "attach": "aotc.runtime.attach",
    "compile": "aotc.tools.remembering.compile",
    "fetch": "aotc.runtime.fetch",
    "load": "aotc.runtime.load",
    "prepare": "aotc.runtime.prepare",
    "adapters": "aotc.adapters",
    "optim": "aotc.optim",
    "record": "aotc.tools.recording.record",
    "telemetry": "aotc.telemetry",
}


def __getattr__(name: str) -> Any:
    """What imports torch, or msgspec, comes with its first use. Raises TorchMissingError without torch."""
    if name in _MODULES:
        try:
            with no_collection():
                module = importlib.import_module(_MODULES[name])
        except ModuleNotFoundError as error:
            from aotc.torch_missing import torch_missing

            raise torch_missing(error, f"aotc.{name}") from None
        return module if module.__name__ == f"aotc.{name}" else getattr(module, name)
    raise AttributeError(f"module 'aotc' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
