"""aotc itself on aarch64, without torch: its wheel from a cross compiler, in a Python that an emulator runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from cross_model import WIDTH, mixed
from in_process import run_here
from processes import ROOT, environment
from safetensors.torch import save_file
from test_gpu_without_torch import BEGIN, models_for, stand_in
from test_other_architectures import CPUS, EMULATOR, HALF, MANIFEST, emulated
from test_standalone import TOLERANCE, module_of, write_case

import aotc
from aotc.machine.cpp_compiler import compiler_name
from examples.models import transformer_block

HERE = Path(__file__).parent
ARM64 = os.environ.get("AOTC_TESTS_ARM_PYTHON", "")
PAGE = ROOT / "aotc" / "compiler" / "OTHER_MACHINES.md"
CALLS = 400

pytestmark = [
    emulated,
    pytest.mark.skipif(not ARM64, reason="needs a folder of `.ci/arm64_python`, in $AOTC_TESTS_ARM_PYTHON"),
]


@pytest.fixture(scope="module")
def store(shared_folder: Path, built: Any) -> Path:
    return built(shared_folder, "aarch64-store", MANIFEST)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the command of the page."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "aotc", folder / "aotc", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (command,) = re.findall(r"^_PYTHON_HOST_PLATFORM=.+pip wheel .+", PAGE.read_text(), re.MULTILINE)
    tools = {"PIP_NO_BUILD_ISOLATION": "0"}  # with the setuptools that is here: "0" is how pip is told to
    subprocess.run(command, shell=True, cwd=folder, env={**os.environ, **tools}, check=True)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def python(cpu: str) -> list[str]:
    return [str(EMULATOR), "-cpu", cpu, "-L", ARM64, f"{ARM64}/usr/bin/python3.11"]


def run(packages: Path, *arguments: object, cpu: str = CPUS["cpu:neon"], **changes: str) -> str:
    """What Python for aarch64 prints."""
    settings = {"PYTHONPATH": f"{packages}:{HERE}", "PATH": "", "HOME": str(packages), "OMP_NUM_THREADS": "2"}
    settings |= changes
    command = [*python(cpu), *map(str, arguments)]
    done = subprocess.run(command, cwd=packages, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_is_for_aarch64_and_every_python(wheel: Path) -> None:
    assert re.fullmatch(r"aotc-[\d.]+-cp311-abi3-linux_aarch64\.whl", wheel.name)
    with ZipFile(wheel) as archive:
        extensions = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    assert {Path(name).name for name in extensions} == {f"_{name}.abi3.so" for name in ("cpu", "libaotc", "evaluator")}
    assert all(int.from_bytes(data[18:20], "little") == 183 for data in extensions.values())  # EM_AARCH64


def test_models_give_eager_s_values(store: Path, packages: Path, tmp_path: Path) -> None:
    models = module_of(HERE / "library_models.py", "library_models_for_aarch64")
    shapes = module_of(ROOT / "tests" / "zoo" / "shape_models.py", "shape_models_for_aarch64")
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 128, (3, 21)), torch.ones(3, 21, dtype=torch.int64)
    mask[0, 9:] = 0
    cases = [
        write_case(tmp_path, name, f"{store}#{name.partition('-')[0]}", module, *inputs)
        for name, module, inputs in (
            ("bert", models.bert(), [ids, mask]),
            ("bert-without-mask", models.bert(), [ids]),
            ("convolution", shapes.Convolution().eval(), [torch.randn(5, 3, 8, 8)]),
            ("mixed-longest", mixed(), [torch.randn(2, 64, WIDTH)]),
            ("mixed-short", mixed(), [torch.randn(2, 3, WIDTH)]),
        )
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    told = json.loads(run(packages, HERE / "without_torch.py", tmp_path))
    assert told["machine"] == "aarch64" and told["imported"] == []
    assert {"_cpu.abi3.so", "ld-linux-aarch64.so.1"} <= {*told["mapped"]}
    for name in (case["name"] for case in cases):
        of = told[name]
        assert max(of["differences"]) < (HALF if name.startswith("mixed") else TOLERANCE), name
        assert all(of["shapes"]) and {*of["types"]} == {"ndarray"}
        assert (of["calls"], of["target"]) == (1, "cpu:neon")


def test_code_for_a_gpu_runs_over_a_stand_in_for_its_driver(packages: Path, tmp_path: Path) -> None:
    """As on Grace. The stand-in and the code are compiled by the cross compiler, as builds for such a host compile."""
    driver = stand_in(tmp_path, compiler_name("aarch64"))
    store = models_for(driver, tmp_path, "aarch64", compiler_name("aarch64"))
    code = """
