"""Python modules that are not imported: where they would be found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder


def spec_of(module_name: str) -> ModuleSpec | None:
    """Where a module that is not imported would be found; the packages that it is in need not be imported either."""
    package, _, name = module_name.rpartition(".")
    try:
        folders = _folders_of(package) if package else sys.path
        # By its last name alone: PathFinder looks up the package of a full one in `sys.modules`.
        return PathFinder.find_spec(name, folders) if folders is not None else None
    except (ImportError, ValueError, AttributeError, TypeError):
        return None


def _folders_of(package: str) -> Sequence[str] | None:
    """The folders in which a package's modules are looked for; None where it is not a package."""
    if package in sys.modules:
        return getattr(sys.modules[package], "__path__", None)
    spec = spec_of(package)
    return spec.submodule_search_locations if spec is not None else None
