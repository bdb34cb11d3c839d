"""No call that eager takes raises from within `aotc.compile`; and each call is counted, with the reason for eager."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from remembered_nets import Net
from torch import Tensor, nn

import aotc
from aotc.tools.remembering import call_counts, compile_context, remembering
from aotc.tools.remembering.building.builds import Builds


class Odd(nn.Module):
    """Takes anything; its parameters have names that the wrappers around it might use themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, form: Any = None, compiled: Any = None, error: Any = None, why: Any = None) -> Tensor:
        return x * self.weight


class Raising(float):
    """Cannot be looked at."""

    def __eq__(self, other: object) -> bool:
        raise OSError("not comparable")

    def __hash__(self) -> int:
        raise OSError("no hash")


class Closed(dict[str, int]):
    def __iter__(self) -> Iterator[str]:
        raise KeyError("closed")

    def items(self) -> Any:
        raise KeyError("closed")


class Number(enum.IntEnum):
    ONE = 1


def loop() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def nested_lists(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


VALUES = {
    "an array": np.ones(3),
    "a number of NumPy": np.float64(2),
    "uint16": torch.ones(3, dtype=torch.uint16),
    "uint64": torch.tensor([2**64 - 1], dtype=torch.uint64),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.ones(2, device="meta"),
    "a lone surrogate": "\ud800",
    "a key with a surrogate": {"\ud800": 1},
    "keys of numbers": {1: 2},
    "a list that holds itself": loop(),
    "a deep list": nested_lists(400),
    "a large number": 2**70,
    "not a number": float("nan"),
    "infinity": float("inf"),
    "a member of an enumeration": Number.ONE,
    "raises when compared": Raising(1.0),
    "raises when looked into": Closed(a=1),
    "a module": nn.Linear(1, 1),
    "bytes": b"a",
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose calls are recorded, and never built."""
    monkeypatch.setattr(Builds, "start", lambda self, **given: None)
    monkeypatch.setattr("aotc.tools.remembering.making.made_from.made_from", lambda *given: _Made())
    return aotc.compile(Odd().eval(), store=tmp_path, build="exit")


class _Made:
    factory, kwargs = "odd:Odd", dict[str, Any]()


@pytest.mark.parametrize("name", VALUES)
def test_a_call_with_any_value_gives_eager_s_result_and_is_counted(model: Any, name: str) -> None:
    x = torch.randn(2, 2)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(model(x, VALUES[name]), model.module(x))
        assert torch.equal(model(x, compiled=VALUES[name], error=1, why=2, form=3), model.module(x))
    assert torch.equal(model(x, VALUES[name]), model.module(x))  # with gradients
    counts = model.stats()
    assert (counts.compiled, counts.eager) == (0, 7)
    assert sum(form.eager for form in counts.forms) == 7
    assert all(form.reason for form in counts.forms)
    json.dumps(model.explain().notes)


@pytest.mark.parametrize("name", VALUES)
def test_a_module_with_any_attribute_is_called(model: Any, name: str) -> None:
    model.module.odd = VALUES[name]
    x = torch.randn(2, 2)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), model.module(x))
    assert not model.wait(0)


def test_what_eager_raises_is_raised_once(model: Any) -> None:
    calls = []
    model.module.register_forward_pre_hook(lambda *given: calls.append(1))
    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        model(torch.ones(2, 3))
    assert calls == [1]


def test_forms_and_reasons_are_kept_up_to_a_limit(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembering, "MOST_FORMS", 8)
    monkeypatch.setattr(compile_context, "MOST_NOTES", 2)
    monkeypatch.setattr(call_counts, "MOST_COUNTED", 3)
    state = model._remembering
    with torch.no_grad():
        for number in range(20):
            model(torch.ones(1, 2), number + 0.5)
            model(torch.ones(1, 2), {number: 1})
    assert len(state.known.misses) <= 8 and len(state.known.runs) <= 8
    assert len(model.explain().notes) == 2
    assert len(model.stats().forms) == 4 and model.stats().eager == 40
    assert model.stats().forms[-1].form == "other forms"


def test_the_reason_of_each_form_is_told_in_both_modes(tmp_path: Path) -> None:
    model: Any = aotc.compile(Net().eval(), store=tmp_path, build="never")
    ids = torch.zeros(2, 17, dtype=torch.int64)
    with torch.no_grad():
        model(ids)
        model(ids, double=True)
    model(ids)
    model.train()
    model(ids)
    told = {(form.mode, form.form): (form.eager, form.reason) for form in model.stats().forms}
    assert {key: calls for key, (calls, _) in told.items()} == {
        ("inference", "int64[2, 17]"): 1,
        ("inference", "int64[2, 17], double=True"): 1,
        ("inference", "any form"): 1,
        ("train", "any form"): 1,
    }
    assert "gradients" in told["inference", "any form"][1] and "train=True" in told["train", "any form"][1]
    text = str(model.explain())
    assert "0 calls compiled, 4 in eager" in text and repr(model.explain()) == text
    assert "<td>int64[2, 17], double=True</td>" in model.explain()._repr_html_()
    assert "Embedding" in model._repr_html_() and "<table>" in model._repr_html_()


def test_with_on_miss_error_no_call_runs_in_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builds, "start", lambda self, **given: None)
    model: Any = aotc.compile(Net().eval(), store=tmp_path, build="exit", on_miss="error")
    ids = torch.zeros(2, 17, dtype=torch.int64)
    model._remembering.known.eager = lambda *given: pytest.fail("it ran in eager")
    with torch.no_grad(), pytest.raises(aotc.MissError, match=r"int64\[2, 17\] would run in eager: code for") as caught:
        model(ids)
    assert "hint: wait() for the build" in str(caught.value)
    assert model.explain().forms == 1
    with pytest.raises(aotc.MissError, match="records gradients"):
        model(ids)
    with pytest.raises(aotc.MissError, match="training mode"):
        model.train()(ids)
    with pytest.raises(aotc.BindError, match="on_miss is 'raise', and may be eager or error"):
        aotc.compile(Net(), on_miss="raise")  # type: ignore[arg-type]


def test_with_fullgraph_a_form_that_cannot_be_compiled_raises_and_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Builds, "start", lambda self, **given: None)
    model: Any = aotc.compile(Net().eval(), store=tmp_path, build="exit", fullgraph=True)
    ids = torch.zeros(2, 17, dtype=torch.int64)
    with torch.no_grad():
        model(ids)
        model._remembering.known.place.fail(0, "net.py:7: a value in a tensor decides\nlog: x")
        model._remembering.known.let_load()  # as after a build
        for _ in range(2):
            with pytest.raises(
                aotc.MissError, match=r"cannot be compiled whole: net.py:7: a value in a tensor decides"
            ):
                model(ids)
        model(ids, double=True)
    assert [form.eager for form in model.stats().forms] == [1, 1]


def test_a_failure_is_told_once_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Builds, "start", lambda self, **given: None)
    model: Any = aotc.compile(Net().eval(), store=tmp_path, build="exit")
    ids, state = torch.zeros(2, 17, dtype=torch.int64), model._remembering
    with torch.no_grad():
        model(ids)
        state.known.place.fail(0, "a value in a tensor decides\nlog: x")
        state._ended(state.known.place, 0)
        for _ in range(5):
            model(ids)
    told = [record.getMessage() for record in caplog.records if "a value in a tensor decides" in record.getMessage()]
    assert len(told) == 1 and "\\n" not in told[0] and "to try again, remove" in told[0]
    assert str(model.explain()).count("a value in a tensor decides") == 1
    with torch.no_grad():
        model(ids, double=True)
        state.known.place.fail(1, "another reason")
        state._ended(state.known.place, 0)
        for _ in range(5):
            model(ids)
            model(ids, double=True)
    reasons = [form.reason for form in model.stats().forms]
    assert "a value in a tensor decides" in reasons[0] and "another reason" in reasons[1]


def test_the_limit_of_builds_is_the_reason_of_what_it_leaves_out(tmp_path: Path) -> None:
    model: Any = aotc.compile(Net().eval(), store=tmp_path, build="exit", builds=1)
    ids = torch.zeros(2, 17, dtype=torch.int64)
    with torch.no_grad():
        model(ids)
        model._remembering.known.place.change(None, lambda memory: setattr(memory, "builds", 1))
        model._remembering.known.let_load()  # as after a build
        for _ in range(2):
            model(ids, double=True)
    assert "the limit of 1 build is reached: raise builds=" in model.stats().forms[1].reason


@pytest.mark.compile
def test_with_on_miss_error_what_is_built_at_once_runs_compiled_from_the_first_call(program: Any) -> None:
    told = program.run(
        "net = Net().eval()\n"
        "aotc.compile(net, build='now', on_miss='error')\n"
        "now = aotc.compile(net, build='now', on_miss='error')\n"
        "tell(now, same=called(now, (3, 5), (2, 9)), ran=now.stats()[:2])"
    )
    assert (told["same"], told["ran"]) == (True, [2, 0])
