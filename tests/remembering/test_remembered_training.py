"""`aotc.compile(…, train=True)`: a training loop, whose steps and evaluations are compiled."""

from __future__ import annotations

from typing import Any

import pytest

USED = "model = aotc.compile(Net(), train=True, build='exit')\n"

LOOP = """
import copy
def steps(model, count):
    'The losses and the gradients of so many steps of SGD.'
    torch.manual_seed(1)
    optimizer = aotc.optim.SGD(model.parameters(), lr=0.01)
    found = []
    model.train()
    for _ in range(count):
        loss = model(torch.randint(0, 50, (2, 16))).square().mean()
        loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found

def agree(model, count=3):
    eager = steps(copy.deepcopy(model.module), count)
    return all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(steps(model, count), eager, strict=True))
"""


@pytest.mark.compile
def test_steps_and_evaluations_are_compiled_in_the_second_run_and_give_eager_s_gradients(program: Any) -> None:
    first = program.run(f"{LOOP}{USED}same = agree(model)\nmodel.eval()\nsame &= called(model, (2, 16))\n{TELL}")
    assert (first["same"], first["training"], first["models"], first["compilers"]) == (True, [], [], [])

    second = program.run(
        f"{LOOP}{USED}same = True\n"
        "for _ in range(2):\n"
        "    same &= agree(model)\n"
        "    model.eval()\n"
        "    same &= called(model, (2, 16))\n"
        "aotc.compile(model.module.train()).wait()\n"  # it loads nothing for another mode, and logs no failure
        f"{TELL}"
    )
    assert (second["forms"], second["built"], second["failed"]) == (1, 1, {})
    assert (second["same"], second["compilers"], second["notes"]) == (True, [], [])
    assert second["models"] == [first["name"]]
    (trained,) = second["training"]
    assert trained.startswith("net-train-")
    assert program.memory(trained)["builds"] == 1

    # a parameter that the factory's module freezes gets its gradient all the same: in eager, and told
    frozen = program.run(
        f"{LOOP}model = aotc.compile(Net(), train=True, factory='remembered_nets:frozen', build='now')\n"
        f"same = agree(model)\n{TELL}"
    )
    assert frozen["same"]
    assert "requires a gradient, and did not at build" in frozen["log"]


TELL = "model.train()\ntraining = model.explain().models\nmodel.eval()\ntell(model, same=same, training=training)"
