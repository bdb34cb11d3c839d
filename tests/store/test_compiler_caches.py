"""`aotc cache save` and `restore`: what is kept of a compiler's folder, for whom it fits, and what is never written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from registry_server import RegistryServer, needs
from signing import key_by_openssl, needs_openssl, private_key
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import aotc
from aotc.cli import main
from aotc.digest import sha256_bytes
from aotc.errors import AotcError, CorruptError, EnvironmentMismatchError, NotFoundError, StoreError
from aotc.records import Environment
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.compiler_cache import BUILT_BY_NINJA, CachedFile, CompilerCache, publish_cache, read_cache
from aotc.store.layout.store import Store
from aotc.store.maintenance.fsck import fsck
from aotc.store.reference import Reference, parse_reference
from aotc.store.signing.release import sign_release
from aotc.tools.caches.folders import cache_folders
from aotc.tools.caches.origin import HEADERS, Origin, this_origin, variable_rules
from aotc.tools.caches.restore import restore
from aotc.tools.caches.save import save

REF = Reference(None, "llm", tag="v1")
GPU = Environment(
    os="linux",
    machine="x86_64",
    torch="2.13.0+cu130",
    libc="2.36",
    cpu_features=("avx2", "avx512f"),
    cuda_capability="9.0",
    cuda="13.0",
    gpu="NVIDIA H100 80GB HBM3",
)
GRAPH = "artifact_compile_range_1_8192_subgraph_0"
ORIGIN = Origin(GPU, {"python": "cpython-312", "triton": "3.6.0", "vllm": "0.20.0"}, "commit-1", {"TRITON_DEBUG": "1"})


def fill(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which each compiler has left something, where its own variables put it."""
    home = tmp_path / "home"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(home / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "triton"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(home / "vllm"))
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("AOTC_STORE", "AOTC_TRUSTED_KEYS", "AOTC_SIGNED_AFTER"):
        monkeypatch.delenv(name, raising=False)
    group = {"child_paths": {"k.json": str(home / "triton/KEY/k.json"), "k.cubin": "/etc/passwd"}}
    fill(
        home / "inductor",
        {"fxgraph/ab/tmpdigest": "graph", "3g/code.so": "ELF", "locks/3g.lock": "", "3g/.tmp-1": "half"},
    )
    fill(home / "triton", {"KEY/k.json": "{}", "KEY/k.cubin": "cubin", "KEY/__grp__k.json": json.dumps(group)})
    fill(home / "triton", {"KEY/tmp.pid_7_x/k.cubin": "half", "KEY/lock": ""})
    fill(home / "vllm" / "torch_compile_cache" / "a1", {f"rank_0_0/backbone/{GRAPH}": "graph", ".cache_ready": ""})
    fill(home / "vllm", {"torch_aot_compile/b2/rank_0_0/model": "pickle", "assets/picture": "no code"})
    (home / "inductor" / "link").symlink_to("/etc/passwd")
    return home


@pytest.fixture
def saved(store: Store, home: Path) -> Store:
    save(store, REF, cache_folders(), ORIGIN)
    return store


def fresh(tmp_path: Path) -> dict[str, Path]:
    return {kind: tmp_path / "fresh" / kind for kind in ("inductor", "triton", "vllm")}


def cache_in(store: Store) -> CompilerCache:
    return read_cache(store, read_bundle(store, REF).artifacts[0])


def run(*arguments: object) -> tuple[int, str]:
    ran = CliRunner().invoke(main, list(map(str, arguments)))
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return ran.exit_code, ran.output


def test_a_restore_writes_what_compilers_left_and_no_more(saved: Store, tmp_path: Path) -> None:
    folders = fresh(tmp_path)
    restore(saved, read_bundle(saved, REF), folders, ORIGIN)
    written = {str(path.relative_to(tmp_path / "fresh")) for path in (tmp_path / "fresh").rglob("*") if path.is_file()}
    assert written == {
        *("inductor/fxgraph/ab/tmpdigest", "inductor/3g/code.so"),
        *("triton/KEY/k.json", "triton/KEY/k.cubin", "triton/KEY/__grp__k.json"),
        f"vllm/torch_compile_cache/a1/rank_0_0/backbone/{GRAPH}",
        *("vllm/torch_compile_cache/a1/.cache_ready", "vllm/torch_aot_compile/b2/rank_0_0/model"),
    }
    assert (folders["inductor"] / "3g/code.so").read_text() == "ELF"


