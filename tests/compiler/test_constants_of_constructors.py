"""What freezing computes at the build, from weights and constructors such as `arange`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.codecache import AotCodeCompiler

from aotc.compiler.patches import constants_of_constructors

ROWS = 196


@torch.library.custom_op("aotc_test::clock", mutates_args=())
def clock(rows: int) -> Tensor:
    return torch.ones(rows, 1)


@clock.register_fake
def _(rows: int) -> Tensor:
    return torch.empty(rows, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 32, 7, 7))
        self.table = nn.Parameter(torch.randn(512, 32))
        self.scale, self.step = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(16))

    def resized(self) -> Tensor:
        resized = nn.functional.interpolate(self.positions, size=(14, 14), mode="bicubic", align_corners=False)
        return resized.flatten(2).transpose(1, 2) + self.table[torch.arange(ROWS)]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        allowed = torch.arange(ROWS)[None] <= torch.arange(ROWS)[:, None]
        timed = clock(ROWS) * self.scale
        ramp = torch.arange(2**19).view(-1, 16) * self.step
        return (x @ x.mT).masked_fill(~allowed, 0), x + self.resized(), x + timed, x.sum() + ramp


def frozen_code(model: nn.Module, x: Tensor, *, patched: bool) -> tuple[list[Tensor], str]:
    """The constants of a model's frozen code, and that code."""
    found: list[tuple[list[Tensor], str]] = []

    def keep(graph: Any, wrapper: str, kernels: str, *args: Any, **kwargs: Any) -> list[str]:
        found.append(([graph.get_original_value_of_constant(name) for name in graph.constants], wrapper + kernels))
        return []

    captured = torch.export.export(model, (x,))
    with (
        torch.no_grad(),
        mock.patch.object(AotCodeCompiler, "compile", keep),
        constants_of_constructors.apply() if patched else nullcontext(),
    ):
        options = {"aot_inductor.package": True, "freezing": True}
        torch._inductor.aot_compile(captured.module(), (x,), options=options)
    return found[0]


@pytest.fixture(scope="module")
def frozen() -> tuple[Model, list[Tensor], str]:
    """A model, the constants of its frozen code, and that code."""
    torch.manual_seed(0)
    model = Model().eval()
    return model, *frozen_code(model, torch.randn(1, ROWS, 32), patched=True)


def test_yolos_does_not_resize_its_position_embeddings_in_a_call() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.YolosConfig(image_size=[96, 96], num_detection_tokens=10, **sizes)
    embeddings = transformers.YolosModel(config).embeddings.eval()
    assert "floor" in frozen_code(embeddings, torch.randn(1, 3, 96, 96), patched=False)[1]
    assert "floor" not in frozen_code(embeddings, torch.randn(1, 3, 96, 96), patched=True)[1]


def test_resized_embeddings_are_a_constant(frozen: tuple[Model, list[Tensor], str]) -> None:
    model, constants, code = frozen
    (resized,) = (each for each in constants if each.shape[-2:] == (ROWS, 32))
    torch.testing.assert_close(resized.view(1, ROWS, 32), model.resized().detach())
    assert "floor" not in code
    assert not any(each.shape in (model.positions.shape, model.table.shape) for each in constants)


def test_what_is_made_of_constructors_alone_is_generated_code(frozen: tuple[Model, list[Tensor], str]) -> None:
    _, constants, code = frozen
    assert "arange" in code and not any(each.numel() == ROWS * ROWS for each in constants)


def test_what_is_larger_than_its_weights_is_generated_code(frozen: tuple[Model, list[Tensor], str]) -> None:
    model, constants, _ = frozen
    assert max(each.numel() for each in constants) < 2**19
    assert any(torch.equal(each, model.step) for each in constants)


def test_an_operator_of_the_user_is_called(frozen: tuple[Model, list[Tensor], str]) -> None:
    model, constants, code = frozen
    assert "aotc_test::clock" in code or "aotc_test.clock" in code
    assert any(torch.equal(each, model.scale) for each in constants)
