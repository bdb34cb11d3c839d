"""`aotc.compile` of models by regions: the module runs, and its repeated blocks are compiled in calls of the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from remembered_nets import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aotc.tools.remembering.region_calls import PartForward, Run, _within

SAME = """
def same(model, *sizes, **kwargs):
    with torch.no_grad():
        return all(torch.allclose(model(x, **kwargs), model.module(x, **kwargs), atol=1e-5)
                   for x in (torch.randn(size, 8) for size in sizes))

def ran(model):
    "The calls of compiled blocks, and the misses of these."
    calls = [each.stats() for code in model._remembering.known.regions for each in code.call.regions.values()]
    return sum(each.calls for each in calls), sum(each.misses for each in calls)
"""


@pytest.mark.compile
def test_a_model_that_cannot_be_captured_whole_is_compiled_by_its_blocks(program: Any) -> None:
    made = "model = aotc.compile(Branches().eval(), build='exit')\n"
    first = program.run(f"{SAME}{made}right = same(model, 2)\ntell(model, right=right)")
    assert (first["right"], first["models"]) == (True, [])

    second = program.run(
        f"{SAME}{made}right = same(model, 2, 2)\n"
        "calls = ran(model)\n"
        "model.module(torch.ones(2, 8)).sum().backward()\n"  # in eager, with gradients, as the module's own calls are
        "right &= model.module.blocks[0].linear.weight.grad is not None\n"
        "model(torch.ones(2, 8)).sum().backward()\n"
        "model.blocks[1].linear.bias.data += 1\n"
        "right &= same(model, 2)\n"
        "before = ran(model)\n"
        "right &= same(model, 5) and same(model, 2, twice=True)\n"  # of another size, and of another kind
        "import copy\n"
        "right &= same(copy.deepcopy(model), 2)\n"
        "noted = model.explain().notes\n"
        "model.blocks[0].linear = torch.nn.Linear(8, 8, bias=False)\n"  # no longer what was built
        "right &= same(model, 2, 2)\n"
        "tell(model, right=right, calls=calls, before=before, noted=noted)"
    )
    name = first["name"]
    assert second["right"]
    assert second["calls"] == [6, 0]
    assert second["before"] == [9, 0]
    assert "cannot be captured whole" in "".join(second["noted"])
    assert program.memory(name)["kinds"][0]["regions"] == ["blocks.*"]
    assert second["compilers"] == []


@pytest.mark.compile
def test_regions_that_aotc_chooses_train_in_each_form_of_call(program: Any) -> None:
    made = "net = Branches(); model = aotc.compile(net, regions='auto', train=True, build='exit')\n"
    steps = (
        "import copy\neager = copy.deepcopy(net)\n"
        "def agree(size, **kwargs):\n"
        "    x = torch.randn(size, 8)\n"
        "    for each in (model, eager):\n"
        "        each.zero_grad()\n"
        "        (each(x, **kwargs) ** 2).mean().backward()\n"
        "    return all(torch.allclose(a.grad, b.grad, atol=1e-6) "
        "for a, b in zip(net.parameters(), eager.parameters(), strict=True))\n"
        "right = agree(2) and agree(2, twice=True)\n"
        "trained = model._remembering.training\n"
        "calls = [code.call.stats().calls for code in trained.known.regions]\n"
        "tell(model, right=right, calls=calls)"
    )
    first = program.run(made + steps)
    assert (first["right"], first["calls"], first["forms"]) == (True, [], 2)
    second = program.run(made + steps)
    assert (second["right"], second["calls"]) == (True, [3, 3])
    assert program.memory(second["name"])["kinds"][1]["regions"] == ["blocks.*"]


def test_patterns_that_match_nothing_are_told_by_the_build(program: Any) -> None:
    told = program.run(
        "model = aotc.compile(Branches().eval(), regions=['layers.*'], build='now')\n"
        "with torch.no_grad(): model(torch.ones(2, 8))\ntell(model)"
    )
    assert "the region `layers.*` matches no submodule" in told["failed"][told["name"]]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_runs_again_what_its_part_ran_and_other_calls_run_in_eager(reentrant: bool) -> None:
    block, ran = Block(2), []

    def code(x: Tensor) -> Tensor:
        ran.append("code")
        return Block.forward(block, x)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(block, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    model, x = Model(), torch.ones(1, 2, requires_grad=True)
    block.__dict__["forward"] = PartForward(block)
    result = _within(Run({id(block): code}), model, (x,), {})
    assert ran == ["code"]
    result.sum().backward()
    assert ran == ["code", "code"]
    model(x).sum().backward()  # as `model.module(x)` of what `aotc.compile` returned
    block.eval()(x)
    assert ran == ["code", "code"]
    again = _within(Run({id(block.train()): code}), model, (x,), {})
    with torch.no_grad():
        _within(Run({}), block.eval(), (x,), {})  # an evaluation in between
    block.train()
    again.sum().backward()
    assert len(ran) == 4
