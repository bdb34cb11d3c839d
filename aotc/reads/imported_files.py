"""The Python modules that a module's classes come from or import, and these in turn: the user's as files, installed
ones as packages."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType

from torch import nn

from aotc.reads.sources import (
    BY_DIGEST,
    Trees,
    cells_file,
    file_identity,
    file_of,
    is_installed,
    public_name,
    read_source,
)


def source_closure(module: nn.Module, functions: Iterable[str], trees: Trees | None = None) -> dict[str, str]:
    """The modules of a model's classes, the modules `functions`, and all that these import: identity by module name.

    Imports inside functions are included, imported yet or not. Installed packages are identified by version; the
    standard library and torch are left out (torch's version is a factor).
    """
    seen: dict[str, str] = {}
    todo = sorted({*_modules_of(module), *functions})
    while todo:
        name = todo.pop()
        if name in seen or _not_ours(name):
            continue
        seen[name] = file_identity(name, trees)
        if seen[name].startswith(BY_DIGEST):
            todo += sorted(_imported(name))
    return {public_name(name): identity for name, identity in sorted(seen.items()) if identity}


def imported_files(module: nn.Module, trees: Trees | None = None) -> dict[str, str]:
    """Each Python file, outside of installed packages, that a model's classes and the functions in its attributes come
    from or import: identity by module name."""
    found = source_closure(module, (), trees)
    return {name: text for name, text in found.items() if text.startswith(BY_DIGEST) and _is_a_users(file_of(name))}


def _is_a_users(file: Path | None) -> bool:
    return file is not None and file.suffix == ".py" and not is_installed(file)


def _modules_of(module: nn.Module) -> Iterator[str]:
    """The Python modules of the module tree's classes, and of functions and classes that are attributes there."""
    for part in module.modules():
        yield type(part).__module__
        for value in vars(part).values():
            function = value.func if isinstance(value, partial) else value
            if inspect.isfunction(function) or inspect.isclass(function):
                yield str(function.__module__)


_NOT_OURS = (*(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")), Path(__file__).parents[1])


def _not_ours(name: str) -> bool:
    """Whether a module is torch's, Python's or aotc's. Of the last two the file decides: a user's may have the name."""
    root = name.partition(".")[0]
    if root == "torch":
        return True
    if root != "aotc" and root not in sys.stdlib_module_names:
        return False
    file = file_of(name)
    return file is None or any(file.is_relative_to(folder) for folder in _NOT_OURS)


def _imported(name: str) -> set[str]:
    """The loaded modules that a module's code imports, or whose functions and classes are in the module's namespace.

    For a user's file, also the user's modules that it imports and that are not loaded yet.
    """
    module, file = sys.modules.get(name), file_of(name)
    own_package = name if file is not None and file.stem == "__init__" else name.rpartition(".")[0]
    imports = set(_named_in_imports(file, getattr(module, "__package__", None) or own_package))
    found = set(imports)
    if name == "__main__" and cells_file.get() is not None:
        module = None  # the class does not depend on the notebook's other cells
    for value in vars(module).values() if module is not None else ():
        if isinstance(value, ModuleType):
            found.add(value.__name__)
        elif inspect.isroutine(value) or inspect.isclass(value):
            found.add(str(getattr(value, "__module__", None)))
    later = imports - sys.modules.keys() if _is_a_users(file) else set()
    return (found & sys.modules.keys()) | {other for other in later if _is_a_users(file_of(other))}


def _named_in_imports(file: Path | None, package: str) -> Iterator[str]:
    """The module names in `import` statements; after `from helper import WIDTH`, nothing else names `helper`.

    `import a.b` names `a`, too.
    """
    try:
        imports = _import_statements(read_source(file) if file else b"")
    except (OSError, ImportError, SyntaxError, ValueError):
        return
    parents = package.split(".")
    for node in imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from accumulate(alias.name.split("."), "{}.{}".format)
        else:
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            yield from (origin, *(f"{origin}.{alias.name}" for alias in node.names))


@functools.lru_cache(maxsize=1024)
def _import_statements(source: bytes) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Models of one manifest share files, which take long to parse. Raises SyntaxError, ValueError."""
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom)))
