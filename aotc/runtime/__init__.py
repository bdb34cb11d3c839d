"""The loader: from a reference to a callable, with no compiler in the process."""

from aotc.runtime.compiled import Compiled
from aotc.runtime.load import load

__all__ = ["Compiled", "load"]