import platform
model = load()
x, total = inputs()
for calls in (1, 2):
    assert (model(x, total)[0] == x * weight).all() and (total == calls).all()
print(platform.machine(), model.artifact.target, model.stats().graph_launches)
"""
    told = run(packages, "-c", BEGIN + code, store, LD_LIBRARY_PATH=str(driver))
    assert told.split() == ["aarch64", "cuda:sm_90@aarch64", "2"]


def test_calls_with_arrays_of_any_form_are_numpy_s_or_misses(store: Path, packages: Path) -> None:
    found = json.loads(run(packages, HERE / "hostile_arrays.py", store, 0, CALLS))
    calls, misses = found["counts"]
    assert found["wrong"] == {} and found["runtime"].startswith(str(packages))
    assert calls + misses == CALLS and min(calls, misses) > CALLS / 5


# -- aotc verify, with eager here --------------------------------------------------------------------------------------


def verified(store: Path, name: str, command: str) -> subprocess.CompletedProcess[str]:
    options = ("--standalone", "--python", command, "--seeds", "1", "--json")
    return run_here("verify", f"{store}#{name}", *options, cwd=HERE)


def test_verify_compares_with_eager_what_another_python_runs(store: Path, packages: Path) -> None:
    """Of a bundle for several machines what is for that one; here no code for aarch64 runs."""
    command = shlex.join(["env", f"PYTHONPATH={packages}", *python(CPUS["cpu:neon"])])
    ran = verified(store, "mixed", command)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads(ran.stdout)
    assert {row["target"] for row in rows} == {"cpu:neon"} and {row["status"] for row in rows} == {"ok"}
    assert len({row["sizes"] for row in rows}) > 1


def test_verify_says_what_another_python_lacks(store: Path, packages: Path) -> None:
    ran = verified(store, "mixed", shlex.join(["env", "PYTHONPATH=", *python(CPUS["cpu:neon"])]))
    assert ran.returncode == 2 and "starts no Python that has aotc: ModuleNotFoundError" in ran.stdout + ran.stderr
    ran = verified(store, "frozen", shlex.join(["env", f"PYTHONPATH={packages}", *python(CPUS["cpu:neon"])]))
    assert ran.returncode == 2 and "built for cpu:sve128, this CPU has no" in ran.stdout + ran.stderr


# -- an exported folder ------------------------------------------------------------------------------------------------

IMAGE = ROOT / "examples" / "small_image"


@pytest.fixture(scope="module")
def quickstart(shared_folder: Path, built: Any) -> Path:
    return built(shared_folder, "small-image-store", IMAGE / "manifest.yaml")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def block() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformer_block(width=256, heads=4).eval()


@pytest.fixture
def folder(quickstart: Path, block: torch.nn.Module, tmp_path: Path) -> Path:
    """By the command of the Dockerfile, for the platform linux/arm64."""
    save_file(block.state_dict(), tmp_path / "weights.safetensors")
    lines = (IMAGE / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    (command,) = [line.removeprefix("RUN ") for line in lines if "aotc export" in line]
    for there, here in (
        ("/store#", f"{quickstart}#"),
        ("/model", tmp_path / "model"),
        ("/weights", tmp_path / "weights"),
    ):
        command = command.replace(there, str(here))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["sh", "-c", command], env=environment(TARGETARCH="arm64", PATH=path), cwd=ROOT, check=True)
    return tmp_path / "model"


def test_the_service_of_the_small_image_serves_on_aarch64(folder: Path, block: torch.nn.Module) -> None:
    """Python alone: neither aotc nor numpy."""
    command = [*python(CPUS["cpu:neon"]), "-I", "-S", str(IMAGE / "serve.py"), str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={})
    try:
        assert process.stdout is not None
        match = re.fullmatch(r"listening on port (\d+)\n", line := process.stdout.readline())
        assert match, line + process.stdout.read()
        x = torch.randn(1, 128, 256)
        request = urllib.request.Request(f"http://127.0.0.1:{match[1]}/predict", json.dumps({"x": x.tolist()}).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            result = torch.tensor(json.load(answer)["y"])
    finally:
        process.kill()
        process.wait()
    assert (result - block(x)).abs().max() < TOLERANCE


# -- which target a machine takes --------------------------------------------------------------------------------------

FETCH = """
import json, sys
import numpy, aotc, aotc.standalone
from aotc.errors import EnvironmentMismatchError
from aotc.machine.targets import best_cpu_target
from aotc.machine.this_host import cpu_flags
url, store, weights = sys.argv[1:]
try:
    ref = aotc.fetch(f"{url}#mixed", store=store)
    model = aotc.standalone.load(ref, weights=weights, trust=aotc.Trust(allow_untested=True))
    x = numpy.load(f"{weights}.npz")
    difference = float(abs(model(x["x0"]) - x["y0"]).max())
    told = [model.artifact.target, difference]
