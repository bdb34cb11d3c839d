"""What `pip install aotc` brings, without extras, loads and serves; the command line asks for its own extra."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

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

SERVE = """
import sys
from importlib.util import find_spec

import torch
import aotc, models

store, checkpoint = sys.argv[1:]
assert aotc.__file__.startswith(sys.prefix), aotc.__file__
assert not [name for name in ("click", "rich", "yaml", "jsonschema", "pygments", "elftools") if find_spec(name)]
torch.manual_seed(0)
module = models.Linear().eval()
x = torch.randn(2, 8)
with torch.no_grad():
    for compiled in (aotc.load("linear", module, store=store), aotc.load("linear", weights=checkpoint, store=store)):
        assert torch.allclose(compiled(x), module(x), atol=1e-5)
print("served")
"""


def required(dist: Distribution, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """The distributions that `dist` requires here without extras, those that they require, and so on, by name."""
    for requirement in map(Requirement, dist.requires or ()):
        if requirement.name not in found and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
            found[requirement.name] = distribution(requirement.name)
            required(found[requirement.name], found)
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python in a new virtual environment with aotc's wheel, and all that it requires.

    Links to what is installed here stand for downloads of the same.
    """
    folder = tmp_path_factory.mktemp("runtime")
    environment, wheels = folder / "environment", folder / "wheels"
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    wheel = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, ROOT)
    for command in (
        (sys.executable, "-m", "venv", "--without-pip", environment),
        (*pip, *wheel),
        (*pip, "--python", environment / "bin" / "python", "install", "--no-deps", "--no-index", "-f", wheels, "aotc"),
    ):
        subprocess.run(list(map(str, command)), check=True, timeout=300)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    (installed,) = packages.glob("aotc-*.dist-info")
    for dist in required(Distribution.at(installed), {}).values():
        for top in {path.parts[0] for path in dist.files or () if path.parts[0] not in ("..", "__pycache__")}:
            (packages / top).symlink_to(Path(str(dist.locate_file(top))))
    return environment / "bin" / "python"


def run(python: Path, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "", "HOME": str(folder), "PYTHONPATH": str(ZOO)}
    command = list(map(str, (python, *arguments)))
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_an_artifact_is_served_by_the_wheel_without_extras(
    python: Path, zoo_store: Path, zoo: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    save_file(zoo.Linear().state_dict(), tmp_path / "model.safetensors")
    ran = run(python, "-c", SERVE, zoo_store, tmp_path / "model.safetensors", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "served\n"), ran.stderr


def test_the_last_stage_of_the_container_serves(python: Path, quickstart_store: Path, tmp_path: Path) -> None:
    """Its files, its variables and its CMD, in this environment in the place of an image, with an empty PATH."""
    *_, stage, last = (ROOT / "examples" / "container" / "Dockerfile").read_text().split("\nFROM ")
    assert stage.startswith("base AS service") and last.startswith("service\n")
    assert re.findall(r"RUN (.+)", stage) == ['pip install --no-cache-dir "$(echo /wheels/aotc-*.whl)[sign]"']
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
        (("--store", store.path), 0, "not installed: jsonschema"),
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
