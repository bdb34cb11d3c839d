"""Programs that use `aotc.compile`, each in a process of its own, with a store and a folder for the test alone."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_python import run_forked
from processes import start, wait_until_none_names

HERE = Path(__file__).parent

HEAD = """
import json, os, sys, torch, aotc
from remembered_nets import *
torch.manual_seed(0)

def called(model, *sizes, **kwargs):
    "Whether each call gives what the module gives."
    with torch.no_grad():
        for batch, seq in sizes:
            ids = torch.randint(0, 50, (batch, seq))
            if not torch.allclose(model(ids, **kwargs), model.module(ids, **kwargs), atol=1e-6):
                return False
    return True

def tell(model, **more):
    compilers = [n for n in ("torch._dynamo", "torch._inductor", "triton", "sympy") if n in sys.modules]
    print(json.dumps({**model.explain()._asdict(), "compilers": compilers, **more}), flush=True)
"""


class Program:
    """`run(code)`: what the program told, with its log as `log`. `above` stands before the code, for imports too."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.above = folder, ""
        self.store = folder / "store"
        self.files = self.store / ".aotc" / "remembered"
        shutil.copy(HERE / "remembered_nets.py", folder)

    def write(self, code: str) -> Path:
        script = self.folder / "program.py"
        lines = "".join(f"    {line}\n" for line in code.strip().split("\n"))
        script.write_text(f"{HEAD}\n{self.above}\nif __name__ == '__main__':\n{lines}")
        return script

    def start(self, code: str, **changes: str) -> subprocess.Popen[str]:
        return start(self.write(code), cwd=self.folder, AOTC_STORE=str(self.store), AOTC_LOG="info", **changes)

    def result(self, ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        assert ran.returncode == 0, ran.stdout + ran.stderr
        told = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
        return {**told[-1], "log": ran.stderr}

    def run(self, code: str, **changes: str) -> dict[str, Any]:
        script, own = self.write(code), {"AOTC_STORE": str(self.store), "AOTC_LOG": "info"}
        return self.result(run_forked(script.read_text(), file=script, cwd=self.folder, **{**own, **changes}))

    def memory(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.files / f"{name}.json").read_bytes())
        return found


@pytest.fixture(scope="session")
def programs() -> type[Program]:
    """Of a folder: for tests that share the runs of one."""
    return Program


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    yield Program(tmp_path)
    assert wait_until_none_names("building.build_process", 60, f"AOTC_STORE={tmp_path / 'store'}") == []
