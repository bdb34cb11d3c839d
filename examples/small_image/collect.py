"""Collect the root of an image from scratch: this Python, its standard library, and the libraries that they need.

    python collect.py ROOT PATH...

Each PATH, a file or a folder, is copied to `ROOT/app`. Shared libraries are those that `ldd` names for all of it, and
lie in ROOT where they lie here. It runs where the image's Python is, as in a stage of its Dockerfile.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

NOT_SERVED = (
    "test tests idlelib tkinter turtledemo ensurepip lib2to3 pydoc_data site-packages dist-packages config-* *.a"
)
"""Of the standard library: what no service imports."""
NOT_OPENED = "_tkinter* _curses* readline* nis* _test* _ctypes_test* xx*"
"""Extensions for terminals and desktops, and Python's own tests."""
OPTIMISED = "*.opt-?.pyc"
OURS = "libaotc.so"
"""It lies in an exported folder, and is open before the code that needs it."""


def libraries_of(paths: Iterable[Path]) -> set[Path]:
    """The shared libraries that these files need, by the names at which they are looked for."""
    shown = subprocess.run(["ldd", *map(str, paths)], capture_output=True, text=True, check=False).stdout
    if missing := {*re.findall(r"^\s*(\S+) => not found$", shown, re.MULTILINE)} - {OURS}:
        raise SystemExit(f"these libraries are not here: {', '.join(sorted(missing))}")
    return {Path(path) for path in re.findall(r"(/\S+) \(0x", shown)}


def collect(root: Path, paths: Iterable[Path]) -> None:
    """Fill ROOT, which must not be there. `ROOT/python` is the interpreter."""
    library = Path(sysconfig.get_path("stdlib"))
    ignored = shutil.ignore_patterns(*NOT_SERVED.split(), *NOT_OPENED.split(), OPTIMISED)
    shutil.copytree(library, root / library.relative_to("/"), ignore=ignored, symlinks=True)
    python = Path(sys.executable).resolve()
    (here := root / python.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(python, here)
    (root / "python").symlink_to(python)
    (root / "etc").mkdir()
    shutil.copy2("/etc/ld.so.cache", root / "etc")  # where libraries lie
    (app := root / "app").mkdir()
    for path in paths:
        shutil.copytree(path, app / path.name) if path.is_dir() else shutil.copy2(path, app)
    opened = [path for folder in (root / library.relative_to("/"), app) for path in folder.rglob("*.so*")]
    for path in libraries_of([python, *opened]):
        (there := root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
        if not there.exists() and not path.is_relative_to(root.resolve()):
            shutil.copy2(path.resolve(), there)


if __name__ == "__main__":
    collect(Path(sys.argv[1]), map(Path, sys.argv[2:]))
