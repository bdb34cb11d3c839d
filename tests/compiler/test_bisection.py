"""`aotc verify --bisect` names planted faults: an operator's decomposition, a cast, a weight."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotc.compiler.wrong_code.ladder import DECOMPOSED, LOWERED, walk
from aotc.compiler.wrong_code.lowering import Lowering
from aotc.compiler.wrong_code.subgraphs import Part, in_eager
from aotc.compiler.wrong_code.trials import BudgetSpent, CpuBudget, Ended, in_fork
from aotc.machine.targets import parse_target
from aotc.tools.bisection.divergence import first_divergence

aten = torch.ops.aten


class Model(nn.Module):
    """Three operators before and after the one in question."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.inner = body, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.inner(x).tanh()) + x.sin()


class Rounding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 3).bfloat16().float() + 1


def exported(body: Any) -> tuple[Any, Sequence[Any]]:
    """The graph of the model, and its inputs: weights first."""
    torch.manual_seed(0)
    module, x = (body if isinstance(body, Rounding) else Model(body)).eval(), torch.randn(8, 16)
    program = torch.export.export(module, (x,))
    return program.graph_module, [*module.state_dict().values(), x]


def lowering(**options: Any) -> Lowering:
    return Lowering(parse_target("cpu:x86-64-v3"), options, frozenset())


def test_a_wrong_decomposition_is_named_with_both_numbers_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import decomposition

    def doubled_at_the_end(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x) * torch.where(x > 0.5, 1.01, 1.0)

    for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
        monkeypatch.setitem(table, aten.silu.default, doubled_at_the_end)
    found = walk(lowering(), *exported(nn.functional.silu))
    assert [(stage.name, stage.outcome) for stage in found.stages] == [(DECOMPOSED, "wrong")]
    assert found.culprit is not None and found.culprit.numbers is not None
    assert (found.culprit.kind, found.culprit.names) == ("operator", ("aten.silu.default",))
    assert "test_bisection.py" in found.culprit.line and "forward" in found.culprit.line
    assert "`doubled_at_the_end` at test_bisection.py:" in found.culprit.note
    numbers = found.culprit.numbers
    assert numbers.eager == pytest.approx(numbers.reference, rel=1e-5)
    assert numbers.compiled == pytest.approx(numbers.eager * 1.01, rel=1e-5)
    assert [(remedy.whole, "aten.silu.default" in remedy.name) for remedy in found.remedies] == [(True, True)]


def test_a_wrong_gradient_is_named_with_the_operator_of_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the decomposition of an operator of the backward."""
    from torch._inductor import decomposition

    def wrong_at_the_end(gradient: Tensor, x: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        return gradient * s * (1 + x * (1 - s)) * torch.where(x > 0.5, 1.01, 1.0)

    for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
        monkeypatch.setitem(table, aten.silu_backward.default, wrong_at_the_end)
    graph, inputs = exported(nn.functional.silu)
    assert [stage.outcome for stage in walk(lowering(), graph, inputs).stages] == ["right", "right"]
    found = walk(lowering(), graph, inputs, [0, 1])
    assert [(stage.name, stage.outcome) for stage in found.stages] == [(DECOMPOSED, "wrong")]
    assert found.culprit is not None and found.culprit.numbers is not None
    assert (found.culprit.kind, found.culprit.names) == ("operator", ("aten.silu.default",))
    assert found.culprit.note == "the gradient of tanh"
    assert "test_bisection.py" in found.culprit.line and "forward" in found.culprit.line
    assert found.culprit.numbers.compiled == pytest.approx(found.culprit.numbers.reference * 1.01, rel=1e-5)


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lowering]:
    """A compiler whose code ends its process where it has a `silu`, and is eager's elsewhere."""

    def run(self: Lowering, step: str, part: Part) -> list[Any]:
        targets = [node.target for node in part.graph.graph.nodes]
        if step == "lowered" and aten.silu.default in targets and "emulate_precision_casts" not in self.change.options:
            os.abort()
        return in_eager(part)

    monkeypatch.setattr(Lowering, "run", run)
    monkeypatch.setattr(Lowering, "decomposed", lambda self, graph, inputs: (graph, inputs))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of which a fork has no other
    yield Lowering(parse_target("cpu:x86-64-v3"), {}, frozenset(), crashes=True)
    torch.set_num_threads(threads)


def test_an_operator_whose_code_ends_the_process_is_named_with_its_line_and_what_mends_it(crashing: Lowering) -> None:
    graph, inputs = exported(nn.functional.silu)
    found = walk(crashing, graph, inputs)
    assert [(stage.name, stage.outcome) for stage in found.stages] == [(DECOMPOSED, "right"), (LOWERED, "wrong")]
    assert found.stages[-1].detail == "the process was killed by SIGABRT"
    assert found.culprit is not None and found.culprit.names == ("aten.silu.default",)
    assert "test_bisection.py" in found.culprit.line and "forward" in found.culprit.line
    assert [(remedy.write, remedy.whole) for remedy in found.remedies] == [
        ("options: {emulate_precision_casts: true}", True)
    ]


