"""Equal builds give equal bytes wherever they run: keep a build's folder and a process's ids out of the code."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = "/aotc"
"""Replaces the build's cache folder in file names that are compiled in, as by `__FILE__` and assertions."""


@contextmanager
def repeatable_code() -> Iterator[None]:
    """While active, generated names and compiled code contain neither the cache folder's path nor objects'
    addresses."""
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import CppBuilder

    cache = str(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    with (
        mock.patch.object(codecache, "write", _without_addresses(codecache.write)),
        mock.patch.object(codecache, "get_hash", _without(cache, codecache.get_hash)),
        mock.patch.object(CppBuilder, "get_command_line", _mapped(cache, CppBuilder.get_command_line)),
    ):
        yield


def cubins_are_linked_by_name() -> AbstractContextManager[Any]:
    """While active, the object file of a GPU kernel does not depend on its folder."""
    from torch._inductor import codecache

    return mock.patch.object(codecache, "convert_cubin_to_obj", _object_of_cubin)


def arrays_are_found_by_writer() -> AbstractContextManager[Any]:
    """While active, an array of integers is written once for each writer of code.

    torch 2.11 stores arrays by the id of a bound method, which lives for one call only: whether an id is reused is
    chance.
    """
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    array: Any = CppWrapperCpu.codegen_int_array_var
    writers: dict[int, Any] = {}

    def of_writer(self: Any, int_array: str, writeline: Any, *args: Any, **kwargs: Any) -> str:
        owner = getattr(writeline, "__self__", writeline)
        return str(array(self, int_array, writers.setdefault(id(owner), writeline), *args, **kwargs))

    return mock.patch.object(CppWrapperCpu, "codegen_int_array_var", of_writer)


def _without(cache: str, get_hash: Callable[..., str]) -> Callable[..., str]:
    """Leave the folder out of the hash of a generated file, which is of its text and the compiler's command."""

    def hashed(content: str | bytes, extra: str = "", hash_type: str = "code") -> str:
        if isinstance(content, str):
            content = content.replace(cache, FOLDER)
        return get_hash(content, extra.replace(cache, FOLDER), hash_type)

    return hashed


_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")


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


def _object_of_cubin(cubin_file: str, kernel_name: str, ld: str, objcopy: str) -> str:
    """As Inductor's, but run in the file's folder: the linker names and orders symbols by the path on its command line.

    Source: `torch._inductor.cpp_builder.convert_cubin_to_obj`.
    """
    cubin = Path(cubin_file)
    made = f"{cubin.name}.o"
    name = re.sub(r"\W", "_", cubin.name)
    symbols = [f"--redefine-sym=_binary_{name}_{end}=__{kernel_name}_{end}" for end in ("start", "end", "size")]
    for command in (
        [*ld.split(), "-r", "-b", "binary", "-z", "noexecstack", "-o", made, cubin.name],
        [*objcopy.split(), "--rename-section", ".data=.rodata,alloc,load,readonly,data,contents", made],
        [*objcopy.split(), *symbols, made],
    ):
        subprocess.run(command, cwd=cubin.parent, capture_output=True, text=True, check=True)
    return str(cubin.with_name(made))
