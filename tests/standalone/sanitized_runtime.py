"""Builds of the runtime with sanitizers of gcc, in a copy of the package; the process preloads their libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest
from processes import ROOT


def preloaded(*names: str) -> str:
    """`LD_PRELOAD` with these libraries of the compiler's, like `asan`. Skips the test where it has none."""
    found = [subprocess.check_output(["g++", f"-print-file-name=lib{name}.so"], text=True).strip() for name in names]
    if not all(map(os.path.isabs, found)):
        pytest.skip("this g++ has no sanitizers")
    return " ".join(found)


def sanitized_copy(folder: Path, sanitizers: str) -> None:
    """The package in `folder`, its runtime built with `-fsanitize=`."""
    shutil.copytree(ROOT / "aotc", folder / "aotc", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    (built,) = [each for each in modules if each["name"] == "aotc.core._cpu"]
    options = [*built["extra-compile-args"], "-O0", "-g1", f"-fsanitize={sanitizers}", "-shared", "-fPIC"]
    made = ["-I", sysconfig.get_path("include"), "-o", folder / "aotc" / "core" / "_cpu.abi3.so"]
    subprocess.run(["g++", *options, *built["sources"], *made, *built["extra-link-args"]], cwd=ROOT, check=True)