except EnvironmentMismatchError as error:
    told = [(issue.where, issue.message) for issue in error.issues]
print(json.dumps([best_cpu_target(cpu_flags()), told]))
"""


@pytest.mark.parametrize(
    ("cpu", "best", "taken"),
    [
        (CPUS["cpu:neon"], "cpu:neon", "cpu:neon"),
        (CPUS["cpu:sve256"], "cpu:sve256", "cpu:sve256"),
        (CPUS["cpu:sve128"], "cpu:sve128", "cpu:neon"),  # the bundle has none for it
    ],
)
def test_of_one_bundle_each_machine_fetches_and_runs_what_is_for_it(
    store: Path, packages: Path, tmp_path: Path, cpu: str, best: str, taken: str
) -> None:
    url = store.absolute().as_uri()
    write_case(tmp_path, "mixed", f"{store}#mixed", mixed(), x := torch.randn(2, 9, WIDTH))
    (tmp_path / "mixed.npz").rename(tmp_path / "mixed.safetensors.npz")
    found, (target, difference) = json.loads(
        run(packages, "-c", FETCH, url, tmp_path / "there", tmp_path / "mixed.safetensors", cpu=cpu)
    )
    assert (found, target) == (best, taken) and difference < HALF
    ref = aotc.fetch(f"{url}#mixed", store=tmp_path / "here")
    model = aotc.load(ref, weights=tmp_path / "mixed.safetensors")
    assert abs(model(x) - mixed()(x)).max() < HALF
    assert model.artifact.target == "cpu:x86-64-v3"


def test_a_cpu_below_all_targets_is_told_what_it_lacks(store: Path, packages: Path, tmp_path: Path) -> None:
    url = store.absolute().as_uri()
    found, told = json.loads(run(packages, "-c", FETCH, url, tmp_path / "there", tmp_path / "none", cpu="cortex-a53"))
    assert found is None
    assert ["cpu:neon", "built for cpu:neon, this CPU has no asimdrdm, atomics"] in told
    assert ["cpu:x86-64-v3", "built for architecture x86_64, this machine is aarch64"] in told
