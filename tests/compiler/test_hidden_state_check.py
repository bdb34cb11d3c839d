"""What forward keeps in Python for its next call is found, with its line; what changes no result is none of it.

Nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import inspect
import linecache
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from aotc.compiler.capture.checks.hidden_state import check_second_call
from aotc.compiler.capture.export import capture
from aotc.compiler.capture.module_objects import KeptObjects
from aotc.errors import BuildError
from aotc.manifest.types import ModelSpec
from aotc.models.signature import make_signature


class Held:
    def __init__(self) -> None:
        self.value: Any = None


class Slotted:
    __slots__ = ("value",)


@dataclasses.dataclass
class Record:
    value: Any = None
    inner: Any = dataclasses.field(default_factory=SimpleNamespace)


class Keeps(nn.Module):
    """Calls a function with itself and its input; what the function keeps is somewhere in the module's attributes."""

    shared: ClassVar[dict[str, Tensor]] = {}

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8), persistent=False)
        self.register_buffer("empty", None, persistent=False)
        self.last: Tensor | None = None
        self._private: Tensor | None = None
        self.table = torch.zeros(8)
        self.count = 0
        self.held, self.record, self.pair = Held(), Record(), (Held(), Slotted())
        self.items: list[Tensor] = []
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.by_name: dict[str, Any] = {}
        self.shared.clear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(self, x))


def last(self: Any, x: Tensor) -> Tensor:
    y = x if self.last is None else x + self.last
    self.last = x.sum()  # kept
    return y


def private(self: Any, x: Tensor) -> Tensor:
    y = x if self._private is None else x + self._private
    self._private = x.sum()  # kept
    return y


def first_only(self: Any, x: Tensor) -> Tensor:
    if self.last is None:
        self.last = x.sum()  # kept
    return x * self.last


def replaced(self: Any, x: Tensor) -> Tensor:
    y = x + self.table
    self.table = x.sum(0)  # kept
    return y


def count(self: Any, x: Tensor) -> Tensor:
    self.count += 1  # kept
    return x * self.count


def warm_up(self: Any, x: Tensor) -> Tensor:
    y = x * 2 if self.count == 0 else x
    self.count = 1  # kept
    return y


def of_submodule(self: Any, x: Tensor) -> Tensor:
    y = x + getattr(self.linear, "before", 0.0)
    self.linear.before = x * 1  # kept
    return y


def new_buffer(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "begun"):
        self.register_buffer("begun", x.sum())  # kept
    return x * self.begun


def empty_buffer(self: Any, x: Tensor) -> Tensor:
    y = x if self.empty is None else x + self.empty
    self.empty = x.sum()  # kept
    return y


def in_object(self: Any, x: Tensor) -> Tensor:
    y = x if self.held.value is None else x + self.held.value
    self.held.value = x.sum()  # kept
    return y


def in_slot(self: Any, x: Tensor) -> Tensor:
    slotted = self.pair[1]
    y = x + getattr(slotted, "value", 0.0)
    slotted.value = x.sum()  # kept
    return y


def in_dataclass(self: Any, x: Tensor) -> Tensor:
    y = x if self.record.value is None else x + self.record.value
    self.record.value = x.sum()  # kept
    return y


def within_dataclass(self: Any, x: Tensor) -> Tensor:
    self.record.inner.steps = getattr(self.record.inner, "steps", 0) + 1  # kept
    return x * self.record.inner.steps


def in_list(self: Any, x: Tensor) -> Tensor:
    self.items.append(x.sum())  # kept
    return x + sum(self.items)


def in_deque(self: Any, x: Tensor) -> Tensor:
    self.recent.append(x)  # kept
    return torch.stack(list(self.recent)).mean(0)


def in_dict(self: Any, x: Tensor) -> Tensor:
    y = x + self.by_name.get("keys", 0.0)
    self.by_name["keys"] = x.sum()  # kept
    return y


def in_class(self: Any, x: Tensor) -> Tensor:
    y = x + self.shared.get("keys", 0.0)
    self.shared["keys"] = x.sum()  # kept
    return y


def into_buffer(self: Any, x: Tensor) -> Tensor:
    self.count += 1  # kept
    self.total += self.count
    return x


def shapes(self: Any, x: Tensor) -> Tensor:
    self.items.append(x)  # kept
    return torch.cat(self.items).sum(0, keepdim=True) + x[:1]


def helper(held: Held, x: Tensor) -> Tensor:
    held.value = x.sum()  # kept
    return x


def by_a_helper(self: Any, x: Tensor) -> Tensor:
    before = 0.0 if self.held.value is None else self.held.value
    return helper(self.held, x) + before


