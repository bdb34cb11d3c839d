"""A module that changes and changes back: which code ran in each call, beside eager's values."""

from __future__ import annotations

from typing import Any

import pytest

STATES = """
import copy, random
from contextlib import contextmanager

@contextmanager
def doubled(net):
    "It has code of its own."
    net.factor = 2.0; yield; net.factor = 1.0

@contextmanager
def hooked(net):
    hook = net.linear.register_forward_hook(lambda *given: given[-1] + 1); yield; hook.remove()

@contextmanager
def wrapped(net):
    own = net.linear; net.linear = torch.nn.Sequential(own, torch.nn.Tanh()).eval(); yield; net.linear = own

@contextmanager
def renewed(net):
    "Another part of the same form: the code is loaded for it."
    net.linear = torch.nn.Linear(8, 8).eval(); yield

@contextmanager
def cast(net):
    net.double(); yield; net.float()

@contextmanager
def as_built(net):
    yield

def called(model, x):
    "What ran, and whether it gave what eager gives."
    x = x.to(next(model.parameters()).dtype)
    with torch.no_grad():
        before, y = model.stats().compiled, model(x)
        return model.stats().compiled - before, torch.allclose(y, model.module(x), atol=1e-6)
"""


@pytest.mark.compile
def test_each_state_of_a_module_runs_its_own_code(program: Any) -> None:
    program.above = STATES
    told = program.run(
        "model = aotc.compile(Scaled().eval(), build='exit')\n"
        "b = torch.randn(8, 9); x = b[:, :-1]\n"
        "called(model, x); first = model.wait()\n"
        "with doubled(model): called(model, x); second = model.wait()\n"
        "seen = []\n"
        "draw = random.Random(0)\n"
        "for state in draw.choices([doubled, hooked, wrapped, renewed, cast, as_built], k=60):\n"
        "    with state(model): seen.append((state.__name__, *called(model, x)))\n"
        "x = x.t().contiguous().t()\n"
        "with doubled(model): seen.append(('doubled', *called(model, x)))\n"
        "seen.append(('as_built', *called(model, x)))\n"
        "ema = torch.optim.swa_utils.AveragedModel(model).eval()\n"
        "ema.update_parameters(model)\n"
        "with torch.no_grad(): model.linear.weight.mul_(2.0)\n"
        "ema.update_parameters(model)\n"
        "copies = [called(each, x) for each in (ema.module, copy.deepcopy(model), copy.copy(model), model)]\n"
        "with doubled(ema.module): copies.append(called(ema.module, x))\n"
        "with torch.no_grad(): far = not torch.allclose(ema(x), model(x), atol=1e-3)\n"
        "tell(model, copies=copies, far=far, ready=(first, second), seen=seen, rows=model.stats().forms)\nos._exit(0)"
    )
    assert told["ready"] == [True, True]
    compiled = {"doubled", "renewed", "as_built"}
    wrong = [(state, ran, same) for state, ran, same in told["seen"] if not same or ran != (state in compiled)]
    assert wrong == []
    assert told["copies"] == [[1, True]] * 5 and told["far"]
    rows = {form: (compiled, eager) for form, _, compiled, eager, _ in told["rows"]}
    assert len(rows) == len(told["rows"]) == 2  # one for each form, whatever ran it
    in_eager = [state for state, ran, _ in told["seen"] if not ran]
    assert rows["float32[8, 8]"] == (len(told["seen"]) - len(in_eager) + 2, 2 + len(in_eager) - in_eager.count("cast"))
    assert rows["float64[8, 8]"] == (0, in_eager.count("cast"))
