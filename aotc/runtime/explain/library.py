"""What a library says of its last error."""

from __future__ import annotations

import ctypes
from typing import cast

from aotc.runtime.forks import torch_library

_IN_TORCH = " API call failed at "
"""Stands in what a library raises where an operator of torch's has failed, whose own words torch keeps."""


def last_error(library: ctypes.CDLL) -> str:
    """That of this thread's last call; before torch 2.13, whose libraries keep none, where it stands."""
    raised = ctypes.c_char_p()
    try:
        library.AOTInductorGetLastError(ctypes.byref(raised))
    except AttributeError:
        return "it wrote its reason to standard error"
    words = (raised.value or b"").decode(errors="replace")
    return _raised_in_torch() if _IN_TORCH in words else words


def _raised_in_torch() -> str:
    """The last error of an operator in this thread (torch/csrc/stable/c/shim.h)."""
    words = torch_library().torch_exception_get_what_without_backtrace
    words.restype = ctypes.c_char_p
    return cast(bytes, words()).decode(errors="replace")
