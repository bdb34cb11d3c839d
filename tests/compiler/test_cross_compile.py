"""Building for a GPU that the machine lacks: the plan, what is refused, and, with torch's CUDA build, the result."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cubins import cubins_of, is_for
from processes import ROOT, environment
from small_artifact import small_artifact
from torch import Tensor, nn

import aotc
from aotc.compiler.autotune.picker import Picker
from aotc.compiler.cross_compile import stand_in
from aotc.compiler.cross_compile.capture import _operators
from aotc.compiler.messages import Settings
from aotc.compiler.planning.plan import check_buildable, plan_units
from aotc.errors import BuildError, EnvironmentMismatchError
from aotc.machine.targets import parse_target
from aotc.manifest import Manifest, read_manifest
from aotc.models.launch import READS_A_VALUE, unmeasured_launch
from aotc.picks import PICKS_SCHEMA_VERSION, Candidate, Pick, PickFile, UnitPicks
from aotc.provenance import BuiltVariant
from aotc.records import File, LaunchPick, LibraryImports, Output, SizeRange
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference

pytestmark = pytest.mark.every_torch

TARGETS = ["cuda:sm_80", "cuda:sm_90"]
HAS_CUDA = torch.version.cuda is not None
without_gpu = pytest.mark.skipif(
    not HAS_CUDA or torch.cuda.is_available(), reason="needs torch's CUDA build, on a machine without a GPU"
)


def manifest_of(folder: Path, **model: Any) -> Manifest:
    document = {
        "version": 1,
        "models": {
            "tiny": {
                "factory": "examples.models:transformer_block",
                "kwargs": {"width": 64, "heads": 2},
                "targets": TARGETS,
                "inputs": {"x": {"shape": ["batch", 16, 64]}},
                "buckets": [{"batch": 4}],
                **model,
            }
        },
    }
    path = folder / "manifest.yaml"
    path.write_text(json.dumps(document))
    return read_manifest(path)


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a plan, which runs nothing: torch says that it is a CUDA build, on a machine without a GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# -- what is planned --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cuda_build")
def test_a_unit_for_a_gpu_that_is_not_here_names_it_and_has_a_key_of_its_own(tmp_path: Path) -> None:
    units = plan_units(manifest_of(tmp_path, mode="default"))
    assert [(unit.target.name, unit.gpu.name if unit.gpu else "") for unit in units] == [
        ("cuda:sm_80", "NVIDIA A100-SXM4-80GB"),
        ("cuda:sm_90", "NVIDIA H100 80GB HBM3"),
    ]
    assert units[1].factors["gpu"] == "not here: NVIDIA H100 80GB HBM3"
    assert all(unit.untuned for unit in units)  # `mode: default` asks for nothing else


@pytest.mark.usefixtures("cuda_build")
def test_what_would_be_measured_needs_picks_or_a_word_for_defaults(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    with pytest.raises(BuildError, match="no picks for batch=4") as refused:
        plan_units(manifest, targets=["cuda:sm_90"])
    assert "--picks" in refused.value.hint and "--untuned" in refused.value.hint
    (unit,) = plan_units(manifest, targets=["cuda:sm_90"], settings=Settings(untuned=True))
    assert unit.untuned
    (pinned,) = plan_units(manifest, picks=picks_on("NVIDIA H200"), targets=["cuda:sm_90"])
    assert not pinned.untuned
    assert pinned.gpu is not None and pinned.gpu.name == "NVIDIA H200"  # on which the picks were measured
    assert pinned.key != unit.key


def picks_on(device: str) -> PickFile:
    unit = UnitPicks("tiny", {"batch": 4}, "cuda:sm_90", str(torch.__version__), device, ())
    return PickFile(PICKS_SCHEMA_VERSION, (unit,))


@pytest.mark.usefixtures("cuda_build")
def test_frozen_weights_and_unknown_gpus_need_the_gpu(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="frozen weights are folded by running"):
        plan_units(manifest_of(tmp_path, weights="frozen"))
    with pytest.raises(BuildError, match="properties of such a GPU are not known") as refused:
        plan_units(manifest_of(tmp_path, targets=["cuda:sm_75"]))
    assert "cuda:sm_100" in refused.value.hint


@pytest.mark.skipif(HAS_CUDA, reason="needs torch's CPU build")
def test_torch_without_cuda_cannot_build_for_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMismatchError, match="target cannot be built") as refused:
        plan_units(manifest_of(tmp_path, mode="default"))
    assert "--untuned" in refused.value.issues[0].hint


# -- what is decided --------------------------------------------------------------------------------------------------


def test_without_a_measurement_a_graph_is_launched_unless_the_picks_or_the_manifest_say_otherwise(
    tmp_path: Path,
) -> None:
    code = File("model.so", "sha256:" + "2" * 64, 1, "sha256:" + "4" * 64, 10)
    variant = BuiltVariant(
        bucket={"batch": 4},
        key="sha256:" + "1" * 64,
        library=code.name,
        files=(code,),
        arguments=(),
        outputs=(Output(index=0),),
        output_tree=0,
    )
    artifact = small_artifact(variants=(variant,))
    (spec,) = manifest_of(tmp_path).models.values()
    assert unmeasured_launch(spec, artifact).graph
    measured = LaunchPick(graph=False, direct_ms=1.0, graph_ms=2.0, reason="measured")
    assert unmeasured_launch(spec, artifact, measured) == measured
    never = msgspec.structs.replace(spec, cuda_graphs="never")
    assert not unmeasured_launch(never, artifact).graph
    reads = msgspec.structs.replace(variant, imports=LibraryImports(("aoti_torch_item_bool",)))
    of_reads = msgspec.structs.replace(artifact, variants=(reads,))
    assert unmeasured_launch(spec, of_reads) == LaunchPick(graph=False, reason=READS_A_VALUE)
    ranged = msgspec.structs.replace(variant, bucket={"batch": SizeRange(1, 8)})
    assert not unmeasured_launch(spec, msgspec.structs.replace(artifact, variants=(ranged,))).graph


def test_untuned_decisions_are_recorded_and_without_that_word_refused() -> None:
    question = Pick(kind="operator", subject="mm", candidates=(Candidate("a"), Candidate("b")))
    untuned, locked = Picker(untuned=True), Picker(locked=True)
    for picker in (untuned, locked):
        assert picker.must_not_measure(question)
    untuned.raise_if_locked_out()
    assert untuned.untuned == ("operator mm is not pinned",)
    assert locked.untuned == ()
    with pytest.raises(BuildError, match="1 picks are missing"):
        locked.raise_if_locked_out()


# -- the stand-in -----------------------------------------------------------------------------------------------------


def test_a_copy_for_a_layout_is_the_same_computation() -> None:
    """A CPU's attention lays out its result so that `contiguous` copies nothing, and none is captured."""

    def operators(function: Callable[[Tensor], Tensor]) -> list[str]:
        class Model(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return function(x)

        return _operators(torch.export.export(Model(), (torch.ones(2, 3),)).graph)

    plain = operators(lambda x: x.t().sin())
    assert operators(lambda x: x.t().contiguous().sin()) == plain
    assert operators(lambda x: x.t().cos()) != plain


def test_a_process_that_was_not_started_for_it_has_no_stand_in() -> None:
    """A service, a test, a build's other processes: nothing in them loads one, and it cannot be made up for."""
    assert not stand_in.is_loaded()
    with pytest.raises(RuntimeError, match="not started for a GPU"):
        stand_in.become("NVIDIA H100", 1, {})


def test_a_library_that_stands_in_is_told_what_gpu_it_is(tmp_path: Path) -> None:
    source, library = tmp_path / "told.cpp", tmp_path / "libtold.so"
    source.write_text("""
        #include <cstddef>
        int told[512], ignored; size_t bytes;
        extern "C" void aotc_absent_gpu(const char *, size_t memory, const int *values, int count) {
          bytes = memory; for (int i = 0; i < count; ++i) told[i] = values[i]; }
        extern "C" void aotc_ignore_launches(int yes) { ignored = yes; }
    """)
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    code = f"""
import ctypes
from aotc.compiler.cross_compile import stand_in
stand_in.load([{str(library)!r}])
stand_in.become("NVIDIA H100", 80 << 30, {{16: 132, 75: 9}})
library = ctypes.CDLL({str(library)!r})
told = (ctypes.c_int * 512).in_dll(library, "told")
print(told[16], told[75], told[76], ctypes.c_size_t.in_dll(library, "bytes").value)
with stand_in.launches_ignored():
    print(ctypes.c_int.in_dll(library, "ignored").value)
print(ctypes.c_int.in_dll(library, "ignored").value)
"""
    ran = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["132", "9", "0", str(80 << 30), "1", "0"], ran.stderr


# -- with torch's CUDA build ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with `tiny` for two GPUs and a CPU, `trained` and `cnn` for a GPU, built on this machine without one."""
    folder = tmp_path_factory.mktemp("absent-gpu")
    manifest = manifest_of(folder, mode="default", dtype="bfloat16", targets=[*TARGETS, "cpu:x86-64-v3"])
    document = json.loads(manifest.path.read_text())
    document["models"]["trained"] = {
        "factory": "torch.nn:Linear",
        "kwargs": {"in_features": 32, "out_features": 7},
        "targets": TARGETS[-1:],
        "inputs": {"input": {"shape": [48, 32]}},
        "train": True,
        "mode": "default",
    }
    document["models"]["cnn"] = {
        "factory": "tests.benchmarks.matrix_models:cnn",
        "targets": TARGETS[-1:],
        "inputs": {"input": {"shape": ["batch", 3, 16, 16]}},
        "buckets": [{"batch": [2, 8]}],
        "dtype": "bfloat16",  # products race with templates that load by the tensor memory accelerator
    }
    manifest.path.write_text(json.dumps(document))
    command = [
        sys.executable,
        "-m",
        "aotc",
        "build",
        str(manifest.path),
        "--store",
        str(folder / "store"),
        "--untuned",
        "--jobs",
        "2",
    ]
    ran = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder / "store"


def check_code(libraries: Sequence[bytes], target: str) -> None:
    """There is code for a GPU, all of it for that target, and no library looks for what stood in for the GPU."""
    cubins = [cubin for library in libraries for cubin in cubins_of(library)]
    assert cubins and all(is_for(cubin, int(target[-2:])) for cubin in cubins)
    for library in libraries:
        assert b"aotc_absent_gpu" not in library and b"aotc-absent-gpu" not in library
        assert b"libcudart" not in library  # the names of libraries are those of a build on a GPU


@without_gpu
def test_one_build_makes_code_for_several_gpus_and_a_cpu(built: Path, tmp_path: Path) -> None:
    store = Store.open(built)
    bundle = read_bundle(store, parse_reference("tiny:latest"))
    artifacts = {entry.target: read_built(store, entry) for entry in bundle.artifacts}
    assert [*artifacts] == [*TARGETS, "cpu:x86-64-v3"]
    assert [artifact.untested for artifact in artifacts.values()] == [True, True, False]
    for name in ("cnn", "trained"):
        (entry,) = read_bundle(store, parse_reference(name)).artifacts
        artifacts[f"{name} for {entry.target}"] = read_built(store, entry)
    for target, artifact in artifacts.items():
        if artifact.target.startswith("cpu:"):
            continue
        (variant,) = artifact.variants
        assert variant.untuned, target
        libraries = [store.blobs.load(file, 1 << 30) for file in variant.files if file.name.endswith(".so")]
        check_code(libraries, artifact.target)
    with pytest.raises(EnvironmentMismatchError, match="the bundle holds cuda:sm_90, and it is to run on cpu"):
        aotc.load(f"{built}#tiny", device="cpu", target="cuda:sm_90", trust=aotc.Trust(allow_untested=True))


@without_gpu
def test_a_training_step_is_compiled_and_launched_directly(built: Path) -> None:
    """An odd width: whether its products are padded is asked in the joint graph of both halves."""
    store = Store.open(built)
    (entry,) = read_bundle(store, parse_reference("trained:latest")).artifacts
    (variant,) = read_built(store, entry).variants
    assert variant.backward is not None
    assert variant.launch is None
    assert {variant.arguments[each.argument].state for each in variant.backward.gradients} >= {"weight", "bias"}


@without_gpu
def test_registers_and_spills_are_read_from_the_code(built: Path, tmp_path: Path) -> None:
    """Inductor asks the driver for them, to choose between configurations. `cuobjdump` says the same."""
    import ctypes

    import triton

    from aotc.compiler.cross_compile.libraries import compiled_stand_ins

    driver = ctypes.CDLL(compiled_stand_ins(tmp_path)[0])
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    store = Store.open(built)
    entry = next(e for e in read_bundle(store, parse_reference("tiny:latest")).artifacts if e.target == "cuda:sm_90")
    (variant,) = read_built(store, entry).variants
    seen = 0
    for cubin in cubins_of(store.blobs.load(variant.files[-1], 1 << 30)):
        (tmp_path / "k.cubin").write_bytes(cubin)
        shown = subprocess.run(
            [cuobjdump, "-res-usage", tmp_path / "k.cubin"], capture_output=True, text=True, check=False
        )
        name = shown.stdout.partition("Function ")[2].partition(":")[0]
        usage = dict(part.split(":") for part in shown.stdout.split() if part.count(":") == 1 and part[-1] != ":")
        module, function, value = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        assert driver.cuModuleLoadData(ctypes.byref(module), cubin) == 0
        assert driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()) == 0
        found = []
        for attribute in (4, 3):  # CU_FUNC_ATTRIBUTE_NUM_REGS, …_LOCAL_SIZE_BYTES
            assert driver.cuFuncGetAttribute(ctypes.byref(value), attribute, function) == 0
            found.append(value.value)
        assert found == [int(usage["REG"]), int(usage["STACK"])]
        seen += 1
    assert seen


