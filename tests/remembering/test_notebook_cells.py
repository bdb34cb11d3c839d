"""`aotc.compile` of a class that a notebook's cell defines: it is built, and loaded by the notebook's next run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, finish, start

RUNNER = Path(__file__).with_name("cells.py")

DEFINITIONS = (
    """
import torch, functools
from torch import nn
import torch.nn.functional as F
from math import pi as PI
SCALE = 2.0
DTYPE = torch.float32
x = "a name that forward has for itself"
""",
    """
def act(value):
    return F.relu(value) * SCALE

class Base(nn.Module):
    pass
""",
    """
# %timeit is a magic
class Net(Base):
    def __init__(self, width: int = 8, layers=2):
        super().__init__()
        self.width, self.layers = width, layers
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = act(block(x)).to(DTYPE)
        return x * PI
""",
)


def run(folder: Path, *cells: str) -> Any:
    """What the last cell told as JSON."""
    path = folder / "notebook.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]}))
    changes = {"AOTC_STORE": str(folder / "store"), "AOTC_CACHE_DIR": str(folder / "cache")}
    ran = finish(start(RUNNER, path, cwd=folder, **changes))
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1]) | {"log": ran.stderr}


CALLED = """
import aotc, json, sys
torch.manual_seed(0)
model = aotc.compile(Net().eval(), build="exit")
"""
CALLS = """
with torch.no_grad():
    for size in (3, 3):
        y = model(torch.ones(size, 8))
        same = torch.allclose(y, model.module(torch.ones(size, 8)), atol=1e-6)
"""
TELL = "print(json.dumps({'same': same, 'calls': model.stats()[:2], 'name': model.explain().name, 'notes': "
TELL += "model.explain().notes, 'class': type(model.module).__module__}))"


@pytest.mark.compile
def test_a_class_of_a_cell_is_built_and_loaded_in_the_next_run(tmp_path: Path) -> None:
    first = run(tmp_path, *DEFINITIONS, CALLED, CALLS, TELL)
    assert (first["same"], first["calls"], first["class"]) == (True, [0, 2], "__main__")
    called = CALLED.replace("exit", "never")
    second = run(tmp_path, *DEFINITIONS, "other = object()", called, CALLS, "SCALE = 3.0", CALLS, TELL)
    assert second["calls"] == [2, 2], second
    assert second["same"] is True  # a global variable that a cell changes later is seen by each call
    third = run(tmp_path, *DEFINITIONS[:2], DEFINITIONS[2].replace("* PI", "- PI"), called, CALLS, TELL)
    assert third["name"] != first["name"] and third["calls"] == [0, 2]


def test_what_no_file_can_have_is_named(tmp_path: Path) -> None:
    cell = "import torch\nfrom torch import nn\nTABLE = torch.ones(3)\nclass Net(nn.Module):\n"
    cell += "    def forward(self, x): return x + TABLE.sum()"
    told = run(tmp_path, cell, CALLED, CALLS, TELL)
    assert told["calls"] == [0, 2]
    assert "Net is defined in a notebook or at a prompt and reads `TABLE`, which is Tensor" in told["notes"][0]
    assert "give it to the constructor" in told["notes"][0]


@pytest.mark.compile
def test_the_notebook_of_the_examples_runs_and_its_second_run_is_compiled(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples/notebook/compile.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    tell = "import json; print(json.dumps({'calls': model.stats()[:2]}))"
    assert run(tmp_path, *cells, tell)["calls"] == [1, 2]
    assert run(tmp_path, *cells, tell)["calls"] == [2, 1]
