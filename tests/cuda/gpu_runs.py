"""Processes of the tests on a GPU, and what the tests compare with."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import aotc
from aotc.manifest import read_manifest
from aotc.models.factory import build_module
from aotc.provenance import BuiltArtifact
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import Reference

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TIMEOUT = 300
"""Seconds that any process of a test may take."""


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with aotc, the models and helpers of tests importable; None takes a variable away."""
    own, others = (ROOT, FOLDER, FOLDER.parent), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys([*map(str, own), *filter(None, others)])
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **changes}
    return {name: value for name, value in merged.items() if value is not None}


def start_aotc(*arguments: object, output: Path, **changes: str | None) -> subprocess.Popen[bytes]:
    """Start the command line; what it prints goes to `output`, its errors to `output` with `.log` added."""
    with output.open("wb") as out, output.with_name(output.name + ".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "aotc", *map(str, arguments)],
            cwd=ROOT,
            env=environment(**changes),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
        )


def run_python(code: str, *arguments: object, **changes: str | None) -> str:
    """What `code` prints, in a fresh process; an AssertionError with its errors where it fails."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        cwd=FOLDER,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@dataclass(frozen=True)
class Gpu:
    """The session's store, and modules of its models on a GPU."""

    store: Path

    def module(self, model: str, device: str = "cuda:0") -> nn.Module:
        """A module as the manifest's factory makes it, in eval mode; the weights are the same each time."""
        manifest = read_manifest(FOLDER / "manifest.yaml", [model])
        return build_module(manifest.models[model], manifest.folder).to(device)

    def load(self, model: str, module: nn.Module, **options: Any) -> Any:
        return aotc.load(f"{self.store}#{model}", module, **options)

    def loaded(self, model: str, **options: Any) -> tuple[Any, nn.Module]:
        """A loaded model, and a twin of its module for eager."""
        module = self.module(model)
        return self.load(model, module, **options), copy.deepcopy(module)

    def artifact(self, model: str) -> BuiltArtifact:
        store = Store.open(self.store)
        (entry,) = read_bundle(store, Reference(None, model, tag="latest")).artifacts
        return read_built(store, entry.digest)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether the root mean square of the difference is within a share of that of the expected values."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    difference = (actual.double() - expected.double()).norm()
    return bool(difference <= tolerance * expected.double().norm())


def inputs(count: int, *shape: int, device: str = "cuda:0") -> list[Tensor]:
    """Different random inputs."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(device) for _ in range(count)]


def all_close(run: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor], xs: Sequence[Tensor]) -> bool:
    return all(close(run(x), expected(x)) for x in xs)