@pytest.mark.parametrize("tries", [2, 4])
def test_a_search_whose_budget_is_spent_names_the_smallest_part_that_was_found(
    crashing: Lowering, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    """The first two tries are of the whole graph, one for each step."""
    left = iter(range(tries + 1))

    def check(self: CpuBudget) -> None:
        if next(left, None) is None:
            raise BudgetSpent

    monkeypatch.setattr(CpuBudget, "check", check)
    graph, inputs = exported(nn.functional.silu)
    found = walk(crashing, graph, inputs)
    assert found.culprit is not None and "aten.silu.default" in found.culprit.names
    whole = len([node for node in graph.graph.nodes if node.op == "call_function"])
    assert 1 < len(found.culprit.names) < whole + (tries == 2)
    assert found.culprit.note == "or of a part of these: the CPU time of the search is spent"
    assert found.remedies == ()


def test_a_fork_says_how_it_ended() -> None:
    assert in_fork(lambda: [1.5]) == [1.5]
    assert in_fork(os.abort) == Ended("was killed by SIGABRT")
    with pytest.raises(RuntimeError, match="ValueError: no such part"):
        in_fork(lambda: _raise(ValueError("no such part")))
    with pytest.raises(RuntimeError, match=r"there is no answer after 0.2 s"):
        in_fork(lambda: time.sleep(60), 0.2)
    with pytest.raises(RuntimeError, match="was killed by SIGTERM"):
        in_fork(lambda: os.kill(os.getpid(), signal.SIGTERM))


def _raise(error: Exception) -> None:
    raise error


def test_cpu_time_is_that_of_children_too() -> None:
    budget = CpuBudget(0.3)
    budget.check()
    in_fork(lambda: next(None for _ in itertools.count() if time.process_time() > 1.0))
    with pytest.raises(BudgetSpent, match=r"0\.3 s of CPU time are spent"):
        budget.check()


def test_a_cast_that_inductor_leaves_out_is_named_with_the_option_that_rounds() -> None:
    found = walk(lowering(), *exported(Rounding()))
    assert [(stage.name, stage.outcome) for stage in found.stages] == [(DECOMPOSED, "right"), (LOWERED, "wrong")]
    assert found.culprit is not None and found.culprit.numbers is not None
    assert found.culprit.names == (
        "prims.convert_element_type.default of aten._to_copy.default",
        "prims.convert_element_type.default of aten._to_copy.default",
    )
    assert "forward: return (x * 3).bfloat16().float() + 1" in found.culprit.line
    assert found.culprit.numbers.eager == found.culprit.numbers.reference != found.culprit.numbers.compiled
    (remedy,) = found.remedies
    assert (remedy.write, remedy.whole) == ("options: {emulate_precision_casts: true}", True)


def otherwise_when_traced(x: Tensor) -> Tensor:
    y = x.relu()
    return y * (1.01 if torch.compiler.is_exporting() else 1.0) if x.dim() == 2 else y


def constant_when_traced(x: Tensor) -> Tensor:
    return x + (torch.ones(16) if torch.compiler.is_exporting() else torch.full((16,), 0.5))


@pytest.mark.parametrize(
    ("body", "operator", "instead"),
    [
        (otherwise_when_traced, "aten.mul.Tensor", "aten.mul.Tensor"),
        (constant_when_traced, "aten.ones.default", "aten.add.Tensor"),
        (lambda x: x.exp() if torch.compiler.is_exporting() else x.exp2(), "aten.exp.default", "aten.exp2.default"),
    ],
)
def test_the_operator_at_which_an_exported_program_leaves_eager_is_named(
    body: Any, operator: str, instead: str
) -> None:
    torch.manual_seed(0)
    module, x = Model(body).eval(), torch.randn(8, 16)
    graph = torch.export.export(module, (x,)).graph_module
    found = first_divergence(graph, [*module.state_dict().values(), x], lambda: module(x))
    assert found is not None and (found.kind, found.names) == ("operator", (operator,))
    assert "in forward: return self.body(" in found.line
    assert found.note.startswith(f"eager computes {instead} there (test_bisection.py:")
    assert body.__name__ in found.note  # the line within the function
    assert bool(found.detail) == (operator != "aten.ones.default")  # whose shape is another
    assert not found.detail or (found.detail.startswith("exported ") and ", eager " in found.detail)


def test_an_exported_program_that_computes_the_same_has_no_such_operator() -> None:
    graph, inputs = exported(nn.functional.silu)
    module = Model(nn.functional.silu).eval()
    module.load_state_dict(dict(zip(module.state_dict(), inputs, strict=False)))
    assert first_divergence(graph, inputs, lambda: module(inputs[-1])) is None
