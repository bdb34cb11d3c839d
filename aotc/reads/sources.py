"""The code of a module's classes: the identity of each file, by its version or its syntax tree."""

from __future__ import annotations

import functools
import sys
from contextvars import ContextVar
from pathlib import Path
from zipimport import zipimporter

from torch import nn

from aotc.digest import sha256_bytes

BY_DIGEST = "sha256:"
"""The prefix of the identity of a file that is named by its code."""

cells_file: ContextVar[Path | None] = ContextVar("cells_file", default=None)
"""The file that stands for `__main__` in a notebook, where that has none, while a class of its cells is looked at."""

Trees = dict[str, str]
"""The digest of a file's bytes → that of its syntax tree, for files whose tree is known."""


def source_digests(module: nn.Module, trees: Trees | None = None, *, by_version: bool = True) -> dict[str, str]:
    """For each class of the module tree, its parameters' included, that is not torch's: its name and the digest of the
    file that defines it.

    A class of an installed package is named by the package and its version instead, which is quicker and as exact,
    unless `by_version` is false. Whole files are digested, since a class uses what stands beside it; classes of one
    name are listed together.
    """
    digests: dict[str, set[str]] = {}
    parts = list(module.modules())
    tensors = (tensor for part in parts for tensor in part._parameters.values())  # whose class may be a library's, too
    for cls in {*map(type, parts), *map(type, tensors)}:
        if text := file_identity(cls.__module__, trees, by_version=by_version):
            digests.setdefault(cls.__qualname__, set()).add(text)
    return {name: ", ".join(sorted(texts)) for name, texts in sorted(digests.items())}


def file_identity(module_name: str, trees: Trees | None = None, *, by_version: bool = True) -> str:
    """How a Python module's code is named: "" for torch's own, package and version if installed, else the digest of its
    syntax tree, or of the bytes of any other file.

    A file that is in `trees` is not parsed, which would take some 13 ms for 1,000 lines; one that is not is added.
    """
    root = module_name.partition(".")[0]
    file = None if root == "torch" else file_of(module_name)
    if file is None:
        return ""
    version = getattr(sys.modules.get(root), "__version__", None)
    if by_version and is_installed(file) and isinstance(version, str):
        return f"{root} {version}"
    try:
        source = read_source(file)
    except (OSError, ImportError):
        return ""
    text = sha256_bytes(source)
    if file.suffix != ".py":
        return text
    known = {} if trees is None else trees
    if text not in known:
        from aotc.reads.syntax import syntax_digest

        known[text] = syntax_digest(source)
    return known[text]


def read_source(file: Path) -> bytes:
    """The bytes of a Python module's file, which may lie in a zip. Raises OSError or ImportError."""
    try:
        return file.read_bytes()
    except NotADirectoryError:
        return zipimporter(str(file.parent)).get_data(str(file))


def file_of(module_name: str) -> Path | None:
    """The file of a Python module; of one that is not imported, where it would be found, without importing anything."""
    if (module := sys.modules.get(module_name)) is not None:
        file = getattr(module, "__file__", None)
        if file is None and module_name == "__main__":
            return cells_file.get()
        return Path(file) if isinstance(file, str) else None
    from aotc.reads.module_specs import spec_of

    spec = spec_of(module_name)
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def public_name(module_name: str) -> str:
    """The module's name as others import it: a script's is its file's, and so is that of a file whose own name another
    module had, for which the manifest's reader made one up, with a digest in it."""
    file = file_of(module_name) if module_name in sys.modules else None
    stem = file.stem if file is not None else ""
    head, _, digest = module_name.rpartition("_")
    made_up = stem and (module_name == "__main__" or (head.endswith(stem) and len(digest) == 8))
    return stem if made_up else module_name


def is_installed(file: Path) -> bool:
    """Whether a file is an installed package's: in `site-packages`, or where `pip install --target` has put it."""
    if not {"site-packages", "dist-packages"}.isdisjoint(file.parts):
        return True
    folder = next((folder for folder in file.parents if str(folder) in sys.path), None)
    return folder is not None and file.relative_to(folder).parts[0] in _installed_into(folder)


@functools.cache
def _installed_into(folder: Path) -> frozenset[str]:
    """The names in a folder of `sys.path` that pip's records there list."""
    lines = [line for file in folder.glob("*.dist-info/RECORD") for line in file.read_bytes().splitlines()]
    return frozenset(line.partition(b",")[0].partition(b"/")[0].decode(errors="replace") for line in lines)
