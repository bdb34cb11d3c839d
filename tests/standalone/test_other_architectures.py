"""Code for aarch64 from this machine: built, exported with its runtime, and run by an emulator beside eager here."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import CliRunner, Result
from cross_model import WIDTH, mixed
from elftools.elf.elffile import ELFFile
from processes import ROOT
from safetensors.torch import save_file

from aotc.cli import main
from aotc.compiler.planning.plan import parse_target, plan_units, why_not_buildable
from aotc.compiler.toolchain.wrapper_split import needing_torch
from aotc.errors import LibraryError
from aotc.machine.cpp_compiler import compiler_name, compiler_version, has_cross_compiler
from aotc.machine.native_target import resolve_target
from aotc.manifest import ModelSpec, read_manifest
from aotc.standalone.exporting.folder_runtime import (
    COMPILE_OPTIONS,
    LINK_OPTIONS,
    folder_runtime,
    runtime_sources,
)
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference
from aotc.tools.doctor.machine import check_toolchain

EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
CPUS = {"cpu:neon": "max,sve=off", "cpu:sve256": "max,sve-max-vq=2", "cpu:sve128": "max,sve-max-vq=1"}
"""By target, what the emulator is: `sve-max-vq` is the length of SVE's vectors in units of 128 bits."""
FROZEN = ["cpu:sve128"]
MANIFEST = Path(__file__).with_name("aarch64.yaml")
TOLERANCE = 2e-5  # of float32, whose sums are taken in another order
HALF = 2e-2  # of what bfloat16 gives: two units in the last place of values below 1

emulated = pytest.mark.skipif(
    platform.machine() != "x86_64" or not has_cross_compiler("aarch64") or EMULATOR is None,
    reason="needs x86-64 with Debian's packages g++-aarch64-linux-gnu and qemu-user-static",
)
cross_compiled = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="aarch64 is another architecture only where this machine is x86-64"
)


@pytest.fixture(scope="module")
def store(shared_folder: Path, built: Any) -> Path:
    return built(shared_folder, "aarch64-store", MANIFEST)  # type: ignore[no-any-return]


def export(store: Path, folder: Path, target: str, *options: str) -> Result:
    command = ["export", f"{store}#{'frozen' if target in FROZEN else 'mixed'}", "--standalone", folder, *options]
    if target not in FROZEN:
        weights = {name: tensor.contiguous() for name, tensor in mixed().state_dict().items()}
        save_file(weights, folder.with_name("w.safetensors"))
        command += ["--weights", folder.with_name("w.safetensors")]
    return CliRunner().invoke(main, [*map(str, [*command, "--target", target])])


