"""A build's folder and its process's addresses stay out of the code: equal builds give equal bytes anywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.store.compile_cache import FOLDER

PATCH = Patch(
    __name__,
    kind="determinism",
    targets=(
        "torch._inductor.codecache:write(content, extension)",
        "torch._inductor.codecache:get_hash(content, extra, hash_type)",
        "torch._inductor.cpp_builder:CppBuilder.get_command_line()",
    ),
)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")


@contextmanager
def apply() -> Iterator[None]:
    """While active, generated names and compiled code contain neither the cache folder's path nor objects'
    addresses."""
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import CppBuilder

    cache = str(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    with (
        replaced(codecache, "write", _without_addresses(codecache.write)),
        replaced(codecache, "get_hash", _without(cache, codecache.get_hash)),
        replaced(CppBuilder, "get_command_line", _mapped(cache, CppBuilder.get_command_line)),
    ):
        yield


def _without(cache: str, get_hash: Callable[..., str]) -> Callable[..., str]:
    """Leave the folder out of the hash of a generated file, which is of its text and the compiler's command."""

    def hashed(content: str | bytes, extra: str = "", hash_type: str = "code") -> str:
        if isinstance(content, str):
            content = content.replace(cache, FOLDER)
        return get_hash(content, extra.replace(cache, FOLDER), hash_type)

    return hashed


def _without_addresses(write: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out addresses: generated checks name a tensor's operator, which may be `<function f at 0x7f…>`."""

    def written(content: str | bytes, *args: Any, **kwargs: Any) -> Any:
        return write(_ADDRESS.sub("", content) if isinstance(content, str) else content, *args, **kwargs)

    return written


def _mapped(cache: str, command_of: Callable[[Any], str]) -> Callable[[Any], str]:
    """Map the folder in commands that contain it; others stay, since Inductor shares precompiled headers among them."""

    def command(self: Any) -> str:
        line = command_of(self)
        return f"{line} -ffile-prefix-map={cache}={FOLDER}" if cache in line else line

    return command
