"""Receipts of restored caches: what a start used, what it wrote, and which compilers ran."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import environment, finish, run_aotc, run_python, start
from test_compiler_caches import GPU, ORIGIN, REF, fill

from aotc.errors import CorruptError, NotFoundError, StoreError
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.tools.caches.origin import HEADERS
from aotc.tools.caches.receipt import REQUIREMENTS, Receipt, begin, read
from aotc.tools.caches.restore import cache_of, restore
from aotc.tools.caches.save import save

assert GPU


@pytest.fixture
def begun(store: Store, tmp_path: Path) -> dict[str, str]:
    """A restored cache of three files, beside one that was there; the variables of a program that is watched."""
    first = {"inductor": tmp_path / "first"}
    fill(first["inductor"], {"a/used.so": "ELF", "a/read.py": "1", "b/idle": "2"})
    save(store, REF, first, ORIGIN)
    folders = {"inductor": tmp_path / "fresh"}
    fill(folders["inductor"], {"b/mine": "before"})
    bundle = read_bundle(store, REF)
    restore(store, bundle, folders, ORIGIN)
    return begin(tmp_path / "receipt", cache_of(store, bundle), folders)


def after(tmp_path: Path, code: str, variables: dict[str, str], **more: str) -> Receipt:
    paths = os.pathsep.join((variables["PYTHONPATH"], environment()["PYTHONPATH"]))
    ran = finish(start("-c", code, cwd=tmp_path / "fresh", **{**variables, "PYTHONPATH": paths, **more}))
    assert ran.returncode == 0, ran.stderr
    return read(tmp_path / "receipt")


def names(paths: tuple[str, ...], tmp_path: Path) -> list[str]:
    return [str(Path(path).relative_to(tmp_path / "fresh")) for path in paths]


def test_what_is_opened_mapped_written_and_replaced_is_told_apart(begun: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import ctypes, pathlib, mmap\n"
        "open('b/mine').read()\n"
        "open('new', 'w').write('x')\n"
        "file = open('a/read.py')\n"
        "pathlib.Path('a/used.so').unlink(), pathlib.Path('a/used.so').write_text('other')\n"
    )
    found = after(tmp_path, code, begun)
    assert (found.restored, found.processes) == (3, 1)
    assert names(found.used, tmp_path) == ["a/read.py"]
    assert names(found.written, tmp_path) == ["new"]
    assert names(found.replaced, tmp_path) == ["a/used.so"]
    assert [flaw.where.rpartition("/")[2] for flaw in found.flaws(["used"])] == ["new", "used.so"]
    assert [flaw.where.rpartition("/")[2] for flaw in found.flaws(["no-compiler"])] == ["used.so"]


def test_what_c_maps_and_what_children_open_is_used(begun: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import mmap, os, subprocess, sys\n"
        "descriptor = os.open('a/used.so', os.O_RDWR)\n"  # not a look at it
        "kept = mmap.mmap(descriptor, 3, mmap.MAP_SHARED)\n"
        "subprocess.run([sys.executable, '-c', 'open(\"a/read.py\")'], check=True)\n"
        "if not os.fork():\n"
        "    open('b/idle')\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    found = after(tmp_path, code, begun)
    assert names(found.used, tmp_path) == ["a/read.py", "a/used.so", "b/idle"]
    assert found.processes == 2
    assert found.flaws(REQUIREMENTS) == []


def test_a_compiler_is_named_with_its_source_and_may_be_refused(begun: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "x.cpp").write_text("int x;")
    compiling = "import subprocess; subprocess.run(['g++', '-c', '-o', '/dev/null', '../x.cpp'], check=True)"
    asking = "import subprocess; subprocess.run(['g++', '--version'], check=True, capture_output=True)"
    assert after(tmp_path, asking, begun).compilers == ()
    (ran,) = after(tmp_path, compiling, begun).compilers
    assert (ran.compiler, ran.sources) == ("g++", ("../x.cpp",))
    refused = finish(
        start("-c", compiling, cwd=tmp_path / "fresh", PYTHONPATH=begun["PYTHONPATH"], AOTC_NO_COMPILER="1")
    )
    assert refused.returncode == 1
    assert "RuntimeError: g++ was started for ../x.cpp" in refused.stderr


def test_a_process_that_runs_can_be_watched_once(begun: dict[str, str], tmp_path: Path) -> None:
    code = (
        "from aotc.tools.caches.receipt import watch_this_process\n"
        "open('b/idle').read()\n"
        "watch_this_process(), watch_this_process()\n"
        "open('a/read.py').read()\n"
        "import os, pathlib\n"
        "from aotc.tools.caches.receipt import read\n"
        "assert len(read(pathlib.Path(os.environ['AOTC_RECEIPT'])).used) == 1\n"  # the others count as unused
    )
    unwatched = {"AOTC_RECEIPT": begun["AOTC_RECEIPT"], "PYTHONPATH": environment()["PYTHONPATH"]}
    ran = finish(start("-c", code, cwd=tmp_path / "fresh", **unwatched))
    assert ran.returncode == 0, ran.stderr
    found = read(tmp_path / "receipt")
    assert (names(found.used, tmp_path), found.processes) == (["a/read.py"], 1)


def test_the_module_that_it_hides_is_run(begun: dict[str, str], tmp_path: Path) -> None:
    fill(tmp_path / "theirs", {"sitecustomize.py": "print('theirs')"})
    paths = os.pathsep.join((begun["PYTHONPATH"], str(tmp_path / "theirs")))
    assert run_python("import sys; print(sys.modules['sitecustomize'].__file__)", **{**begun, "PYTHONPATH": paths}) == (
        f"theirs\n{tmp_path}/theirs/sitecustomize.py\n"
    )
    lost = finish(start("-c", "", PYTHONPATH=begun["PYTHONPATH"], AOTC_RECEIPT=str(tmp_path / "none")))
    assert lost.returncode == 0 and "nothing can be written down there" in lost.stderr


def test_of_a_program_that_is_not_watched_only_what_it_wrote_is_known(begun: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "fresh" / "new").write_text("x")
    found = read(tmp_path / "receipt")
    assert names(found.written, tmp_path) == ["new"]
    assert "no process wrote down" in found.flaws(["no-compiler"])[0].message


def test_compiled_code_that_was_not_restored_had_a_compiler() -> None:
    """FlashInfer's is started by ninja, of which Python is told nothing."""
    found = Receipt(3, ("/c/a.cu",), ("/c/new.cubin",), ("/c/a.cu.o", "/c/.ninja_log"), (), 1)
    assert [issue.where for issue in found.flaws(["no-compiler"])] == ["/c/new.cubin", "/c/a.cu.o"]