@pytest.fixture(scope="module")
def folders(store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By target, an exported folder, with examples/c/run.c compiled beside it."""
    made = {}
    for target in CPUS:
        folder = tmp_path_factory.mktemp("exported") / "model"
        result = export(store, folder, target, "--allow-untested")
        assert result.exit_code == 0, result.output
        program = ["-I", folder, ROOT / "examples" / "c" / "run.c", "-L", folder, "-laotc", "-Wl,-rpath,$ORIGIN/model"]
        subprocess.run(
            [compiler_name("aarch64").replace("g++", "gcc"), *program, "-o", folder.parent / "run"], check=True
        )
        made[target] = folder
    return made


def run(folder: Path, cpu: str, x: torch.Tensor) -> subprocess.CompletedProcess[bytes]:
    (given := folder.with_name("x.bin")).write_bytes(x.numpy().tobytes())
    emulator = [str(EMULATOR), "-cpu", cpu, "-L", "/usr/aarch64-linux-gnu"]
    command = [*emulator, folder.with_name("run"), folder, given, *map(str, x.shape)]
    return subprocess.run(command, capture_output=True, timeout=120, check=False)


@emulated
@pytest.mark.parametrize("target", [*CPUS])
@pytest.mark.parametrize("seq", [64, 13])
def test_an_exported_folder_gives_eagers_results(folders: dict[str, Path], target: str, seq: int) -> None:
    x = torch.randn(2, seq, WIDTH, generator=torch.Generator().manual_seed(seq))
    done = run(folders[target], CPUS[target], x)
    assert done.returncode == 0, done.stderr.decode()
    found = torch.from_numpy(numpy.frombuffer(done.stdout, numpy.float32).copy()).reshape(2, seq, 4 * WIDTH)
    with torch.no_grad():
        expected = mixed()(x)
    assert (found - expected)[..., : 3 * WIDTH].abs().max() < TOLERANCE
    assert (found - expected)[..., 3 * WIDTH :].abs().max() < HALF
    assert len(found.unique()) > 100


@emulated
@pytest.mark.parametrize("target", [*CPUS])
def test_the_code_is_of_the_targets_vectors(folders: dict[str, Path], target: str) -> None:
    library = folders[target] / "bucket-0.so"
    disassembler = compiler_name("aarch64").replace("g++", "objdump")
    shown = subprocess.run([disassembler, "-d", library], capture_output=True, text=True, check=True).stdout
    assert "file format elf64-littleaarch64" in shown
    # torch's classes of 128-bit SVE are NEON's.
    registers = {"z" if target == "cpu:sve256" else "v"}
    many = {kind for kind, size in (("v", ".4s"), ("z", ".s")) if len(re.findall(rf"\t{kind}\d+\{size},", shown)) > 50}
    assert many == registers


@emulated
@pytest.mark.parametrize(
    ("target", "cpu", "lacks"),
    [
        ("cpu:neon", "cortex-a53", "asimdrdm, atomics"),
        ("cpu:sve256", "max,sve-max-vq=1", "sve256"),
        ("cpu:sve128", "max,sve-max-vq=2", "sve128"),
    ],
)
def test_a_cpu_that_lacks_features_refuses_the_folder(
    folders: dict[str, Path], target: str, cpu: str, lacks: str
) -> None:
    done = run(folders[target], cpu, torch.zeros(2, 2, WIDTH))
    assert done.stderr.decode().splitlines() == [f"built for {target}, this CPU has no {lacks}"]
    assert done.returncode == 2  # AOTC_ERROR_MACHINE


@emulated
def test_the_record_says_the_architecture_and_that_the_code_has_not_run(store: Path, tmp_path: Path) -> None:
    opened = Store.open(store)
    bundles = [read_bundle(opened, parse_reference(name)) for name in ("mixed", "frozen")]
    entries = [entry for bundle in bundles for entry in bundle.artifacts if entry.target in CPUS]
    artifacts = [read_artifact(opened, entry) for entry in entries]
    assert {artifact.target for artifact in artifacts} == {*CPUS}
    assert all(artifact.untested and artifact.environment.machine == "aarch64" for artifact in artifacts)
    verified = CliRunner().invoke(main, ["verify", f"{store}#frozen"])
    assert "frozen:latest holds cpu:sve128; none of it runs on this machine" in verified.output
    assert "hint: verify it with --standalone --python COMMAND" in verified.output
    refused = export(store, tmp_path / "folder", "cpu:neon")
    assert refused.exit_code != 0
    assert "has no attestation" in refused.output
    assert "aotc verify`" not in refused.output.partition("hint:")[2]
    assert "--allow-untested" in refused.output
    assert not (tmp_path / "folder").exists()


@emulated
def test_a_key_names_the_cross_compilers_version(store: Path) -> None:
    units = plan_units(read_manifest(MANIFEST, ["mixed"]))
    versions = {unit.target.machine: unit.factors["compiler"] for unit in units}
    assert versions == {"aarch64": compiler_version("aarch64"), "x86_64": compiler_version()}
    assert len({*versions.values()}) == 2


def test_the_runtime_for_another_architecture_is_compiled_as_the_extension_for_this_one() -> None:
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    (built,) = [each for each in modules if each["name"] == "aotc.core._libaotc"]
    assert {*built["sources"]} == {str(path.relative_to(ROOT)) for path in runtime_sources()}
    assert built["extra-compile-args"] == [*COMPILE_OPTIONS] and built["extra-link-args"] == [*LINK_OPTIONS]


# -- without the toolchain --------------------------------------------------------------------------------------------


def spec(runtime: str) -> ModelSpec:
    return ModelSpec("m", "m:m", inputs={}, buckets=({},), targets=("cpu:neon",), runtime=runtime)


@cross_compiled
def test_a_missing_cross_compiler_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    issue = why_not_buildable(spec("standalone"), parse_target("cpu:neon"))
    assert issue is not None
    assert (issue.expected, issue.actual) == ("aarch64-linux-gnu-g++", "none on PATH")
    assert "apt-get install g++-aarch64-linux-gnu" in issue.hint
    with pytest.raises(LibraryError) as raised:
        folder_runtime("aarch64", tmp_path)
    assert "apt-get install g++-aarch64-linux-gnu" in raised.value.hint


@cross_compiled
def test_code_that_calls_torch_is_not_cross_compiled() -> None:
    issue = why_not_buildable(spec("any"), parse_target("cpu:neon"))
    assert issue is not None
    assert (issue.expected, issue.actual) == ("runtime: standalone", "runtime: any")


@cross_compiled
def test_code_for_a_gpu_of_another_host_may_not_call_torch() -> None:
    issue = why_not_buildable(spec("any"), parse_target("cuda:sm_90@aarch64"))
    assert issue is not None
    assert (issue.expected, issue.actual) == ("runtime: standalone", "runtime: any")
    assert resolve_target("cuda:sm_90@aarch64") == "cuda:sm_90@aarch64"
    assert resolve_target("cuda:sm_90@x86_64") == "cuda:sm_90"


@emulated
def test_a_library_for_a_gpu_of_another_host_needs_torch_and_the_driver_by_name(tmp_path: Path) -> None:
    """Neither is here for that machine: its linker gets empty libraries of these names."""
    compiler = compiler_name("aarch64")
    (tmp_path / "code.c").write_text("int cuInit(unsigned);\nint run() { return cuInit(0); }\n")
    command = [compiler, "-shared", "-fPIC", str(tmp_path / "code.c"), "-lcuda", "-ltorch", "-ltorch_cpu", "-lc10_cuda"]
    subprocess.run([*needing_torch(command, tmp_path), "-o", tmp_path / "code.so"], check=True)
    with (tmp_path / "code.so").open("rb") as stream:
        (dynamic,) = [section for section in ELFFile(stream).iter_sections() if section.name == ".dynamic"]
        names = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    assert {"libtorch_cpu.so", "libcuda.so.1"} <= names and not {"libc10_cuda.so", "libtorch.so"} & names


@cross_compiled
def test_doctor_names_the_cross_compiler_or_where_it_is() -> None:
    (check,) = [check for check in check_toolchain() if check.name == "C++ for aarch64"]
    named = "aarch64-linux-gnu-g++: " if has_cross_compiler("aarch64") else "apt-get install g++-aarch64-linux-gnu"
    assert named in check.found