def test_triton_finds_the_files_of_a_kernel_where_they_were_written(saved: Store, tmp_path: Path) -> None:
    """Its group files hold absolute paths, by which it would look in the home of the machine that saved them."""
    folders = fresh(tmp_path)
    restore(saved, read_bundle(saved, REF), folders, ORIGIN)
    kernel = folders["triton"] / "KEY"
    group = json.loads((kernel / "__grp__k.json").read_text())
    assert group == {"child_paths": {name: str(kernel / name) for name in ("k.json", "k.cubin")}}


@pytest.mark.every_torch
def test_triton_s_own_reader_finds_them(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = pytest.importorskip("triton.runtime.cache").FileCacheManager
    folders = fresh(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    made = {name: manager("KEY").put(data, name) for name, data in (("k.json", "{}"), ("k.cubin", b"code"))}
    manager("KEY").put_group("k.json", made)
    save(store, REF, cache_folders(["triton"]), ORIGIN)
    shutil.rmtree(tmp_path / "first")
    restore(store, read_bundle(store, REF), folders, ORIGIN)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folders["triton"]))
    found = manager("KEY").get_group("k.json")
    assert found == {name: str(folders["triton"] / "KEY" / name) for name in made}


def test_files_that_say_that_others_are_complete_come_last(saved: Store) -> None:
    paths = [file.path for file in cache_in(saved).files]
    assert paths.index("KEY/__grp__k.json") > paths.index("KEY/k.json")
    in_vllm = [file.path for file in cache_in(saved).files if file.kind == "vllm"]
    assert in_vllm[-1] == "torch_compile_cache/a1/.cache_ready"


def test_saving_equal_folders_again_gives_the_same_bundle(saved: Store, home: Path) -> None:
    before = read_bundle(saved, REF).digest
    (home / "inductor" / "locks" / "another.lock").touch()
    assert save(saved, REF, cache_folders(), ORIGIN).digest == before


def test_what_is_there_stays(saved: Store, tmp_path: Path) -> None:
    folders = fresh(tmp_path)
    fill(folders["inductor"], {"3g/code.so": "in use", "fxgraph/ab/tmpdigest": "graph"})
    done = restore(saved, read_bundle(saved, REF), {"inductor": folders["inductor"]}, ORIGIN)
    assert done["inductor"]._asdict() == {"written": 0, "equal": 1, "other": 1}
    assert (folders["inductor"] / "3g/code.so").read_text() == "in use"
    assert not folders["triton"].exists()


def test_the_folders_are_those_where_the_compilers_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/people/ann")
    monkeypatch.setenv("LOGNAME", "a/nn")
    found = {kind: str(folder) for kind, folder in cache_folders().items()}
    assert found == {
        "inductor": default_cache_dir(),
        "triton": "/people/ann/.triton/cache",
        "vllm": "/people/ann/.cache/vllm",
    }
    assert str(cache_folders(["triton=there"])["triton"]) == str(Path("there").absolute())
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(cache_folders(["vllm"])["vllm"]) == "/xdg/vllm"
    with pytest.raises(StoreError, match="'cuda' is not a cache"):
        cache_folders(["cuda"])


OTHERS = {
    "flashinfer": ("FLASHINFER_WORKSPACE_BASE", "/people/ann"),
    "deepgemm": ("DG_JIT_CACHE_DIR", "/people/ann/.deep_gemm"),
    "tilelang": ("TILELANG_CACHE_DIR", "/people/ann/.tilelang/cache"),
    "cutedsl": ("CUTE_DSL_CACHE_DIR", "/scratch/ann/cutlass_python_cache"),
    "helion": ("HELION_CACHE_DIR", "/inductor/helion"),
    "computecache": ("CUDA_CACHE_PATH", "/people/ann/.nv/ComputeCache"),
}
"""The variable of each, and its folder where that is not set."""