@without_gpu
def test_a_service_loads_no_stand_in(built: Path) -> None:
    code = f"""
import torch, aotc
from examples.models import transformer_block
compiled = aotc.load({str(built)!r} + "#tiny", transformer_block(width=64, heads=2).bfloat16().eval())
compiled(torch.randn(4, 16, 64, dtype=torch.bfloat16))
loaded = sorted(set(line.split()[-1] for line in open("/proc/self/maps")))
print([path for path in loaded if "aotc-absent" in path or path.endswith("libcuda.so.1")])
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == ["[]"], ran.stderr


@without_gpu
def test_a_stand_in_has_no_gpu_until_it_is_told_which_and_its_errors_name_the_function_but_not_the_model(
    tmp_path: Path,
) -> None:
    from aotc.compiler.cross_compile.libraries import compiled_stand_ins

    paths = compiled_stand_ins(tmp_path)
    nothing_said = f"""
import ctypes
for path in {paths!r}:
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
import torch
print(torch.cuda.is_available())
"""
    on_h100 = f"""
from aotc.compiler.cross_compile import stand_in
from aotc.machine.gpus import attributes, gpu_for
from aotc.machine.targets import parse_target
stand_in.load({paths!r})
target = parse_target("cuda:sm_90")
gpu = gpu_for(target.name, None)
stand_in.become(gpu.name, gpu.memory, attributes(gpu, target))
import torch
from aotc.compiler.explain_failure import explain_failure
numbers = torch.empty(4, device="cuda")
try:
    numbers + 1
