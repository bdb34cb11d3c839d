"""Modules to which other libraries do something: which code ran, beside eager's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from remembered_nets import Net, Scaled

import aotc
from aotc.errors import ManifestError
from aotc.tools.remembering.making.made_from import made_from
from aotc.tools.remembering.making.wrapped_forward import WrappedForward, wrapped_forward
from aotc.tools.remembering.memory.identity import differences, facts_of, structure_facts, structure_of


def prepared(model: Any) -> Any:
    """As accelerate leaves it, with bf16."""
    return pytest.importorskip("accelerate").Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)


@pytest.mark.compile
def test_accelerate_s_mixed_precision_trains_a_module_that_counts_by_compiled_code(program: Any) -> None:
    pytest.importorskip("accelerate")
    told = program.run(
        "from accelerate import Accelerator\n"
        "from copy import deepcopy\n"
        "def prepared(model):\n"
        "    acc = Accelerator(cpu=True, mixed_precision='bf16')\n"
        "    return acc, *acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "def steps(acc, model, optimizer):\n"
        "    losses = []\n"
        "    for number in range(4):\n"
        "        y = model(torch.full((4, 8), number / 4)); acc.backward(y.square().sum()); optimizer.step()\n"
        "        optimizer.zero_grad(); losses.append((str(y.dtype), float(y.float().sum())))\n"
        "    return losses\n"
        "net = Counted()\n"
        "acc, eager, of_eager = prepared(deepcopy(net))\n"
        "want = steps(acc, eager, of_eager)\n"
        "acc, model, optimizer = prepared(aotc.compile(deepcopy(net), train=True))\n"
        "model(torch.ones(4, 8)); ready = model.wait(); before = model.stats()\n"
        "seen = steps(acc, model, optimizer); after = model.stats()\n"
        "ran = [after.compiled - before.compiled, after.eager - before.eager]\n"
        "tell(model, ready=ready, want=want, seen=seen, ran=ran, counts=(eager.seen, model.seen))"
    )
    assert (told["ready"], told["ran"]) == (True, [4, 0])
    assert told["counts"] == [4, 5]  # of calls, compiled ones too
    assert [dtype for dtype, _ in told["seen"]] == [dtype for dtype, _ in told["want"]] == ["torch.float32"] * 4
    for (_, seen), (_, want) in zip(told["seen"], told["want"], strict=True):
        assert seen == pytest.approx(want, rel=0.02, abs=0.02)


def test_known_wrappers_run_around_another_call() -> None:
    net = prepared(Scaled())
    wrapped = wrapped_forward(net)
    assert wrapped is not None and wrapped is wrapped_forward(net)
    modes: list[bool] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_autocast_enabled("cpu"))
        return x.bfloat16()

    assert wrapped.around(inner)(torch.ones(2)).dtype is torch.float32
    assert modes == [True]
    assert isinstance(vars(net)["forward"], WrappedForward)
    assert net(torch.ones(2, 8)).dtype is torch.float32  # and the module is called as before
    assert name_facts(net) == name_facts(Scaled())


def name_facts(net: torch.nn.Module) -> dict[str, str]:
    return {name: value for name, value in facts_of(net, {}).items() if not name.startswith("code of")}


def test_a_forward_that_was_replaced_is_told_before_anything_is_built(tmp_path: Path) -> None:
    net = Net().eval()
    net.head.forward = lambda x: x  # type: ignore[method-assign]
    assert wrapped_forward(net) is None
    with pytest.raises(ManifestError, match=r"`head.forward` was replaced"):
        made_from(net, None, None)
    model = aotc.compile(net, store=tmp_path, build="never")
    with torch.no_grad():
        assert model(torch.zeros(1, 2, dtype=torch.int64)).shape == (1, 8)


def test_what_a_factory_does_not_make_is_told_by_name() -> None:
    net = Scaled()
    facts = structure_of(facts_of(net, {}))
    assert facts == structure_facts(Scaled(factor=2.0))
    told = list(differences(facts, structure_facts(Scaled(width=9))))
    assert any(line.startswith("tensor linear.weight was [8, 8] and is [9, 9]") for line in told)
