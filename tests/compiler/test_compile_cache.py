"""The cache of compiled files: made once, checked each time, and never what a build depends on."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aotc.digest import sha256_json
from aotc.errors import StoreError
from aotc.store.compile_cache import UNUSED_DAYS, VERSION, CompileCache

KEY, OTHER = sha256_json("one"), sha256_json("another")


class Compiler:
    """Makes a file of `content`, and counts how often."""

    def __init__(self, content: bytes = b"compiled") -> None:
        self.content, self.calls = content, 0

    def __call__(self, destination: Path) -> None:
        self.calls += 1
        destination.write_bytes(self.content)


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "cache")


@pytest.fixture
def compile() -> Compiler:
    return Compiler()


def stored(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache" / VERSION).glob("*/*") if not path.name.startswith(".")]


def test_a_file_is_made_once_and_given_out_with_the_same_bytes(
    cache: CompileCache, compile: Compiler, tmp_path: Path
) -> None:
    assert cache.get(KEY) is None
    assert not cache.fetch(KEY, tmp_path / "first", compile)
    assert CompileCache(tmp_path / "cache").fetch(KEY, tmp_path / "second", compile)
    assert (tmp_path / "second").read_bytes() == (tmp_path / "first").read_bytes() == compile.content
    assert not cache.fetch(OTHER, tmp_path / "other", compile)
    assert compile.calls == 2


def test_whoever_asks_while_it_is_made_waits_for_it(cache: CompileCache, tmp_path: Path) -> None:
    both, calls = threading.Barrier(2), []

    def slowly(destination: Path) -> None:
        calls.append(destination)
        time.sleep(0.5)
        destination.write_bytes(b"compiled")

    def ask(name: str) -> bytes:
        both.wait(60)
        CompileCache(tmp_path / "cache").fetch(KEY, tmp_path / name, slowly)
        return (tmp_path / name).read_bytes()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, ("a", "b"))) == [b"compiled", b"compiled"]
    assert len(calls) == 1


@pytest.mark.parametrize("damage", [b"", b"compileX", b"compiled and more"])
def test_a_damaged_file_is_made_again(cache: CompileCache, compile: Compiler, tmp_path: Path, damage: bytes) -> None:
    cache.fetch(KEY, tmp_path / "first", compile)
    (path,) = stored(tmp_path)
    path.chmod(0o600)
    path.write_bytes(damage)
    assert not cache.fetch(KEY, tmp_path / "second", compile)
    assert (tmp_path / "second").read_bytes() == compile.content
    assert cache.fetch(KEY, tmp_path / "third", compile)


def test_what_a_killed_process_left_half_written_is_not_given_out(
    cache: CompileCache, compile: Compiler, tmp_path: Path
) -> None:
    entry = tmp_path / "cache" / VERSION / KEY.removeprefix("sha256:")
    entry.mkdir(parents=True)
    (entry / ".tmp-0123456789abcdef").write_bytes(b"comp")
    assert not cache.fetch(KEY, tmp_path / "first", compile)
    assert (tmp_path / "first").read_bytes() == compile.content


@pytest.mark.parametrize("kind", [RuntimeError, FileNotFoundError, StoreError])
def test_a_compile_that_fails_is_run_once_and_its_error_is_raised(
    cache: CompileCache, tmp_path: Path, kind: type[Exception]
) -> None:
    calls = []

    def fail(destination: Path) -> None:
        calls.append(destination)
        destination.write_bytes(b"half")
        raise kind("no such header")

    with pytest.raises(kind, match="no such header"):
        cache.fetch(KEY, tmp_path / "first", fail)
    assert not stored(tmp_path) and len(calls) == 1


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_is_not_used(
    cache: CompileCache, compile: Compiler, tmp_path: Path, mode: int
) -> None:
    cache.fetch(KEY, tmp_path / "first", compile)
    (tmp_path / "cache" / VERSION).chmod(mode)
    assert not cache.fetch(KEY, tmp_path / "second", compile)
    assert compile.calls == 2


def test_where_there_is_no_folder_the_file_is_made(compile: Compiler, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for name in ("first", "second"):
        assert not CompileCache(tmp_path / "file" / "cache").fetch(KEY, tmp_path / name, compile)
        assert (tmp_path / name).read_bytes() == compile.content


def test_what_was_long_unused_goes_when_something_is_added(
    cache: CompileCache, compile: Compiler, tmp_path: Path
) -> None:
    cache.fetch(KEY, tmp_path / "first", compile)
    cache.fetch(OTHER, tmp_path / "second", compile)
    for key, days in ((KEY, UNUSED_DAYS + 1), (OTHER, UNUSED_DAYS - 1)):
        then = time.time() - days * 86_400
        os.utime(tmp_path / "cache" / VERSION / key.removeprefix("sha256:"), (then, then))
    cache.fetch(sha256_json("a third"), tmp_path / "third", compile)
    assert (cache.get(KEY), cache.get(OTHER) is None) == (None, False)
