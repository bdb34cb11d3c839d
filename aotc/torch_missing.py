"""Without torch, which the extras `torch` and `build` bring: the error of whatever needs it."""

from __future__ import annotations

from aotc.errors import TorchMissingError
from aotc.store.extras import install_hint


def torch_missing(error: ModuleNotFoundError, what: str) -> ModuleNotFoundError:
    """The error to raise in the place of `error`, which `what` has met: itself where another module is missing."""
    if error.name != "torch":
        return error
    return TorchMissingError(f"{what} needs torch, which is not installed", hint=install_hint("torch"))
