"""`aotc.compile` on a GPU: the first process builds in another one, later ones load; none imports a compiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import run_python

pytestmark = pytest.mark.cuda

PROGRAM = """
import json, sys, torch

BANNED = ("triton", "sympy", "torch._dynamo", "torch._inductor")
before = {name for name in BANNED if name in sys.modules}

import aotc
from gpu_models import Mlp

torch.manual_seed(0)
module = Mlp().eval().cuda()
model = aotc.compile(module, factory="gpu_models:Mlp", store=sys.argv[1], build=sys.argv[2])
with torch.no_grad():
    x = torch.randn(3, 64, device="cuda")
    same = all(torch.allclose(model(x * i), module(x * i), atol=1e-4) for i in range(4))
    for parameter in module.parameters():
        parameter.mul_(2)
    same = same and torch.allclose(model(x), module(x), rtol=1e-3, atol=1e-2)
state = model.explain()
compilers = [name for name in BANNED if name in sys.modules and name not in before]
print(json.dumps([same, state.forms, state.built, len(state.models), compilers, state.notes]))
"""


def test_the_second_process_runs_compiled_code(tmp_path: Path) -> None:
    def told(build: str) -> Any:
        return json.loads(run_python(PROGRAM, tmp_path / "store", build).splitlines()[-1])

    assert told("now") == [True, 1, 1, 1, [], []]
    assert told("never") == [True, 1, 1, 1, [], []]


TRAINING = """
import copy, json, sys, torch, aotc
from gpu_models import Mlp

torch.manual_seed(0)
module = Mlp().cuda()
eager = copy.deepcopy(module)
model = aotc.compile(module, factory="gpu_models:Mlp", train=True, store=sys.argv[1], build=sys.argv[2])
x = torch.randn(3, 64, device="cuda")
same = True
for _ in range(3):
    for each in (model, eager):
        each.zero_grad()
        each(x).square().mean().backward()
    pairs = zip(module.parameters(), eager.parameters(), strict=True)
    same = same and all(torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-5) for a, b in pairs)
print(json.dumps([same, len(model.explain().models), model.explain().notes]))
"""


def test_a_training_loop_is_compiled_in_the_second_process(tmp_path: Path) -> None:
    def told(build: str) -> Any:
        return json.loads(run_python(TRAINING, tmp_path / "store", build).splitlines()[-1])

    assert told("now") == [True, 1, []]
    assert told("never") == [True, 1, []]


BACKGROUND = """
import json, sys, time, torch, aotc
from gpu_models import Mlp

model = aotc.compile(Mlp().eval().cuda(), factory="gpu_models:Mlp", store=sys.argv[1])
with torch.no_grad():
    model(torch.randn(3, 64, device="cuda"))
time.sleep(5)
print(json.dumps(model.explain().building))
"""


def test_a_build_leaves_the_gpu_to_the_program_until_its_end(tmp_path: Path) -> None:
    assert run_python(BACKGROUND, tmp_path / "store").splitlines()[-1] == "false"
    assert json.loads(run_python(PROGRAM, tmp_path / "store", "now").splitlines()[-1])[0] is True


REGIONS = """
import copy, json, sys, torch, aotc

sys.path.insert(0, sys.argv[3])
from remembered_nets import Branches

BANNED = ("triton", "sympy", "torch._dynamo", "torch._inductor")
before = {name for name in BANNED if name in sys.modules}
trains = sys.argv[4] == "train"
torch.manual_seed(0)
module = Branches(width=64).train(trains).cuda()
eager = copy.deepcopy(module)
model = aotc.compile(module, regions="auto", train=trains, store=sys.argv[1], build=sys.argv[2])

def agree(x):
    ours, theirs = model(x), eager(x)
    results = [(ours, theirs)]
    if trains:
        for each, result in ((module, ours), (eager, theirs)):
            each.zero_grad()
            result.square().mean().backward()
        results += [(a.grad, b.grad) for a, b in zip(module.parameters(), eager.parameters(), strict=True)]
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in results)

with torch.set_grad_enabled(trains):
    x = torch.randn(3, 64, device="cuda")
    same = all([agree(x * i) for i in range(1, 5)])
    with torch.no_grad():
        for each in (module, eager):
            for parameter in each.parameters():
                parameter.mul_(2)
    same = same and agree(x)
remembering = model._remembering
codes = getattr(remembering, "training", remembering).known.regions
calls = [each.stats() for code in codes for each in code.call.regions.values()]
compilers = [name for name in BANNED if name in sys.modules and name not in before]
told = [sum(each.calls for each in calls), sum(each.misses for each in calls), model.explain().notes]
print(json.dumps([same, *told, compilers]))
"""


@pytest.mark.parametrize("what", ["inference", "train"])
def test_the_blocks_of_a_model_that_cannot_be_captured_whole_are_compiled(tmp_path: Path, what: str) -> None:
    def told(build: str) -> Any:
        nets = Path(__file__).parents[1] / "remembering"
        return json.loads(run_python(REGIONS, tmp_path / "store", build, nets, what).splitlines()[-1])

    assert told("now") == [True, 3 * 4, 0, [], []]  # the first of five calls is in eager, and builds
    assert told("never") == [True, 3 * 5, 0, [], []]
