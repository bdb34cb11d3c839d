"""Products of live weights race in oneDNN, too, and give eager's values there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.kernel import mm

from aotc.compiler.patches import products_in_onednn
from aotc.compiler.patches.products_in_onednn import NAME


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def run(
    function: Callable[..., Tensor], *args: Tensor, rows: bool = False, max_autotune: bool = True
) -> tuple[Tensor, list[str]]:
    """The result of the compiled function, with oneDNN where it races, and each product's candidates. `rows`: the first
    argument's rows are a range."""
    raced: list[str] = []
    select: Any = mm.autotune_select_algorithm

    def only_onednn(name: str, choices: list[Any], *rest: Any, **kwargs: Any) -> Any:
        raced.extend(choice.name for choice in choices)
        ours = [choice for choice in choices if choice.name == NAME]
        return select(name, ours or choices[:1], *rest, **kwargs)

    sizes = ({0: torch.export.Dim("rows", min=2, max=512)}, *(None for _ in args[1:])) if rows else None
    with (
        torch.no_grad(),
        products_in_onednn.apply(),
        config.patch(max_autotune=max_autotune),
        mock.patch.object(mm, "autotune_select_algorithm", only_onednn),
    ):
        program = torch.export.export(Model(function), args, dynamic_shapes=(sizes,) if sizes else None)
        compiled: Any = torch._inductor.compile(program.module(), list(args))
        result = compiled(*args)
    return (result[0] if isinstance(result, list | tuple) else result), raced


X, WEIGHT, BIAS = torch.randn(128, 256), torch.randn(512, 256), torch.randn(512)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    "args", [(X, WEIGHT, BIAS), (X, WEIGHT), (X.view(128, 2, 128), WEIGHT[:, :128].contiguous(), BIAS)]
)
def test_a_linear_layer_races_in_onednn(args: tuple[Tensor, ...], rows: bool) -> None:
    function = nn.functional.linear
    result, raced = run(function, *args, rows=rows)
    assert NAME in raced
    torch.testing.assert_close(result, function(*args), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (nn.functional.linear, (X[:4], WEIGHT, BIAS)),
        (torch.matmul, (X, WEIGHT.t().contiguous())),
        (nn.functional.linear, (X.double(), WEIGHT.double(), BIAS.double())),
        (lambda x, w, b: torch.addmm(b, x, w.t(), beta=2), (X, WEIGHT, BIAS)),
        (lambda x, w, b: torch.addmm(b, x, w.t()), (X, WEIGHT, torch.randn(128, 512))),
    ],
    ids=["little work", "a weight of other rows", "float64", "a factor", "a matrix added"],
)
def test_other_products_do_not(function: Any, args: tuple[Tensor, ...]) -> None:
    result, raced = run(function, *args)
    assert raced and NAME not in raced
    torch.testing.assert_close(result, function(*args), atol=1e-4, rtol=1e-5)


def test_without_a_race_nothing_changes() -> None:
    _, raced = run(nn.functional.linear, X, WEIGHT, BIAS, max_autotune=False)
    assert raced and NAME not in raced
