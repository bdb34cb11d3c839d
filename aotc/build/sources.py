"""The Python code that a model is made of: its classes' files, and what these import."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from torch import nn

from aotc.snapshot import BY_DIGEST, file_identity


def source_closure(module: nn.Module, functions: Iterable[str]) -> dict[str, str]:
    """The code that a model is made of: its classes' modules, `functions`' modules, and what these import, by name.

    Installed packages count by version, the standard library and torch not at all (torch's version is a factor).
    """
    start = {type(part).__module__ for part in module.modules()} | set(functions)
    seen: dict[str, str] = {}
    todo = sorted(start)
    while todo:
        name = todo.pop()
        if name in seen or _not_ours(name):
            continue
        seen[name] = file_identity(name)
        if seen[name].startswith(BY_DIGEST):
            todo += sorted(_imported(sys.modules[name]))
    return {_public_name(name): identity for name, identity in sorted(seen.items()) if identity}


def imported_files(module: nn.Module) -> dict[str, str]:
    """Of the code that a model's classes are made of: each file that is not of an installed package, by its module."""
    return {name: text for name, text in source_closure(module, ()).items() if text.startswith(BY_DIGEST)}


def _not_ours(name: str) -> bool:
    root = name.partition(".")[0]
    return root in ("torch", "builtins", "aotc") or root in sys.stdlib_module_names


def _public_name(name: str) -> str:
    """A file whose name another module had was loaded under a made-up one, with a digest in it: use the file's."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).stem if file and re.fullmatch(rf"\w*{Path(file).stem}_[0-9a-f]{{8}}", name) else name


def _imported(module: ModuleType) -> set[str]:
    """The loaded modules whose names a module's code imports, or whose functions and classes stand in it."""
    found = set(_named_in_imports(module))
    for value in vars(module).values():
        if isinstance(value, ModuleType):
            found.add(value.__name__)
        elif inspect.isroutine(value) or inspect.isclass(value):
            found.add(str(getattr(value, "__module__", None)))
    return {name for name in found if name in sys.modules}


def _named_in_imports(module: ModuleType) -> Iterator[str]:
    """What stands in `import` statements: `from helper import WIDTH` leaves nothing else that names `helper`."""
    try:
        tree = ast.parse(Path(str(module.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = str(module.__package__).split(".")
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            yield from (origin, *(f"{origin}.{alias.name}" for alias in node.names))
