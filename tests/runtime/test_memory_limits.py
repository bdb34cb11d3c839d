"""A limit on memory: what a load may not have is said with both values, and nothing asks for more than it uses."""

from __future__ import annotations

import errno
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python
from safetensors import safe_open
from safetensors.torch import save_file

import aotc
from aotc.runtime.checkpoints.checkpoint_files import open_weights
from aotc.runtime.memory_errors import tells_of_memory
from aotc.store.files.disk import read_limited

MIB = 1 << 20

LIMITED = """
import resource, sys
from pathlib import Path
import aotc, aotc.runtime.memory_errors, torch
from examples.models import transformer_block
from aotc.runtime.checkpoints.checkpoint_files import open_weights
module = transformer_block(width=256, heads=4).eval()
def limit(mib):
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + int(mib * 2**20), resource.RLIM_INFINITY))
"""


def test_a_load_under_a_limit_says_what_it_has_and_what_it_may_have(quickstart_store: Path, tmp_path: Path) -> None:
    """Less than the index's own limit of 64 MiB is enough for a store whose index has 1 KB."""
    code = f"""{LIMITED}
from safetensors.torch import save_file
ref, weights = {str(quickstart_store)!r} + "#quickstart", {str(tmp_path / "weights.safetensors")!r}
save_file(module.state_dict(), weights)
aotc.load(ref, weights=weights)  # whatever is imported later is
limit(0)
try:
    aotc.load(ref, weights=weights)
except aotc.MemoryLimitError as error:
    assert isinstance(error, MemoryError)
    assert error.used <= error.limit == resource.getrlimit(resource.RLIMIT_AS)[0], error.fields
    assert f"{{error.limit / 2**20:.1f}} MiB" in error.message
    assert "ulimit -v" in error.hint
    limit(24)
    aotc.load(ref, weights=weights)
    print("loaded")
"""
    assert run_python(code).split() == ["loaded"]


def test_a_checkpoint_is_mapped_once(tmp_path: Path) -> None:
    file = tmp_path / "sparse.safetensors"
    header = json.dumps({"a": {"dtype": "U8", "shape": [96 * MIB], "data_offsets": [0, 96 * MIB]}}).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + 96 * MIB)
    code = f"""{LIMITED}
open_weights({str(file)!r}).read("a")
limit(48)
try:
    aotc.runtime.memory_errors.tells_of_memory(open_weights)({str(file)!r})
except aotc.MemoryLimitError as error:
    print(error.asked == Path({str(file)!r}).stat().st_size, "96.0 MiB were asked for" in error.message)
limit(144)
print(open_weights({str(file)!r}).read("a").shape)
"""
    assert run_python(code).splitlines() == ["True True", "torch.Size([100663296])"]


@pytest.mark.parametrize(
    ("cause", "asked"),
    [
        (MemoryError(), None),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), None),
        (RuntimeError("unable to mmap 3160088 bytes from file <w>: Cannot allocate memory (12)"), 3160088),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), 4096),
        (OSError("libx.so: cannot map zero-fill pages: Cannot allocate memory"), None),
    ],
)
def test_each_way_to_lack_memory_is_one_error(cause: Exception, asked: int | None) -> None:
    @tells_of_memory
    def load() -> None:
        raise aotc.LibraryError("the library cannot be opened") from cause

    with pytest.raises(aotc.MemoryLimitError) as caught:
        load()
    assert caught.value.asked == asked
    assert caught.value.used < caught.value.limit
    assert f"{caught.value.used / MIB:.1f} MiB" in caught.value.message


@pytest.mark.parametrize("cause", [OSError(errno.ENOENT, "No such file"), ValueError("memory"), aotc.BindError("no")])
def test_other_errors_stay_what_they_are(cause: Exception) -> None:
    @tells_of_memory
    def load() -> None:
        raise cause

    with pytest.raises(type(cause)) as caught:
        load()
    assert caught.value is cause


def test_reading_a_small_file_asks_for_no_more_than_it_has(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(b"x" * 1024)
    tracemalloc.start()
    try:
        assert len(read_limited(tmp_path / "index.json", 64 * MIB)) == 1024
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    with pytest.raises(aotc.CorruptError):
        read_limited(tmp_path / "index.json", 1023)


def test_tensors_of_every_dtype_are_those_that_safetensors_reads(tmp_path: Path) -> None:
    names = ("bool", "uint8", "int8", "uint16", "int64", "float16", "bfloat16", "float64", "complex64", "float8_e4m3fn")
    given = {name: torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]]).to(getattr(torch, name)) for name in names}
    given |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    save_file(given, tmp_path / "all.safetensors")
    ours = open_weights(tmp_path / "all.safetensors")
    with safe_open(tmp_path / "all.safetensors", "pt") as theirs:
        assert {*ours.forms} == {*theirs.keys()}
        for name in ours.forms:
            mine, other = ours.read(name), theirs.get_tensor(name)
            assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
            assert mine.tolist() == other.tolist()


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _file(header: Any, data: int = 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "shorter than its first eight bytes": lambda: b"\x01",
    "a header longer than the file": lambda: _file({"a": ONE}, length=1 << 62),
    "no JSON": lambda: _file(b"{'a'"),
    "cut": lambda: _file({"a": ONE}, data=7),
    "bytes of no tensor at the end": lambda: _file({"a": ONE}, data=9),
    "two tensors on the same bytes": lambda: _file({"a": ONE, "b": ONE}),
    "a hole between tensors": lambda: _file({"a": ONE, "b": {**ONE, "data_offsets": [9, 17]}}, data=17),
    "offsets in the wrong order": lambda: _file({"a": {**ONE, "data_offsets": [8, 0]}}, data=0),
    "a negative size": lambda: _file({"a": {**ONE, "shape": [-2]}}),
    "metadata that is not a mapping of texts": lambda: _file({"__metadata__": {"a": 1}, "a": ONE}),
}


@pytest.mark.parametrize("flaw", HOSTILE)
def test_a_file_of_another_form_is_refused(flaw: str, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(HOSTILE[flaw]())
    with pytest.raises(aotc.BindError, match="cannot be read as safetensors"):
        open_weights(tmp_path / "a.safetensors")


@pytest.mark.parametrize("entry", [{**ONE, "shape": [3]}, {**ONE, "dtype": "F99"}])
def test_a_tensor_with_more_values_than_bytes_or_an_unknown_dtype_is_not_made(
    entry: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "a.safetensors").write_bytes(_file({"a": entry}))
    with pytest.raises(aotc.BindError, match="cannot be read as safetensors"):
        open_weights(tmp_path / "a.safetensors").read("a")
