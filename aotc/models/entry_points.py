"""Entry points of a model other than its forward: `method: decode` in a manifest.

All that captures, runs and compares a model calls the module. So the method stands in the place of the forward of the
module that the factory makes; the module of a service is left as it is.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from torch import nn

from aotc.errors import ManifestError
from aotc.manifest.findings import did_you_mean


def enter_by(module: nn.Module, method: str) -> None:
    """Make calls of the module, or of a copy of it, run that method of its class. While it runs, the module has its own
    forward, which the method may call. Raises ManifestError where the class has no such method."""
    cls = type(module)
    own = getattr(cls, method, None)
    if not callable(own):
        names = [name for name in dir(cls) if not name.startswith("_") and name not in vars(nn.Module)]
        methods = [name for name in names if callable(getattr(cls, name, None))]
        raise ManifestError(f"{cls.__name__} has no method `{method}`", hint=did_you_mean(method, methods))

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        standing = vars(self).pop("forward")
        try:
            return own(self, *args, **kwargs)
        finally:
            vars(self)["forward"] = standing

    # `aotc.reads` knows it by this: it is not a forward that the module was given.
    forward.is_entry_point = True  # type: ignore[attr-defined]
    vars(module)["forward"] = MethodType(forward, module)
