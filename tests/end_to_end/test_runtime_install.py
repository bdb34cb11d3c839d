"""What `pip install aotc` brings serves without torch, and with the extra `torch` through it; the command line asks for
its own extra."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import click
import msgspec
import pytest
import torch
from packaging.requirements import Requirement
from processes import ROOT, ZOO
from safetensors.torch import save_file
from sample_artifacts import stored_artifact
from services import started

import aotc
from aotc.machine.environment import this_environment
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference
from aotc.store.tagging import set_tags
from examples.models import transformer_block

SERVE = """
import sys
from importlib.util import find_spec

import torch
import aotc, models

store, checkpoint = sys.argv[1:]
assert aotc.__file__.startswith(sys.prefix), aotc.__file__
assert not [name for name in ("click", "rich", "yaml", "pygments", "elftools") if find_spec(name)]
torch.manual_seed(0)
module = models.Linear().eval()
x = torch.randn(2, 8)
with torch.no_grad():
    for compiled in (aotc.load("linear", module, store=store), aotc.load("linear", weights=checkpoint, store=store)):
        assert torch.allclose(compiled(x), module(x), atol=1e-5)
print("served")
"""


def required(dist: Distribution, extra: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """The distributions that `dist` requires here with an extra ("" for none), those that they require, and so on."""
    for requirement in map(Requirement, dist.requires or ()):
        wanted = not requirement.marker or requirement.marker.evaluate({"extra": extra})
        if requirement.name not in found and wanted:
            found[requirement.name] = distribution(requirement.name)
            required(found[requirement.name], "", found)
    return found


def link(dists: Iterable[Distribution], folder: Path) -> None:
    """Links to what is installed here, which stand for downloads of the same."""
    for dist in dists:
        for top in {path.parts[0] for path in dist.files or () if path.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(dist.locate_file(top))))


PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def done(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    done(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("aotc-*.whl")
    return built


def installed(wheel: Path, environment: Path, extra: str) -> Path:
    """Python in a new virtual environment with aotc's wheel, and all that it requires with an extra."""
    python = environment / "bin" / "python"
    done(sys.executable, "-m", "venv", "--without-pip", environment)
    done(*PIP, "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    (dist,) = packages.glob("aotc-*.dist-info")
    link(required(Distribution.at(dist), extra, {}).values(), packages)
    return python


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(wheel, tmp_path_factory.mktemp("runtime") / "environment", "torch")


@pytest.fixture(scope="module")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without an extra, and so without torch."""
    return installed(wheel, tmp_path_factory.mktemp("bare") / "environment", "")


def run(
    python: Path, *arguments: object, folder: Path, packages: Path | None = None
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, filter(None, (ZOO, packages))))
    environment = {"PATH": "", "HOME": str(folder), "PYTHONPATH": path}
    command = list(map(str, (python, *arguments)))
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


# -- without torch ----------------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
from importlib.util import find_spec
from pathlib import Path

import aotc, aotc.standalone

remote, folder = sys.argv[1], Path(sys.argv[2])
assert aotc.__file__.startswith(sys.prefix), aotc.__file__
others = ("torch", "numpy", "click", "safetensors", "filelock")
assert not [name for name in others if find_spec(name)]
fetched = aotc.fetch(remote, store=folder / "fetched")
model = aotc.standalone.load(fetched, weights=folder / "model.safetensors")
x = memoryview((folder / "x").read_bytes()).cast("f", [4, 128, 256])
(folder / "y").write_bytes(model(x).tobytes())
try:
    aotc.load(fetched)
except aotc.TorchMissingError as error:
    print(error)
try:
    aotc.fetch(remote, signed_after=0)
except aotc.BindError as error:
    print(error.hint)
"""


def test_without_an_extra_an_artifact_is_fetched_and_served_without_torch(
    bare_python: Path, quickstart_store: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module, x = transformer_block(width=256, heads=4).eval(), torch.randn(4, 128, 256)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "x").write_bytes(x.numpy().tobytes())
    ran = run(bare_python, "-c", WITHOUT_TORCH, f"file://{quickstart_store}#quickstart", tmp_path, folder=tmp_path)
    message, install, moved = ran.stdout.splitlines()
    assert (ran.returncode, message) == (0, "aotc.load needs torch, which is not installed"), ran.stderr
    assert install.startswith("  hint: pip install 'torch") and "pip install 'aotc[torch]'" in install
    assert moved == "write trust=aotc.Trust(signed_after=0)"
    with torch.no_grad():
        expected = module(x)
    given = torch.frombuffer(bytearray((tmp_path / "y").read_bytes()), dtype=torch.float32).view(4, 128, 256)
    assert torch.allclose(given, expected, atol=1e-4)


def test_the_command_line_does_without_torch_what_needs_none(
    bare_python: Path, quickstart_store: Path, zoo_store: Path, tmp_path: Path
) -> None:
    (packages := tmp_path / "packages").mkdir()
    for name in ("click", "rich", "PyYAML"):
        link([distribution(name), *required(distribution(name), "", {}).values()], packages)
    (tmp_path / "manifest.yaml").write_text("version: 1\nmodels: {one: {factory: 'torch.nn:Linear'}}\n")
    fetch = ("fetch", f"file://{quickstart_store}#quickstart", "--store", "fetched")
    of_zoo = ("--store", zoo_store)
    for arguments, code, told in (
        (("--help",), 0, "Compile PyTorch models"),
        (("verify", "--help"), 0, "Compare compiled code with eager"),
        (fetch, 0, "fetched fetched#quickstart:latest"),
        (("ls", "--store", "fetched"), 0, "quickstart"),
        (("inspect", "fetched#quickstart"), 0, "fits: it can run without torch"),
        (("fsck", "--store", "fetched"), 0, ""),
        (("doctor", "--store", "fetched"), 0, "aotc.standalone can run code for CPUs"),
        (("doctor", "fetched#quickstart"), 0, "aotc.standalone.load takes cpu:"),
        (("doctor", "bag", *of_zoo), 1, "it calls aoti_torch_cpu__embedding_bag"),
        (("doctor", "manifest.yaml"), 1, "not installed: aotc.load and builds need it"),
        (("verify", "fetched#quickstart"), 2, "this command needs torch, which is not installed"),
        (("build", "manifest.yaml"), 2, "pip install 'aotc[torch]'"),
    ):
        ran = run(bare_python, "-m", "aotc", *arguments, folder=tmp_path, packages=packages)
        assert ran.returncode == code and told in ran.stdout + ran.stderr, (arguments, ran.stdout + ran.stderr)


def test_the_wheel_is_for_every_python_from_3_11_on(wheel: Path) -> None:
    """Both extensions are of the limited API, as its tag says. The runtime for C has no Python in it."""
    assert re.fullmatch(r"aotc-[\d.]+-cp311-abi3-linux_x86_64\.whl", wheel.name)
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (described,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL")]
    assert "Tag: cp311-abi3-linux_x86_64" in described.splitlines()
    assert {name for name in names if name.endswith(".so")} == {
        "aotc/core/_cpu.abi3.so",
        "aotc/core/_evaluator.abi3.so",
        "aotc/core/_libaotc.abi3.so",
    }
    assert "aotc/core/cpu/aotc.h" in names


# -- with torch -------------------------------------------------------------------------------------------------------


def test_an_artifact_is_served_by_the_wheel_with_torch(python: Path, zoo_store: Path, zoo: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file(zoo.Linear().state_dict(), tmp_path / "model.safetensors")
    ran = run(python, "-c", SERVE, zoo_store, tmp_path / "model.safetensors", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "served\n"), ran.stderr


def test_the_last_stage_of_the_container_serves(python: Path, quickstart_store: Path, tmp_path: Path) -> None:
    """Its files, its variables and its CMD, in this environment in the place of an image, with an empty PATH."""
    *_, stage, last = (ROOT / "examples" / "container" / "Dockerfile").read_text().split("\nFROM ")
    assert stage.startswith("base AS service") and last.startswith("service\n")
    assert re.findall(r"RUN (.+)", stage) == ['pip install --no-cache-dir "$(echo /wheels/aotc-*.whl)[torch,sign]"']
    app, store = tmp_path / "app", tmp_path / "artifacts"
    for *sources, target in (line.split() for line in re.findall(r"^COPY (?!--)(.+)$", stage, re.MULTILINE)):
        (app / target).mkdir(parents=True, exist_ok=True)
        for source in sources:
            shutil.copy(ROOT / source, app / target)
    aotc.fetch(f"file://{quickstart_store}#quickstart", store=store)
    set_tags(str(store), parse_reference("quickstart"), ["v1"])
    assert "ENV AOTC_STORE=/artifacts" in stage and "COPY --from=builder /artifacts /artifacts" in last
    command = json.loads(re.search(r"^CMD (.+)$", stage, re.MULTILINE)[1])  # type: ignore[index]
    assert command[0] == "python"
    here = ["--host", "127.0.0.1", "--port", "0"]
    with started([*command[1:], *here], tmp_path, python=python, cwd=app, AOTC_STORE=str(store)) as running:
        status, answer = running.predict({"batch": 4})
        assert status == 200 and len(answer["y"]) == 4
        assert running.request("GET", "/healthz")[0] == 200


def test_the_command_line_names_the_extra_that_it_needs(python: Path, tmp_path: Path) -> None:
    for command in ((python, "-m", "aotc"), (python.with_name("aotc"),)):
        ran = run(*command, "ls", folder=tmp_path)
        assert ran.returncode == 2
        assert "`click`, which is not installed" in ran.stderr
        assert "hint: pip install 'aotc[build]'" in ran.stderr


def test_doctor_needs_click_and_no_other_extra(python: Path, work: Path, tmp_path: Path) -> None:
    """What else is missing is a finding."""
    (tmp_path / "click").symlink_to(Path(click.__file__).parent)  # found there, since it is the working folder
    store = Store.create(tmp_path / "store")
    here = this_environment()
    artifact = stored_artifact(store, work, (1,), environment=msgspec.structs.replace(here, cpu_features=()))
    publish(store, "tiny", "latest", [artifact])
    (tmp_path / "manifest.yaml").touch()
    for arguments, code, told in (
        (("--store", store.path), 0, "pyelftools, Pygments, PyYAML, rich"),
        (("tiny", "--store", store.path), 0, "aotc.load takes cpu:x86-64-v3"),
        (("manifest.yaml",), 1, "hint: pip install 'aotc[build]'"),
        (("oci://127.0.0.1:9/team/tiny",), 1, "hint: pip install 'requests>="),
    ):
        ran = run(python, "-m", "aotc", "doctor", *arguments, folder=tmp_path)
        assert ran.returncode == code and told in ran.stdout, ran.stdout + ran.stderr


def test_the_guides_are_in_the_wheel(python: Path) -> None:
    (installed,) = python.parents[1].glob("lib/python*/site-packages/aotc")
    guides = {path.relative_to(ROOT / "aotc") for path in (ROOT / "aotc").rglob("*.md")}
    assert guides and guides == {path.relative_to(installed) for path in installed.rglob("*.md")}
