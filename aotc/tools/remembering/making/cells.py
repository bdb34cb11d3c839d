"""A Python module for a class that a notebook's cell, or a prompt, defines: the process that builds imports it.

It has the class's source, which IPython keeps, and what that names in turn: other definitions, imports and plain
values. It lies in the cache folder under a name with its digest, and stands for `__main__` while the class is looked at
(`aotc.reads.sources.cells_file`).
"""

from __future__ import annotations

import ast
import builtins
import dis
import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from aotc.digest import sha256_bytes
from aotc.errors import ManifestError
from aotc.store.cache_folder import cache_folder
from aotc.store.files.writing import write_atomically
from aotc.store.layout.names import hex_of

_READ = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_TO_A_FILE = "write it into a file (in a notebook: `%%writefile my_models.py`) and import it from there"


def module_of_cells(module: nn.Module) -> Path | None:
    """The file that has the module's classes of notebook cells; None where it has none, or a script's file has them.

    Raises ManifestError for what has no source, and for names whose value no file can have.
    """
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None):
        return None
    classes = {type(part): None for part in module.modules() if type(part).__module__ == "__main__"}
    if not classes:
        return None
    written = _Written(vars(main))
    for cls in classes:
        if "<locals>" not in cls.__qualname__:  # refused where the module is made again, with a reason of its own
            written.add(cls.__qualname__.partition(".")[0], vars(main).get(cls.__qualname__.partition(".")[0]), "")
    text = "\n".join(["# From a notebook's cells, by `aotc.compile`.", *written.lines, ""]).encode()
    path = cache_folder() / "cells" / f"notebook_{hex_of(sha256_bytes(text))[:12]}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return path


class _Written:
    """The lines of the module: each name after those that it needs."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._names: set[str] = set()
        self.lines: list[str] = []

    def add(self, name: str, value: Any, reader: str) -> None:
        """A name with its value, which `reader` reads."""
        if name in self._names:
            return
        self._names.add(name)
        if isinstance(value, FunctionType | type) and value.__module__ == "__main__":
            node, source = _definition(value, reader)
            for other in _names_read_by(source):
                if other in self._namespace:
                    self.add(other, self._namespace[other], value.__qualname__)
            self.lines.append(source)
            if node.name != name:
                self.lines.append(f"{name} = {node.name}")
        else:
            self.lines.append(_line_for(name, value, reader))


def _line_for(name: str, value: Any, reader: str) -> str:
    if isinstance(value, ModuleType):
        return (
            f"import {value.__name__} as {name}"
            if "." in value.__name__ or value.__name__ != name
            else f"import {name}"
        )
    if isinstance(value, torch.dtype | torch.device):
        made = f"torch.device({str(value)!r})" if isinstance(value, torch.device) else repr(value)
        return f"import torch\n{name} = {made}"
    origin, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(origin, str) and isinstance(own, str) and getattr(sys.modules.get(origin), own, None) is value:
        return f"from {origin} import {own} as {name}"
    try:
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}"
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    raise ManifestError(
        f"{reader} is defined in a notebook or at a prompt and reads `{name}`, which is {type(value).__name__}: the "
        "process that builds cannot have it",
        hint=f"give it to the constructor, or {_TO_A_FILE}",
    )


def _definition(value: Any, reader: str) -> tuple[ast.ClassDef | ast.FunctionDef, str]:
    """The statement that defines a class or a function, and its source. Raises ManifestError."""
    files = [code.co_filename for code in _codes_of(value)]
    files += reversed([file for file in linecache.cache if not Path(file).exists()])  # of a class without methods
    for file in files:
        body = _parsed(linecache.getlines(file))
        for node in reversed(body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == value.__name__:
                return node, ast.unparse(node)
    read = f", which {reader} reads," if reader else ""
    raise ManifestError(
        f"{value.__qualname__}{read} is defined in a notebook or at a prompt, and its source was not kept",
        hint=_TO_A_FILE,
    )


def _parsed(lines: Sequence[str]) -> list[ast.stmt]:
    """The statements of a cell, also with IPython's magics; none where Python cannot read it."""
    with suppress(SyntaxError, ValueError):
        return ast.parse("".join(lines)).body
    with suppress(SyntaxError, ValueError):
        return ast.parse("".join(line for line in lines if not line.lstrip().startswith(("%", "!", "?")))).body
    return []


def _codes_of(value: Any) -> Iterator[CodeType]:
    """The code of a function; of a class that of its methods, which are in the file of the class."""
    if isinstance(value, FunctionType):
        yield value.__code__
        return
    for held in vars(value).values():
        inner = getattr(held, "fget", None) or getattr(held, "__func__", None) or getattr(held, "__wrapped__", held)
        inner = getattr(inner, "function", inner)
        if isinstance(inner, FunctionType) and inner.__module__ == "__main__":
            yield inner.__code__


def _names_read_by(source: str) -> list[str]:
    """The global names that a definition reads, as Python compiles it, in the order in which it names them."""
    found: dict[str, None] = {}

    def look(code: CodeType) -> None:
        own = set()
        for step in dis.get_instructions(code):
            if step.opname == "STORE_NAME":
                own.add(step.argval)
            elif step.opname in _READ and step.argval not in own:
                found[step.argval] = None
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                look(constant)

    look(compile(source, "<cell>", "exec"))
    return [name for name in found if not hasattr(builtins, name) and not name.startswith("__")]
