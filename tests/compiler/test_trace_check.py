"""A model that computes something else while it is traced is found; nothing is compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aotc.compiler.capture.checks.graph_run import check_traced
from aotc.compiler.capture.checks.hidden_state import check_second_call
from aotc.compiler.capture.export import capture
from aotc.compiler.capture.module_objects import KeptObjects
from aotc.errors import BuildError
from aotc.manifest.types import ModelSpec
from aotc.models.signature import make_signature


class Calls(nn.Module):
    """A function of the module and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def checked(module: nn.Module, *leaves: Tensor) -> None:
    """As a build does."""
    shapes = {f"x{number}" if number else "x": list(leaf.shape) for number, leaf in enumerate(leaves)}
    dtype = str(leaves[0].dtype).removeprefix("torch.")
    inputs = {name: {"shape": shape, "dtype": dtype} for name, shape in shapes.items()}
    signature = make_signature(ModelSpec(name="m", factory="a:b", inputs=inputs, buckets=({},)), module)
    kept = KeptObjects(module)
    with torch.no_grad():
        captured = capture(module, signature, leaves, None, frozen=False)
        result = check_second_call(module, signature, captured.mutated_state, kept, leaves, leaves)
        assert result is not None
        check_traced(module, signature, captured, kept, leaves, result, {})


def example() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def factor() -> int:
    return 2 if torch.compiler.is_exporting() else 3


def scaled(self: Any, x: Tensor) -> list[Tensor]:
    return [x, self.linear(x) * factor()]


def masked(self: Any, x: Tensor) -> list[Tensor]:
    y = self.linear(x)
    return [y + 1, y if torch.compiler.is_compiling() else y.masked_fill(y < 0, 0.0)]


def returned_as_it_came(self: Any, x: Tensor) -> list[Tensor]:
    return [self.linear(x), x if torch.compiler.is_exporting() else x * 2]


def constant(self: Any, x: Tensor) -> list[Any]:
    return [self.linear(x), factor()]


def written_input(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    x.mul_(factor())
    return y


def written_state(self: Any, x: Tensor) -> Tensor:
    self.total.add_(x.sum(0) * factor())
    return self.linear(x)


def not_a_number(self: Any, x: Tensor) -> list[Tensor]:
    y = self.linear(x)
    return [y + 1, y if torch.compiler.is_exporting() else (y - 1).log()]


def dense(self: Any, x: Tensor) -> list[Tensor]:
    y = self.linear(x)
    return [y + 1, y if torch.compiler.is_exporting() else y.to_sparse()]


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (scaled, "output 1"),
        (masked, "output 1"),
        (returned_as_it_came, "output 1"),
        (constant, "output 1"),
        (not_a_number, "output 1"),
        (dense, "output 1"),
        (written_input, "what is left in the input `x`"),
        (written_state, "what is written to `total`"),
    ],
)
def test_another_way_when_traced_is_an_error_that_says_where(
    function: Callable[[Any, Tensor], Any], named: str
) -> None:
    with pytest.raises(BuildError) as told:
        checked(Calls(function).eval(), example())
    assert f"while torch.export traces it: {named} differs from eager" in told.value.message
    assert "is_exporting" in told.value.hint


def one_more_where_traced(self: Any, x: Tensor) -> list[Tensor]:
    return [self.linear(x)] * (3 if torch.compiler.is_exporting() else 1)


def test_so_is_another_number_of_outputs() -> None:
    with pytest.raises(BuildError, match="it returns 3 values when traced, 1 in eager"):
        checked(Calls(one_more_where_traced).eval(), example())


def other_kernels(self: Any, x: Tensor) -> Tensor:
    """Sums in another order."""
    if torch.compiler.is_exporting():
        return x @ self.linear.weight.T + self.linear.bias
    return F.linear(x, self.linear.weight, self.linear.bias)


def random(self: Any, x: Tensor) -> Tensor:
    return F.dropout(self.linear(x), 0.5, True) + torch.rand_like(x)


def writes(self: Any, x: Tensor) -> list[Tensor]:
    x.mul_(2)
    self.total += x.sum(0)
    return [self.total, x, x + self.total]


def views_of_what_is_written(self: Any, x: Tensor) -> list[Tensor]:
    self.total[2:4] = x[0, :2]
    return [self.linear(x), self.total[:4], self.total.view(2, 4)]


def invalid(self: Any, x: Tensor) -> Tensor:
    return (x - 100).sqrt()


def sparse(self: Any, x: Tensor) -> Tensor:
    return self.linear(x).to_sparse()


def nothing(self: Any, x: Tensor) -> list[Any]:
    return [self.linear(x)[:0], None, 1.5, "text"]


@pytest.mark.parametrize(
    "function", [other_kernels, random, writes, views_of_what_is_written, invalid, sparse, nothing]
)
def test_what_is_the_same_but_for_rounding_passes_and_leaves_inputs_and_state(
    function: Callable[[Any, Tensor], Any],
) -> None:
    module, x = Calls(function).eval(), example()
    checked(module, x)
    assert torch.equal(x, example()) and not module.total.any()


class Encoded(nn.Module):
    """By torch's fast path when it is called, in half precision, which rounds at other places."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder, self.then = nn.TransformerEncoder(layer, 4), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.encoder(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("then", [Tensor.float, Tensor.double, lambda y: (y.sigmoid() * 255).to(torch.uint8)])
def test_what_other_kernels_round_is_no_matter_whatever_it_is_given_as(
    dtype: torch.dtype, then: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    checked(Encoded(then).to(dtype).eval(), x.to(dtype))


NUMBERS: Iterator[float] = itertools.count(1.0)


def never_the_same(self: Any, x: Tensor) -> Tensor:
    return self.linear(x) * next(NUMBERS)


def test_a_model_that_does_not_repeat_itself_is_left_alone() -> None:
    checked(Calls(never_the_same).eval(), example())


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=torch.arange(x.shape[1])[None] >= torch.tensor([[6], [3]]))


def test_torchs_fast_path_of_attention_is_found_and_the_hint_helps() -> None:
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(BuildError, match="output 0 differs") as told:
        checked(Padded().eval(), x)
    assert "torch.backends.mha.set_fastpath_enabled(False) in the factory" in told.value.hint
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        checked(Padded().eval(), x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