def test_a_folder_without_a_receipt_and_a_broken_one_are_refused(begun: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no receipt"):
        read(tmp_path)
    (tmp_path / "receipt" / "log").write_text("{")
    with pytest.raises(CorruptError, match="cannot be read"):
        read(tmp_path / "receipt")


def test_only_what_a_start_used_is_kept(begun: dict[str, str], store: Store, tmp_path: Path) -> None:
    folders = {"inductor": tmp_path / "fresh"}
    found = after(tmp_path, "open('a/used.so'), open('b/mine')", begun)
    save(store, REF, folders, ORIGIN, found)
    assert [file.path for file in cache_of(store, read_bundle(store, REF)).files] == ["a/used.so"]
    (tmp_path / "fresh" / "new").write_text("x")
    with pytest.raises(StoreError, match="of a start that compiled"):
        save(store, REF, folders, ORIGIN, read(tmp_path / "receipt"))


def test_a_receipt_of_a_load_that_failed_is_refused(begun: dict[str, str], store: Store, tmp_path: Path) -> None:
    """A program that cannot take a file writes it anew: what it used then is not what a start needs."""
    found = after(tmp_path, "open('a/used.so').read(); open('a/used.so', 'w').write('mine')", begun)
    with pytest.raises(StoreError, match="of a start that compiled") as error:
        save(store, REF, {"inductor": tmp_path / "fresh"}, ORIGIN, found)
    assert [issue.message for issue in error.value.issues] == ["was replaced"]


COMPILED = """
import torch
from torch._dynamo.utils import counters
with torch.no_grad():
    assert torch.compile(lambda x: (x.sin() + 1).softmax(-1))(torch.ones(4, 8)).shape == (4, 8)
print(counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.every_torch
def test_a_program_runs_from_a_cache_with_a_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch.compile. The first run finds no cache, and its own is saved after it. The second one, a fresh process
    with another folder, takes that code, and compiles and saves nothing. Once a library is lost, a compiler is told
    of."""
    monkeypatch.setenv(HEADERS, "0")
    program, store, away = tmp_path / "program.py", tmp_path / "store", tmp_path / "away"
    program.write_text(COMPILED)

    def run(caches: str, *options: str) -> Any:
        running: list[Any] = ["cache", "run", "sin:v1", "--store", store, *options]
        return run_aotc(*running, "--cache", f"inductor={tmp_path / caches}", "--", sys.executable, program)

    lacking = run("none")
    assert lacking.returncode == 2 and lacking.stdout == ""
    first = run("first", "--save")
    assert (first.returncode, first.stdout) == (0, "0\n"), first.stderr  # it prints its hits
    assert "saved " in first.stderr
    second = run("away", "--save", "--require", "used", "--require", "no-compiler")
    assert (second.returncode, second.stdout) == (0, "1\n"), second.stderr
    assert "0 written anew, 0 replaced, 0 compiles" in second.stderr
    assert "saved " not in second.stderr
    restored = ["cache", "restore", "sin:v1", "--store", store, "--cache", f"inductor={away}"]
    done = run_aotc(*restored, "--receipt", tmp_path / "receipt", "--json")
    variables = json.loads(done.stdout)["variables"]
    next(away.rglob("*.so")).unlink()
    paths = os.pathsep.join((variables["PYTHONPATH"], environment()["PYTHONPATH"]))
    run_python(COMPILED, **{**variables, "PYTHONPATH": paths}, TORCHINDUCTOR_CACHE_DIR=str(away))
    told = run_aotc("cache", "receipt", tmp_path / "receipt", "--require", "no-compiler")
    assert told.returncode == 1
    assert "1 compile" in told.stdout and ".cpp" in told.stderr
