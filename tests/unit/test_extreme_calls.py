"""A call with extreme inputs: what is wrong, and of which models nothing is compared, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotc.manifest.types import ModelSpec
from aotc.models.calls import Called
from aotc.models.extreme_calls import AtExtremes, compare_at_extreme_values
from aotc.models.extreme_inputs import Freedom
from aotc.models.signature import make_signature

X = torch.randn(65, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, model: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def compared(model: Callable[[Tensor], Any], code: Callable[[Tensor], Any] | None = None, x: Tensor = X) -> AtExtremes:
    module, other = Net(model), Net(code or model)
    inputs = {"x": {"shape": list(x.shape)}}
    spec = ModelSpec(name="net", factory="a:b", inputs=inputs, buckets=({},), targets=("native",))
    called = Called(module, make_signature(spec, module), ["steps"], [x])

    def compiled(leaves: Any) -> Any:
        return called._replace(leaves=leaves).call(other)

    with torch.no_grad():
        return compare_at_extreme_values(called, compiled, [Freedom("any")], torch.device("cpu"))


def test_what_is_wrong_is_named_by_its_output_and_the_input_stays() -> None:
    before = X.clone()
    found = compared(lambda x: (x + 1, {"b": x * 0}), lambda x: (x + 1, {"b": torch.zeros_like(x)}))
    assert found.wrong.startswith("output 1 is 0 at [2], nan in eager") and not found.skipped
    assert torch.equal(X, before)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.softmax(-1).sum(),
        lambda x: x[x > 0],
        lambda x: x[x.isnan().nonzero()],
        lambda x: x + 1 if torch.equal(x, x) else x + 2,
        lambda x: x.argsort(),
    ],
)
def test_right_code_is_compared(model: Callable[[Tensor], Any]) -> None:
    assert compared(model)[:2] == ("", "")


def raises(x: Tensor) -> Tensor:
    if x.isnan().any():
        raise ValueError("no numbers")
    return x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (raises, "the model fails in eager: ValueError: no numbers"),
        (lambda x: x + torch.rand(65), "draws random numbers"),
        (lambda x: torch.zeros(int(x.abs().nan_to_num().max())), "reads a value as a number, perhaps a size"),
        (lambda x: torch.linalg.eigvals(x[:4].view(2, 2)), "of NaN or infinities may end the process"),
        (lambda x: x.long().repeat_interleave(x.long()), "reads a value as a number, perhaps a size"),
    ],
)
def test_what_cannot_be_compared_has_a_reason(model: Callable[[Tensor], Any], reason: str) -> None:
    found = compared(model)
    assert not found.wrong and reason in found.skipped


def test_code_that_raises_where_eager_does_not_is_no_silent_error() -> None:
    found = compared(lambda x: x, raises)
    assert not found.wrong and "the compiled code raises, and eager does not" in found.skipped


def test_an_integer_that_is_an_index_keeps_its_ordinary_values() -> None:
    table, index = torch.arange(5.0), torch.tensor([1, 0, 1])
    found = compared(lambda i: table[i], x=index)
    assert found.skipped == "no input is free to have extreme values"


def test_of_a_model_that_rounds_to_8_bits_another_level_is_not_wrong() -> None:
    def model(x: Tensor) -> Tensor:
        return (x.clamp(-1, 1) * 100).nan_to_num().round().to(torch.int8).float()

    assert compared(model, lambda x: model(x) + 1)[:2] == ("", "")
    assert compared(model, lambda x: model(x) + torch.nan).wrong
