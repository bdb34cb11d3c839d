"""Activate the modules of this package for the compilers of one unit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aotc.compiler.toolchain.parallel_compile import compiling_side_by_side
from aotc.compiler.toolchain.precompiled_headers import PrecompiledHeaders, kernels_with
from aotc.compiler.toolchain.wrapper_split import expected_wrapper
from aotc.store.compile_cache import CompileCache


@contextmanager
def unit_toolchain(options: Mapping[str, Any], device: str, shared: Path | None, precompile: bool) -> Iterator[None]:
    """While active, Inductor's C++ compiles go through this package; the code stays the same.

    The units of a build may share a folder:

    shared/
    ├── common/      the part of the wrapper that is the same in every library (`wrapper_split`)
    └── headers/     with `precompile`: torch's headers (`precompiled_headers`)
    """
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    headers = PrecompiledHeaders(shared / "headers") if shared and precompile else None
    with (
        kernels_with(headers),
        compiling_side_by_side(
            expected=lambda: expected_wrapper(options, device, cache),
            shared=CompileCache(shared / "common") if shared else None,
            headers=headers,
        ),
    ):
        yield
