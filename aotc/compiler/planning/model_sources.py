"""The Python code of a model of a manifest: that of its classes, and of the functions that the manifest names."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

from aotc.manifest import ModelSpec
from aotc.manifest.inputs import TensorInput, nested_factories, parse_inputs
from aotc.reads.imported_files import source_closure
from aotc.reads.sources import Trees


def model_sources(spec: ModelSpec, module: nn.Module, folder: Path, trees: Trees | None = None) -> dict[str, str]:
    """The code of a spec's model, of its factories and of its inputs' `init` functions: identity by module name."""
    return source_closure(module, _modules_named(spec, folder), trees)


def _modules_named(spec: ModelSpec, folder: Path) -> list[str]:
    """The modules of the functions that a spec names: its factories and the inits of its inputs."""
    _, leaves = parse_inputs(spec.inputs)
    inits = [init for leaf in leaves if isinstance(leaf, TensorInput) for init in leaf.inits if isinstance(init, str)]
    factories = [spec.factory, *(reference for _, reference in nested_factories(spec.kwargs))]
    references = [*factories, *(init for init in inits if ":" in init)]
    return [name for reference in references if (name := _module_named(reference.partition(":")[0], folder))]


def _module_named(reference: str, folder: Path) -> str:
    """The name under which a module, or a file given by its path, was imported; "" for a file that was not imported."""
    if not reference.endswith(".py"):
        return reference
    files = [(place / reference).resolve() for place in (folder, Path.cwd())]
    file = next((file for file in files if file.is_file()), None)
    loaded = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.copy().items()}
    same_name = (name for name, origin in loaded.items() if file and origin.endswith(file.name))
    return next((name for name in same_name if Path(loaded[name]).resolve() == file), "")
