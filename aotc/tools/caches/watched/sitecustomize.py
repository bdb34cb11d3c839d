"""Python imports a module of this name when it starts, from a folder on PYTHONPATH: it begins to watch. The one that
would have been imported without this folder follows."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

import aotc_watching


def _next() -> None:
    """Run the module of this name that the process would have had."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    others = [each for each in sys.path if os.path.abspath(each) != here]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


aotc_watching.start()
_next()
