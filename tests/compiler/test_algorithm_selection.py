"""What identifies an operator's race: all that it computes, which the tensors alone do not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.kernel.conv import aten_convolution
from torch._inductor.kernel.mm import aten_addmm
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from torch._inductor.virtualized import V

from aotc.compiler.autotune.algorithm_selection import _operator
from aotc.compiler.autotune.inductor_hooks import picking
from aotc.compiler.autotune.picker import Picker
from aotc.compiler.autotune.shared_picks import SharedPicks
from aotc.picks import Pick

NEAR: Mapping[str, Any] = {
    "stride": (1, 1),
    "padding": (1, 1),
    "dilation": (1, 1),
    "transposed": False,
    "output_padding": (0, 0),
    "groups": 1,
}
FAR = {**NEAR, "padding": (2, 2), "dilation": (2, 2)}
WIDE = {**NEAR, "padding": (9, 9), "stride": (2, 2)}
BACK = {**NEAR, "transposed": True}
WIDE_BACK = {**WIDE, "transposed": True, "output_padding": (1, 1)}
"""With a kernel of 3 × 3 each of them gives 16 × 16 of 16 × 16."""


@pytest.fixture(autouse=True)
def graph() -> Iterator[None]:
    """Inductor's, in which nodes have sizes."""
    with V.set_graph_handler(GraphLowering(torch.fx.symbolic_trace(torch.nn.Identity()))):
        yield


def node(name: str, *size: int) -> ir.Buffer:
    return ir.InputBuffer(name=name, layout=layout(*size))


def layout(*size: int) -> ir.FixedLayout:
    return ir.FixedLayout(torch.device("cpu"), torch.float32, list(size))


class Template:
    """As much of a template's caller as is looked at: `code` is what Inductor names its source by, `wins` is ours."""

    name, description, failed = "triton_template_7", "BLOCK_M=64", False

    def __init__(self, code: str = "source", wins: bool = False) -> None:
        self.code, self.wins = code, wins

    def hash_key(self) -> str:
        return self.code


class Race:
    """An operator that is asked for, with a library call and a template."""

    def __init__(self, subject: str, call: Any, inputs: Sequence[ir.Buffer], out: ir.Layout, wins: bool) -> None:
        self.subject, self.inputs, self.layout = subject, list(inputs), out
        self.choices = [call, Template(wins=wins)]

    def run(self) -> str:
        """The name of what wins."""
        asked = (self.subject, self.inputs, self.layout, None, "", self.choices, lambda: None)
        times = AlgorithmSelectorCache.do_autotuning(None, *asked)
        return str(min(times, key=times.__getitem__).name)


def convolution(arguments: Mapping[str, Any], wins: bool = False) -> Race:
    inputs, out = [node("x", 2, 8, 16, 16), node("w", 8, 8, 3, 3)], layout(2, 8, 16, 16)
    return Race("convolution", aten_convolution.bind(inputs, out, **arguments), inputs, out, wins)


def addmm(alpha: float, wins: bool = False) -> Race:
    inputs, out = [node("b", 8, 8), node("x", 8, 8), node("w", 8, 8)], layout(8, 8)
    return Race("addmm", aten_addmm.bind(inputs, out, alpha=alpha, beta=1), inputs, out, wins)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The races that are run."""
    found: list[str] = []

    def tune(
        self: Any, name: str, input_nodes: Any, layout: Any, input_gen_fns: Any, key: Any, choices: Any, compiled: Any
    ) -> dict[Any, float]:
        found.append(name)
        library_call, template = choices
        return {library_call: 0.2, template: 0.1 if template.wins else 0.3}

    monkeypatch.setattr(AlgorithmSelectorCache, "do_autotuning", tune)
    return found


def answers(picker: Picker, *races: Race) -> list[str]:
    with picking(picker):
        return [race.run() for race in races]


def two_of(make: Callable[..., Race], first: Any, second: Any) -> list[Race]:
    """Two of equal tensors: the library call is faster for one, the template for the other."""
    return [make(first, False), make(second, True)]


OTHER_ARGUMENTS = [
    (convolution, NEAR, FAR),
    (convolution, NEAR, WIDE),
    (convolution, NEAR, BACK),
    (convolution, BACK, WIDE_BACK),
    (addmm, 1, 0.5),
]


@pytest.mark.parametrize("arguments", [NEAR, FAR, WIDE, BACK, WIDE_BACK])
def test_these_convolutions_have_equal_tensors(arguments: Mapping[str, Any]) -> None:
    ordered = [arguments[name] for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")]
    out = torch.convolution(torch.empty(2, 8, 16, 16), torch.empty(8, 8, 3, 3), None, *ordered)
    assert out.shape == (2, 8, 16, 16) and out.is_contiguous()


@pytest.mark.parametrize(("make", "first", "second"), OTHER_ARGUMENTS)
def test_equal_tensors_with_other_arguments_are_two_questions(
    measured: list[str], make: Callable[..., Race], first: Any, second: Any
) -> None:
    picker = Picker()
    races = two_of(make, first, second)
    assert answers(picker, *races, *races) == [races[0].choices[0].name, "triton_template_7"] * 2
    assert len(measured) == 2
    assert [pick.uses for pick in picker.picks] == [2, 2]


def test_each_of_them_is_pinned_by_its_own_pin(measured: list[str]) -> None:
    first, second = two_of(convolution, NEAR, FAR)
    picker = Picker()
    expected = answers(picker, first, second)
    for pins in (picker.picks, tuple(reversed(picker.picks))):
        for own, seeds in ((pins, ()), ((), pins)):
            again = Picker(own, seeds, locked=True)
            assert answers(again, first, second) == expected
            again.raise_if_locked_out()
    assert len(measured) == 2


def test_another_unit_answers_only_the_same_question(measured: list[str], tmp_path: Path) -> None:
    one, two = (Picker(shared=SharedPicks(tmp_path, [], unit)) for unit in ("one", "two"))
    answers(one, convolution(NEAR, True))
    assert answers(two, convolution(FAR), convolution(NEAR, True)) == ["convolution", "triton_template_7"]
    assert len(measured) == 2
    assert [pick.arguments for pick in two.shared] == [pick.arguments for pick in one.picks]


def test_a_pin_for_other_arguments_is_stale_and_both_are_said(measured: list[str]) -> None:
    picker = Picker()
    answers(picker, convolution(NEAR))
    (pin,) = picker.picks
    without = Pick(**{name: getattr(pin, name) for name in pin.__struct_fields__ if name != "arguments"})
    for one, said in ((pin, "padding=[1, 1]"), (without, "no arguments")):
        again = Picker([one])
        answers(again, convolution(FAR))
        (issue,) = again.stale()
        assert "asks it with other arguments" in issue.message
        assert said in issue.expected and "padding=[2, 2]" in issue.actual


def test_how_the_arguments_are_written_down_does_not_depend_on_their_types() -> None:
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in NEAR.items()}
    one, two = (convolution(arguments) for arguments in (NEAR, lists))
    assert question(one).identity == question(two).identity


def question(race: Race) -> Pick:
    return _operator(race.subject, race.choices, race.inputs, race.layout)


def test_where_no_library_call_takes_part_the_templates_code_says_what_it_is() -> None:
    """Attentions of other masks have equal tensors and equal configurations."""
    inputs, out = [node("q", 8, 8), node("k", 8, 8)], layout(8, 8)
    causal, sliding, again = (
        _operator("flex_attention", [Template(f"{mask} 64"), Template(f"{mask} 128")], inputs, out)
        for mask in ("causal", "sliding", "causal")
    )
    assert causal.identity == again.identity != sliding.identity
