"""Where compilers have their caches, and which files in them are worth keeping."""

from __future__ import annotations

import getpass
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from aotc.errors import StoreError
from aotc.store.files.disk import typed_errors
from aotc.store.layout.compiler_cache import KINDS, MOST_FOLDERS, USUAL
from aotc.store.layout.names import file_name_flaw

VARIABLES = {
    "inductor": "TORCHINDUCTOR_CACHE_DIR",
    "triton": "TRITON_CACHE_DIR",
    "vllm": "VLLM_CACHE_ROOT",
    "flashinfer": "FLASHINFER_WORKSPACE_BASE",
    "deepgemm": "DG_JIT_CACHE_DIR",
    "tilelang": "TILELANG_CACHE_DIR",
    "cutedsl": "CUTE_DSL_CACHE_DIR",
    "helion": "HELION_CACHE_DIR",
    "computecache": "CUDA_CACHE_PATH",
}
"""The variable that names the folder of each cache."""

_HOMES = {
    "flashinfer": "~",  # flashinfer/jit/env.py
    "deepgemm": "~/.deep_gemm",  # csrc/jit/compiler.hpp
    "tilelang": "~/.tilelang/cache",  # tilelang/env.py
    "computecache": "~/.nv/ComputeCache",  # CUDA programming guide, environment variables
}

_TOPS = {
    "vllm": ("torch_compile_cache", "torch_aot_compile", "modelinfos"),
    "flashinfer": (".cache/flashinfer",),
    "deepgemm": ("cache",),
}
"""The folders that hold compiled code, where others beside them do not: vLLM keeps downloads and statistics there, too,
DeepGEMM what it is about to rename, and FlashInfer's variable names a home."""

_PASSING = re.compile(
    r"locks?|.*\.lock|tmp|tmp\.pid_.*|\..*\.tmp|\.tmp-.*|__pycache__|precompiled_headers|cubins|"
    r"tmp\.[0-9a-f]{8}-[0-9a-f-]{27}"
)
"""Names of files and folders that only serve the processes that are running, or the next compile. Digests are names,
too, and may begin with `tmp`."""

GROUP = "__grp__"
"""Triton begins the names of files that hold paths so: `{"child_paths": {name: absolute path}}`."""

_LAST = (GROUP, ".cache_ready")
"""Files that say that others are complete: they are written after those."""


def cache_folders(given: Sequence[str] = ()) -> dict[str, Path]:
    """The folder of each cache in `given`, texts like `triton` and `inductor=FOLDER`; by default, of those in `USUAL`.

    Without a folder, it is where the compiler would look for its cache in this process. Raises StoreError.
    """
    folders: dict[str, Path] = {}
    for text in given or USUAL:
        kind, _, folder = text.partition("=")
        if kind not in KINDS:
            raise StoreError(f"{kind!r} is not a cache", hint=f"there are {', '.join(KINDS)}")
        try:
            folders[kind] = Path(folder or _default(kind)).expanduser().absolute()
        except RuntimeError as error:  # this user has no home
            if given:
                raise StoreError(str(error), hint=f"name the folder: --cache {kind}=FOLDER; or set HOME") from error
    return folders


def _default(kind: str) -> str:
    set_here = os.environ.get
    if kind == "inductor":  # torch/_inductor/runtime/cache_dir_utils.py
        return set_here(VARIABLES[kind]) or str(
            Path(tempfile.gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", _user()))
        )
    if kind == "triton":  # triton/knobs.py, and triton/runtime/cache.py before 3.4
        return set_here(VARIABLES[kind], "").strip() or str(Path(set_here("TRITON_HOME", "~")) / ".triton" / "cache")
    if kind == "vllm":  # vllm/envs.py
        return set_here(VARIABLES[kind]) or str(Path(set_here("XDG_CACHE_HOME") or "~/.cache") / "vllm")
    if kind == "cutedsl":  # cutlass/base_dsl/cache_helpers.py
        user = set_here("USER") or set_here("USERNAME") or _user()
        return set_here(VARIABLES[kind]) or str(Path(tempfile.gettempdir()) / user / "cutlass_python_cache")
    if kind == "helion":  # helion/autotuner/local_cache.py
        return set_here(VARIABLES[kind]) or str(Path(_default("inductor")) / "helion")
    return set_here(VARIABLES[kind]) or _HOMES[kind]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"


class KeptFiles(NamedTuple):
    """The files of a folder by their path within it, and how many were left out since they are links, pipes and the
    like, or have names that cannot be kept."""

    files: list[str]
    odd: int


def files_worth_keeping(kind: str, folder: Path) -> KeptFiles:
    """In the order in which they are to be written. Links are not followed. Raises StoreError."""
    files: list[str] = []
    odd = 0
    tops = [folder / name for name in _TOPS.get(kind, ("",))]
    for entry in (entry for top in tops if top.is_dir() for entry in _walk(top)):
        path = Path(entry.path).relative_to(folder)
        keeps = len(path.parts) <= MOST_FOLDERS and not any(map(file_name_flaw, path.parts))
        if entry.is_file(follow_symlinks=False) and keeps:
            files.append(path.as_posix())
        else:
            odd += 1
    return KeptFiles(sorted(files, key=lambda path: (path.rpartition("/")[2].startswith(_LAST), path)), odd)


def _walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All entries of a folder and its subfolders, except folders."""
    with typed_errors("look into", folder), os.scandir(folder) as entries:
        for entry in entries:
            if _PASSING.fullmatch(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))
            else:
                yield entry


def without_paths(name: str, data: bytes) -> bytes:
    """A file as it is kept: a group file of Triton names its children, and no place of theirs."""
    return _regrouped(data, lambda child: child) if name.startswith(GROUP) else data


def with_paths(name: str, data: bytes, folder: Path) -> bytes:
    """A file as it is written to `folder`: a group file of Triton names its children there."""
    return _regrouped(data, lambda child: str(folder / child)) if name.startswith(GROUP) else data


def _regrouped(data: bytes, place: Callable[[str], str]) -> bytes:
    try:
        children = json.loads(data)["child_paths"]
        names = [child for child in children if not file_name_flaw(child)]
    except (ValueError, KeyError, TypeError, RecursionError):
        return data
    return json.dumps({"child_paths": {name: place(name) for name in names}}, sort_keys=True).encode()