@pytest.mark.parametrize("kind", OTHERS)
def test_the_folders_of_libraries_are_those_of_their_sources(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, folder = OTHERS[kind]
    monkeypatch.delenv(variable, raising=False)
    for name, value in (("HOME", "/people/ann"), ("USER", "ann"), ("TORCHINDUCTOR_CACHE_DIR", "/inductor")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/scratch")
    assert str(cache_folders([kind])[kind]) == folder
    assert kind not in cache_folders()  # only where it is asked for
    monkeypatch.setenv(variable, "/elsewhere")
    assert str(cache_folders([kind])[kind]) == "/elsewhere"


LEFT = {
    "flashinfer": ((".cache/flashinfer/90a/cached_ops/norm/norm.so",), (".cache/flashinfer/cubins/a.cubin", ".bashrc")),
    "deepgemm": (("cache/kernel.gemm.0af3/kernel.cubin",), ("tmp/0b1c/kernel.cu",)),
    "tilelang": (("0af3/kernel_lib.so", "autotuner/0b/best_config.json"), ("tmp/half.cu",)),
    "cutedsl": (("0af3.mlir",), ("tmp.pid_7_ab/0af3.mlir",)),
    "helion": (("0af3.best_config", "triton/0/KEY/k.cubin"), ("tmp.0b1c2d3e-0000-4000-8000-000000000000",)),
    "computecache": (("0/a/0af3", "index"), ()),
}
"""Files of the form that their sources write: compiled code, and what is left out."""


@pytest.mark.parametrize("kind", LEFT)
def test_compiled_code_of_libraries_is_kept_for_their_version(kind: str, store: Store, tmp_path: Path) -> None:
    kept, others = LEFT[kind]
    fill(tmp_path / "left", dict.fromkeys((*kept, *others), "code"))
    here = with_package(**{kind: "1.0"})
    save(store, REF, {kind: tmp_path / "left"}, here)
    restore(store, read_bundle(store, REF), {kind: tmp_path / "fresh"}, here)
    found = [path for path in (tmp_path / "fresh").rglob("*") if path.is_file()]
    assert {path.relative_to(tmp_path / "fresh").as_posix() for path in found} == {*kept}
    with pytest.raises(EnvironmentMismatchError) as error:
        restore(store, read_bundle(store, REF), {kind: tmp_path / "other"}, with_package(**{kind: "1.1"}))
    (issue,) = error.value.issues
    assert (issue.expected, issue.actual) == ("1.0", "1.1")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", BUILT_BY_NINJA)
def test_ninja_has_nothing_to_do_in_a_restored_folder(kind: str, store: Store, tmp_path: Path) -> None:
    """At the path that it was saved from, since ninja compares commands, in which the path stands."""
    top = tmp_path / "base" / ".cache" / "flashinfer" / "90a"
    installed = tmp_path / "site-packages" / "kernels.cuh"
    fill(installed.parent, {installed.name: "installed"})
    build = f"""
rule copy
  command = cat $in > $out && printf '%s: %s %s\\n' $out {top / "header"} {installed} > $out.d
  depfile = $out.d
  deps = gcc
build {top / "code.so"}: copy {top / "source.cu"}
"""
    fill(top, {"source.cu": "source", "header": "header", "build.ninja": build})
    ninja = (sys.executable, "-m", "ninja", "-C", str(top))
    assert "no work" not in subprocess.run(ninja, capture_output=True, text=True, check=True).stdout
    here = with_package(**{kind: "1.0"})
    save(store, REF, {kind: tmp_path / "base"}, here)
    shutil.rmtree(tmp_path / "base")
    restore(store, read_bundle(store, REF), {kind: tmp_path / "base"}, here)
    assert "no work" in subprocess.run(ninja, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Fri Jan 24 2025\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (builder)\n",
    ],
)
def test_the_gpu_driver_is_the_version_of_its_cache(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr("aotc.tools.caches.origin._DRIVER", tmp_path / "version")
    assert this_origin().packages["computecache"] == "570.86.15"


@pytest.mark.parametrize(("there", "here"), [("", ""), ("", "570.1"), ("570.1", "")])
def test_a_driver_that_is_not_known_fits_none(there: str, here: str, store: Store, tmp_path: Path) -> None:
    fill(tmp_path / "left", {"index": "code"})
    save(store, REF, {"computecache": tmp_path / "left"}, with_package(computecache=there))
    with pytest.raises(EnvironmentMismatchError) as error:
        restore(store, read_bundle(store, REF), fresh(tmp_path), with_package(computecache=here))
    assert [issue.message.partition(":")[0] for issue in error.value.issues] == ["GPU driver"]


def test_folders_without_files_are_not_saved(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing to save"):
        save(store, REF, fresh(tmp_path), ORIGIN)


# -- for whom it fits -------------------------------------------------------------------------------------------------


def other(**fields: Any) -> Origin:
    return ORIGIN._replace(environment=msgspec.structs.replace(GPU, **fields))


def with_package(**versions: str) -> Origin:
    return ORIGIN._replace(packages={**ORIGIN.packages, **versions})


@pytest.mark.parametrize(
    ("here", "rule"),
    [
        (other(torch="2.13.1+cu130"), "torch"),
        (other(cuda="12.8"), "CUDA of torch"),
        (other(gpu="NVIDIA H200"), "GPU"),
        (other(cuda_capability="10.0"), "compute capability"),
        (other(machine="aarch64"), "architecture"),
        (other(libc="2.31"), "glibc"),
        (other(cpu_features=("avx2",)), "CPU features"),
        (with_package(triton="3.5.0"), "triton"),
        (with_package(python="cpython-313"), "python"),
        (with_package(vllm="0.21.0"), "vllm"),
        (ORIGIN._replace(code="commit-2"), "code"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cache_is_refused_for_another(here: Origin, rule: str, saved: Store, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMismatchError) as error:
        restore(saved, read_bundle(saved, REF), fresh(tmp_path), here)
    assert [issue.message.partition(":")[0] for issue in error.value.issues] == [rule]
    assert error.value.issues[0].expected and error.value.issues[0].actual
    assert here.tag() != ORIGIN.tag()  # its own cache has another tag
    assert not (tmp_path / "fresh").exists()


@pytest.mark.parametrize("here", [other(libc="2.41"), other(cpu_features=("amx_tile", "avx2", "avx512f"))])
def test_a_newer_machine_takes_it(here: Origin, saved: Store, tmp_path: Path) -> None:
    assert restore(saved, read_bundle(saved, REF), fresh(tmp_path), here)["triton"].written == 3


def test_a_key_says_what_a_person_looks_for() -> None:
    assert ORIGIN.tag().startswith("sm_90-torch2.13.0-")
    assert this_origin("a").tag() != this_origin("b").tag() == this_origin("b").tag()
    assert {"python"} <= this_origin().packages.keys()


# -- what is never written --------------------------------------------------------------------------------------------


def hostile(store: Store, *files: tuple[str, bytes], **fields: Any) -> None:
    data = b"".join(text for _, text in files)
    pack = store.blobs.put_bytes_zstd("files", data)
    listed = tuple(CachedFile("inductor", path, sha256_bytes(text), len(text)) for path, text in files)
    record = CompilerCache("llm", GPU, ORIGIN.packages, listed, pack, code="commit-1")
    publish_cache(store, msgspec.structs.replace(record, **fields), "v1")


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a//x", "a/../../x", "a\\x", "", "a/\n", ".", "a/.tmp-x"])
def test_a_path_that_could_leave_its_folder_enters_no_store(path: str, store: Store) -> None:
    with pytest.raises(CorruptError):
        hostile(store, (path, b"x"))


def test_a_record_that_names_such_a_path_is_not_read(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("aotc.store.layout.compiler_cache.check_cache", lambda cache: None)
        hostile(store, ("../x", b"x"))
    for attempt in (
        lambda: restore(store, read_bundle(store, REF), fresh(tmp_path), ORIGIN),
        lambda: aotc.fetch(f"{store.path.as_uri()}#llm:v1", store=tmp_path / "fetched"),
    ):
        with pytest.raises(CorruptError, match="safe"):
            attempt()
    assert fsck(store.path).errors
    assert not list(tmp_path.rglob("x"))


def test_a_path_of_many_folders_enters_no_store(store: Store) -> None:
    """Each of its parts is compared: a record of nothing but such paths would take minutes."""
    with pytest.raises(CorruptError, match="64 folders at most"):
        hostile(store, ("a/" * 100_000 + "x", b"x"))


def test_a_file_and_a_folder_of_one_name_are_refused(store: Store) -> None:
    with pytest.raises(CorruptError, match="both"):
        hostile(store, ("a", b"x"), ("a/b", b"y"))


def test_a_file_with_other_bytes_than_its_digest_says_stops_all(store: Store, tmp_path: Path) -> None:
    listed = tuple(CachedFile("inductor", name, sha256_bytes(b"x"), 1) for name in ("a", "b"))
    hostile(store, ("a", b"x"), ("b", b"y"), files=listed)
    with pytest.raises(CorruptError, match="b of the compiler cache"):
        restore(store, read_bundle(store, REF), fresh(tmp_path), ORIGIN)
    assert not (tmp_path / "fresh").exists()


@pytest.mark.parametrize("link", ["3g", "3g/code.so"])
def test_nothing_is_written_through_a_link(link: str, saved: Store, tmp_path: Path) -> None:
    folders, elsewhere = fresh(tmp_path), tmp_path / "elsewhere"
    (folders["inductor"] / link).parent.mkdir(parents=True)
    elsewhere.mkdir()
    (folders["inductor"] / link).symlink_to(elsewhere)
    with pytest.raises(StoreError):
        restore(saved, read_bundle(saved, REF), folders, ORIGIN)
    assert not list(elsewhere.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(saved: Store, tmp_path: Path) -> None:
    folders = fresh(tmp_path)
    folders["inductor"].mkdir(parents=True)
    os.chown(folders["inductor"], 12345, -1)
    with pytest.raises(StoreError, match="belongs to the user 12345"):
        restore(saved, read_bundle(saved, REF), folders, ORIGIN)


# -- as a user runs it ------------------------------------------------------------------------------------------------


def test_without_a_tag_the_key_of_this_machine_is_the_tag(home: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    code, out = run("cache", "save", "llm", "--code", "abc", "--store", store)
    assert code == 0 and f"llm:{this_origin('abc').tag()}" in out
    inductor = f"inductor={tmp_path / 'fresh'}"
    code, out = run("cache", "restore", "llm", "--code", "abc", "--store", store, "--cache", inductor)
    assert code == 0 and "inductor: 2 files written" in out and "warning: no signature" in out
    code, out = run("cache", "restore", "llm", "--code", "other", "--store", store)
    assert code == 2 and "is the key of this machine" in out and "aotc doctor llm:TAG" in out
    code, out = run("doctor", f"llm:{this_origin('abc').tag()}", "--store", store)
    assert code == 0 and "CPU features" in out


def test_it_moves_through_remotes_like_a_bundle(home: Path, tmp_path: Path) -> None:
    remote = (tmp_path / "remote").as_uri()
    Store.create(tmp_path / "remote")
    assert run("cache", "save", f"{remote}#llm:v1")[0] == 0
    local = tmp_path / "local"
    assert run("fetch", f"{remote}#llm:v1", "--store", local)[0] == 0
    assert run("push", "llm:v1", f"{remote}#llm:v2", "--store", local)[0] == 0
    folder = tmp_path / "fresh"
    code, _ = run("cache", "restore", f"{remote}#llm:v2", "--cache", f"triton={folder}")
    assert code == 0 and (folder / "KEY" / "k.cubin").read_text() == "cubin"
    assert "cache:" in run("ls", "--store", local)[1]
    assert not fsck(local).errors
    assert run("gc", "--store", local, "--grace", "0s")[0] == 0
    assert run("cache", "restore", "llm:v1", "--store", local)[0] == 0


@needs("docker-registry")
def test_a_registry_holds_the_caches_of_several_machines_as_its_tags(
    registry: RegistryServer, home: Path, tmp_path: Path
) -> None:
    where, folder = f"oci://{registry.host}/team/llm", tmp_path / "fresh"
    code, out = run("cache", "save", where, "--code", "abc")
    assert code == 0 and f"saved {where}:{this_origin('abc').tag()}" in out
    assert run("cache", "save", where, "--code", "def")[0] == 0
    code, out = run("cache", "restore", where, "--code", "abc", "--cache", f"triton={folder}")
    assert code == 0 and (folder / "KEY" / "k.cubin").read_text() == "cubin"
    code, out = run("cache", "restore", where, "--code", "ghi", "--cache", f"triton={folder}")
    assert code == 2 and "is the key of this machine" in out


@needs_openssl
def test_where_keys_are_trusted_an_unsigned_cache_is_not_unpacked(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, folder = tmp_path / "store", tmp_path / "fresh"
    restoring = ("cache", "restore", "llm:v1", "--store", store, "--cache", f"triton={folder}")
    assert run("cache", "save", "llm:v1", "--store", store)[0] == 0
    private, public = key_by_openssl(tmp_path, "ours")
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", str(public))
    code, out = run(*restoring)
    assert code == 2 and "not signed" in out and not folder.exists()
    sign_release(Store.open(store), parse_reference("llm:v1"), private_key(private))
    code, out = run(*restoring)
    assert code == 0 and "warning" not in out and (folder / "KEY" / "k.cubin").exists()


@pytest.mark.parametrize("command", [("verify",), ("export", "--pt2", "out.pt2")])
def test_other_commands_say_that_it_is_a_cache(command: tuple[str, ...], saved: Store) -> None:
    code, out = run(*command, "llm:v1", "--store", saved.path)
    assert code == 2 and "is a compiler cache" in out and "aotc cache restore" in out


def test_a_load_says_that_it_is_a_cache(saved: Store) -> None:
    with pytest.raises(AotcError, match="is a compiler cache"):
        aotc.load(f"{saved.path}#llm:v1")


def test_a_model_is_no_cache(saved: Store, work: Path, tmp_path: Path) -> None:
    from signing import bundle_in

    digest = bundle_in(saved, work)
    with pytest.raises(StoreError, match="no compiler cache"):
        restore(saved, read_bundle(saved, Reference(None, "tiny", digest=digest)), fresh(tmp_path), ORIGIN)


def test_variables_of_the_compilers_are_kept_and_compared(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    monkeypatch.delenv(HEADERS, raising=False)
    code, out = run("cache", "save", "llm:v1", "--store", store)
    assert code == 0 and "runs a C++ compiler for a header" in out and f"export {HEADERS}=0" in out
    monkeypatch.setenv(HEADERS, "0")
    code, out = run("cache", "restore", "llm:v1", "--store", store)
    assert code == 0 and f"{HEADERS} is 0 here, and was not set where the cache was saved" in out
    code, out = run("cache", "save", "llm:v2", "--store", store)
    assert code == 0 and HEADERS not in out
    assert f"variables    {HEADERS}=0" in run("inspect", "llm:v2", "--store", store)[1]
    monkeypatch.delenv(HEADERS)
    code, out = run("doctor", "llm:v2", "--store", store)
    assert code == 0 and HEADERS in out


def test_a_variable_of_an_engine_that_a_cache_names_is_compared(
    saved: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "made", {"torch_compile_cache/a": "code"})
    save(saved, REF, {"vllm": tmp_path / "made"}, ORIGIN._replace(variables={"VLLM_USE_V2": "1"}))
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")  # in no key
    for value, differs in ((None, True), ("0", True), ("1", False)):
        monkeypatch.delenv("VLLM_USE_V2", raising=False)
        if value is not None:
            monkeypatch.setenv("VLLM_USE_V2", value)
        (rule,) = variable_rules(cache_in(saved), ORIGIN._replace(variables={}))
        assert (rule.name, rule.issue is not None) == ("VLLM_USE_V2", differs)


def test_inspect_lists_the_files_of_a_cache_and_picks_says_that_it_is_one(saved: Store) -> None:
    code, shown = run("inspect", f"{saved.path}#{REF.model}:{REF.tag}")
    assert code == 0 and "cache:sm_90  a compiler cache, saved with torch 2.13.0+cu130" in shown
    assert "triton  3 files" in shown and "    fxgraph/ab/tmpdigest  5 B" in shown and "vllm 0.20.0" in shown
    code, shown = run("picks", f"{saved.path}#{REF.model}:{REF.tag}")
    assert code == 2 and "is a compiler cache" in shown and "sha256:" not in shown


def test_of_a_damaged_cache_the_hint_is_to_save_it_again(saved: Store, tmp_path: Path) -> None:
    pack = saved.blobs.path(cache_in(saved).pack.blob)
    pack.chmod(0o644)
    pack.write_bytes(b"\0" * pack.stat().st_size)
    with pytest.raises(CorruptError) as caught:
        restore(saved, read_bundle(saved, REF), fresh(tmp_path), ORIGIN)
    assert "save or fetch the cache again" in caught.value.hint
    pack.unlink()
    with pytest.raises(NotFoundError) as lost:
        restore(saved, read_bundle(saved, REF), fresh(tmp_path), ORIGIN)
    assert "save or fetch the cache again" in lost.value.hint
