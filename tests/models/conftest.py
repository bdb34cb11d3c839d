"""The operators and the library models, built once per session."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import filelock
import pytest
from built_models import FOLDER, LIBRARY, OPERATORS, Built, build
from torch.utils import cpp_extension


@pytest.fixture(scope="session")
def library_models(shared_folder: Path) -> Built:
    """The models of tests/models/tiny.yaml."""
    pytest.importorskip("transformers")
    built = build(shared_folder, FOLDER / "tiny.yaml", {}, LIBRARY)
    assert built.report["bundles"].keys() == {"bert", "bert-by-regions", "llm", "t5"}, built.report
    return built


@pytest.fixture(scope="session")
def operators(shared_folder: Path) -> Built:
    """The models of tests/models/operators, whose extension is compiled first."""
    library = shared_folder / "libacme_ops.so"
    with filelock.FileLock(library.with_suffix(".lock")):
        if not library.exists():
            includes = [f"-I{path}" for path in cpp_extension.include_paths()]
            links = [f"-L{path}" for path in cpp_extension.library_paths()]
            flags = ["-std=c++20", "-O0", "-shared", "-fPIC"]
            compiler = os.environ.get("CXX", "g++")
            source = OPERATORS / "acme_ops.cpp"
            libraries = ["-ltorch_cpu", "-lc10"]
            subprocess.run([compiler, *flags, *includes, source, *links, *libraries, "-o", library], check=True)
    return build(shared_folder, OPERATORS / "manifest.yaml", {"ACME_OPS": str(library)})