except RuntimeError as error:
    print(explain_failure(error, "export"))
"""

    def said(code: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert said(nothing_said).split() == ["False"]
    message, hint = said(on_h100).split("hint: ")
    assert re.search(r"nothing runs on it, which (__)?cuda\w+ would need", message)
    assert hint.startswith("no fault of the model")


@pytest.mark.usefixtures("cuda_build")
def test_a_node_of_a_cluster_needs_the_gpu_since_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (spec,) = manifest_of(tmp_path).models.values()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    check_buildable(spec, parse_target("cuda:sm_80"), measuring=True)
    with pytest.raises(BuildError, match="the GPU here is cuda:sm_80; kernels are tuned by running"):
        check_buildable(spec, parse_target("cuda:sm_90"), measuring=True)


@pytest.mark.parametrize("measuring", [False, True])
def test_without_torchs_cuda_build_the_way_from_picks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measuring: bool
) -> None:
    (spec,) = manifest_of(tmp_path).models.values()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentMismatchError) as caught:
        check_buildable(spec, parse_target("cuda:sm_90"), measuring=measuring)
    message, hint = str(caught.value).split("\n  hint: ")
    if measuring:
        assert message == "the target is a CUDA GPU, and torch sees none here"
    else:
        assert message == f"the target is cuda:sm_90, and torch here ({torch.__version__}) is built without CUDA"
        assert "which needs no GPU here" in hint and "`aotc tune`" in hint and "--untuned" in hint