KEEPING = [
    (last, "`last`"),
    (private, "`_private`"),
    (first_only, "`last`"),
    (replaced, "`table`"),
    (count, "`count`"),
    (warm_up, "`count`"),
    (of_submodule, "`linear.before`"),
    (new_buffer, "`begun`"),
    (empty_buffer, "`empty`"),
    (in_object, "`held.value`"),
    (in_slot, "`pair[1].value`"),
    (in_dataclass, "`record.value`"),
    (within_dataclass, "`record.inner.steps`"),
    (in_list, "`items`"),
    (in_deque, "`recent`"),
    (in_dict, "`by_name['keys']`"),
    (in_class, "`shared['keys']`"),
    (into_buffer, "`count`"),
    (shapes, "`items`"),
    (by_a_helper, "`held.value`"),
]


def checked(module: nn.Module, form: dict[str, Any] | None = None) -> None:
    """As a build does."""
    name = next(iter(inspect.signature(module.forward).parameters))
    spec = ModelSpec(name="m", factory="a:b", inputs={name: form or {"shape": [2, 8]}}, buckets=({},))
    signature = make_signature(spec, module)
    leaves, others = (torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    kept = KeptObjects(module)
    written: Any = dict(module.named_buffers())
    with torch.no_grad():
        with suppress(IndexError, RuntimeError):
            written = capture(module, signature, [leaves], None, frozen=False).mutated_state
        check_second_call(module, signature, written, kept, [leaves], [others])


@pytest.mark.filterwarnings("ignore:The tensor attribute")
@pytest.mark.parametrize(("function", "named"), KEEPING, ids=[function.__name__ for function, _ in KEEPING])
def test_what_is_kept_for_the_next_call_is_named_with_its_line(
    function: Callable[[Any, Tensor], Tensor], named: str
) -> None:
    module = Keeps(function).eval()
    with pytest.raises(BuildError) as caught:
        checked(module)
    assert f"keeps a value for its next call in {named}, which is not a buffer before" in str(caught.value)
    file, _, line = caught.value.fields["source"].partition(" in ")[0].partition(":")
    assert file == "test_hidden_state_check.py"
    assert linecache.getline(__file__, int(line)).endswith("# kept\n")
    # The module is as it was, so that another bucket may be built of it.
    assert (module.last, module.count, module.held.value, module.items, module.by_name) == (None, 0, None, [], {})
    assert module.empty is None and not hasattr(module, "begun") and not hasattr(module.pair[1], "value")
    assert not module.table.any() and not module.total.any()


@pytest.mark.parametrize("change", [("unsqueeze_", 0), ("t_",), ("resize_", 4, 4), ("swapaxes_", 0, 1)])
def test_an_input_that_has_another_form_after_a_call_is_named_with_its_line(change: tuple[Any, ...]) -> None:
    def reshape(self: Any, x: Tensor) -> Tensor:
        name, *given = change
        getattr(x, name)(*given)  # here
        return x.reshape(-1, 8)

    with pytest.raises(BuildError, match=r"changes the form of its inputs in place.*`x` from \[2, 8\]") as caught:
        checked(Keeps(reshape))
    assert caught.value.fields["source"].endswith("# here")


class Assigns(nn.Module):
    """To a buffer of its own; `before` it stands one that is None."""

    def __init__(self, before: bool = False) -> None:
        super().__init__()
        if before:
            self.register_buffer("empty", None)
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("other", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.sum(0)  # assigned
        return x + self.total + self.other


@pytest.mark.parametrize(
    ("module", "named"), [(nn.Sequential(nn.Linear(8, 8), Assigns()), "`1.total`"), (Assigns(before=True), "`total`")]
)
def test_an_assignment_that_export_loses_is_named_with_its_line(module: nn.Module, named: str) -> None:
    """It would be written nowhere, or to the next buffer."""
    with pytest.raises(BuildError) as caught:
        checked(module.eval())
    assert f"forward assigns another tensor to {named}, and the graph that torch.export has captured does not" in str(
        caught.value
    )
    assert "`self.total.copy_(…)`" in str(caught.value)
    line = caught.value.fields["source"].partition(" in ")[0].partition(":")[2]
    assert linecache.getline(__file__, int(line)).endswith("# assigned\n")
    assert not any(buffer.any() for buffer in module.buffers())


class Sparse(nn.Linear):
    """An attention for many rows."""


class Full(nn.Linear):
    """An attention for few rows, with a submodule that the other one lacks."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.dropout = nn.Dropout()


class Replaces(nn.Module):
    """Puts another attention in the place of its own where rows are few, as BigBird does."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.layer = "sparse", nn.Sequential(Sparse(8, 8), Sparse(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sparse" and len(x) < 100:
            self.kind = "full"
            for index, sparse in enumerate(self.layer):
                full = Full(8).eval()
                full.weight, full.bias = sparse.weight, sparse.bias
                self.layer[index] = full  # here
        return self.layer(x)


class MakesLate(nn.Module):
    """Makes a submodule in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.act = None

    def forward(self, x: Tensor) -> Tensor:
        if self.act is None:
            self.act = nn.ReLU().eval()  # here
        return self.act(x)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Replaces(), "`layer.0` is a Sparse before the call and a Full after it, and 1 more"),
        (MakesLate(), "`act` is none before the call and a ReLU after it"),
    ],
)
def test_a_submodule_that_forward_replaces_is_named_with_its_line(module: nn.Module, said: str) -> None:
    """Compiled code would be refused after eager's first call, which leaves other submodules than those of the load."""
    before = dict(module.eval().named_modules())
    with pytest.raises(BuildError) as caught:
        checked(module)
    assert said in str(caught.value) and "let the factory do what this line does" in str(caught.value)
    line = caught.value.fields["source"].partition(" in ")[0].partition(":")[2]
    assert linecache.getline(__file__, int(line)).endswith("# here\n")
    assert dict(module.named_modules()) == before


def test_a_module_that_has_replaced_its_submodules_is_as_any_other() -> None:
    """The way out of the error: a factory that calls the model once."""
    module = Replaces().eval()
    module(torch.ones(2, 8))
    checked(module)


class Fills(nn.Module):
    def forward(self, d: dict[str, Tensor]) -> Tensor:
        d["x"] = torch.tanh(d["x"])  # filled
        return d["x"]


def test_a_dict_that_forward_changes_is_named_with_its_line() -> None:
    """Its caller would read what was there before."""
    with pytest.raises(BuildError, match="forward puts other things into a list or dict") as caught:
        checked(Fills().eval(), {"x": {"shape": [2, 8]}})
    line = caught.value.fields["source"].partition(" in ")[0].partition(":")[2]
    assert linecache.getline(__file__, int(line)).endswith("# filled\n")


def kept_for_others(self: Any, x: Tensor) -> Tensor:
    self.last, self.count = x.softmax(-1), self.count + 1
    self.items.append(x)
    return x + 1


def cached_by_size(self: Any, x: Tensor) -> Tensor:
    if self.by_name.get("size") != x.shape[0]:
        self.by_name |= {"size": x.shape[0], "table": torch.arange(x.shape[0])[:, None]}
    return x + self.by_name["table"]


def written_buffer(self: Any, x: Tensor) -> Tensor:
    self.held.value = self.total
    self.total += x.sum(0)
    return x + self.total


def assigned_buffer(self: Any, x: Tensor) -> Tensor:
    self.total = self.total + x.sum(0)
    return x + self.total


def assigned_what_it_is(self: Any, x: Tensor) -> Tensor:
    self.linear.bias = nn.Parameter(self.linear.bias.clone())
    return x


def hooked(self: Any, x: Tensor) -> Tensor:
    """As transformers captures hidden states: a hook for each part, registered by the first call that asks for them."""
    if self.count == 0:
        self.linear.register_forward_pre_hook(lambda _, inputs: self.items.append(inputs[0] * 2))
        self.count = 1
    self.items.clear()
    self.linear(x)
    return torch.stack(list(self.items)).sum(0)


def random(self: Any, x: Tensor) -> Tensor:
    self.last = torch.rand_like(x)
    return x + self.last


@pytest.mark.filterwarnings("ignore:The tensor attribute")
@pytest.mark.parametrize(
    "function", [kept_for_others, cached_by_size, written_buffer, assigned_buffer, assigned_what_it_is, hooked, random]
)
def test_what_changes_no_result_is_no_matter_and_is_put_back(function: Callable[[Any, Tensor], Tensor]) -> None:
    module = Keeps(function).eval()
    total = module.total
    checked(module)
    assert module.total is total and not total.any()
    assert not module.linear._forward_pre_hooks
    assert (module.last, module.count, module.held.value, module.items, module.by_name) == (None, 0, None, [], {})


class GivesAnObject(nn.Module):
    """As models of transformers give a cache of keys and values, and note that they have been called."""

    _was_called = False

    def forward(self, x: Tensor) -> Any:
        held = Held()
        held.value = [x * 2 if isinstance(self, GivesAnother) and self._was_called else x]
        self._was_called = True
        return {"cache": held}


class GivesAnother(GivesAnObject):
    pass


def test_objects_in_a_result_are_compared_by_what_they_hold() -> None:
    checked(GivesAnObject().eval())
    with pytest.raises(BuildError, match="_was_called"):
        checked(GivesAnother().eval())


def test_what_the_model_raises_is_raised_and_what_it_changed_is_put_back() -> None:
    calls = []

    def fails(self: Any, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            calls.append(self.count)
            self.count += 1
            raise RuntimeError("not with data")
        return x

    module = Keeps(fails).eval()
    with pytest.raises(RuntimeError, match="not with data"):
        checked(module)
    assert (calls, module.count) == ([0], 0)
