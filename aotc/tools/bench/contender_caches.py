"""Separate caches of compiled code for each contender. Settings, the home folder and the caches of downloaded models
stay the user's."""

from __future__ import annotations

from pathlib import Path

from aotc.machine.processes import child_environment

FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "PYTORCH_KERNEL_CACHE_PATH": "kernels",
    "AOTC_CACHE_DIR": "aotc",
    "TMPDIR": "tmp",  # where Inductor keeps precompiled headers
}
"""Environment variables that name a folder of compiled code, and our folder for each."""
_REMOTE = (
    "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE",
    "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE",
    "TORCHINDUCTOR_BUNDLED_AUTOTUNE_REMOTE_CACHE",
)


def own_caches(folder: Path) -> dict[str, str]:
    """The environment of a process whose caches of compiled code are all in `folder`, which is created."""
    for name in FOLDERS.values():
        (folder / name).mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in child_environment().items() if name not in _REMOTE}
    return {**kept, **{variable: str(folder / name) for variable, name in FOLDERS.items()}}
