"""The smoke run of a build finds a backward that is wrong in one place: a library of the store, tampered with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import build_here
from open_libraries import libraries_of
from processes import ROOT
from torch import Tensor, nn
from torch.nn import functional as F

import aotc
from aotc.compiler.smoke.gradient_check import compare_at_extremes, compare_gradients
from aotc.compiler.smoke.smoke_run import _compare_with_eager
from aotc.errors import LibraryError
from aotc.models.calls import Called
from aotc.records import Parameter, Signature, TensorLeaf, Variant
from aotc.runtime.training.training_library import TrainingLibrary
from aotc.tensors.rounding import _RoundedOtherwise

HERE = ROOT / "tests" / "training"
Tamper = Callable[[list[Tensor]], None]


def loaded(store: Path, module: torch.nn.Module, name: str, leaves: list[Tensor]) -> tuple[Any, Called, Any]:
    """The compiled call, what calls it as the smoke run does, and its library."""
    call = aotc.load(f"{store}#{name}", module).forward
    (variant,) = call.artifact.variants
    (library,) = libraries_of(call)
    return call, Called(module, call.artifact.signature, variant.mutated_state, leaves), library


def backward_tampered(library: TrainingLibrary, *, inputs: Tamper | None = None, outputs: Tamper | None = None) -> None:
    run = library.backward

    def tampered(arguments: list[Tensor]) -> list[Tensor]:
        if inputs is not None:
            inputs(arguments)
        results = run(arguments)
        if outputs is not None:
            outputs(results)
        return results

    library.backward = tampered


def check(call: Any, called: Called) -> None:
    with torch.no_grad():
        compare_gradients(called, call.artifact.variants[0], call, torch.device("cpu"))


def test_a_wrong_gradient_of_a_parameter_or_of_an_input_is_found(training_store: Path, models: Any) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(6, 8), torch.randn(6, 4)]
    call, called, library = loaded(training_store, models.mixed().train(), "mixed", leaves)
    check(call, called)
    run = library.backward
    names = [{"input 0": "x", "tied.weight": "enter.weight"}.get(name, name) for name in library._names]
    outputs = {name: index for name, index in zip(names, library.gradients, strict=True) if index is not None}
    for name in ("x", "enter.weight", "norm.weight", "leave.bias"):
        index = outputs[name]
        library.backward = run
        backward_tampered(library, outputs=lambda results, index=index: results[index].mul_(0.8).add_(0.01))
        with pytest.raises(LibraryError, match=f"the gradient of (the input )?`{name}`"):
            check(call, called)


class Saturating(nn.Module):
    """Ordinary inputs do not reach the bounds."""

    def __init__(self, bound: float = 6.0, steepest: float = 20.0) -> None:
        super().__init__()
        self.linear, self.bound = nn.Linear(8, 4), bound
        self.steepest = steepest

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x).clamp(-self.bound, self.bound)
        return out.sum() + Steep.apply(out, self.steepest)


class Steep(torch.autograd.Function):
    """A sum whose gradient is clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clamp(-ctx.most, ctx.most).expand_as(*ctx.saved_tensors), None


@pytest.mark.parametrize("other", [{"bound": 1e9}, {"steepest": 1e9}])
def test_a_backward_that_is_wrong_at_large_values_only_is_found(other: dict[str, float]) -> None:
    torch.manual_seed(0)
    module, wrong = Saturating(), Saturating(**other)
    wrong.linear = module.linear
    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (16, 8)),))
    called, variant = Called(module, signature, (), [torch.randn(16, 8)]), Variant({}, "", (), (), (), 0)
    compare_gradients(called, variant, wrong, torch.device("cpu"))
    compare_at_extremes(called, variant, module, torch.device("cpu"), [0])
    with pytest.raises(LibraryError, match=r"the gradient of `linear\.weight` differs"):
        compare_at_extremes(called, variant, wrong, torch.device("cpu"), [0])


def test_a_buffer_that_is_written_wrongly_is_found(training_store: Path, models: Any) -> None:
    torch.manual_seed(0)
    module = models.mixed().train()
    call, called, library = loaded(training_store, module, "mixed", [torch.randn(6, 8), torch.randn(6, 4)])
    forward = library.forward

    class Tampered:
        def run(self, arguments: Any) -> list[Tensor]:
            outputs = forward.run(arguments)
            module.norm.running_mean.mul_(0.9)
            return outputs

    library.forward = Tampered()
    with torch.no_grad(), pytest.raises(LibraryError, match=r"what is written to `norm\.running_mean`"):
        _compare_with_eager(called, called.call(call), call, called.module)


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_another_dropout_mask_in_the_backward_is_found(training_store: Path, models: Any, rate: float) -> None:
    """Where eager draws other numbers, so that its gradients tell nothing: with a mask of the backward's own."""
    torch.manual_seed(0)
    call, called, library = loaded(training_store, models.random().train(), "random", [torch.randn(16, 8)])
    check(call, called)
    changed: list[int] = []

    def other_mask(arguments: list[Tensor]) -> None:
        for place, each in enumerate(arguments):
            if each.dtype in (torch.bool, torch.int64):
                changed.append(place)
                arguments[place] = each + 1 if each.dtype is torch.int64 else partly_other(each)

    def partly_other(mask: Tensor) -> Tensor:
        return torch.where(torch.rand(mask.shape) < rate, ~mask, mask)

    backward_tampered(library, inputs=other_mask)
    with pytest.raises(LibraryError, match=r"`enter\.weight` is not the slope of its results"):
        check(call, called)
    assert changed


class Vanishing(nn.Module):
    """Biases whose gradients are 0 but for rounding: of a key before a softmax, and before a norm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        hidden = F.dropout(self.norm(attended.flatten(0, 1)), 0.2, self.training)
        return F.cross_entropy(self.head(hidden), torch.arange(len(hidden)) % 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(2))
def test_a_gradient_that_is_0_but_for_rounding_is_no_wrong_one(seed: int, dtype: torch.dtype) -> None:
    """Code that draws other numbers than eager, and rounds otherwise."""
    torch.manual_seed(seed)
    module = Vanishing().train()
    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (4, 8, 16)),))
    called = Called(module, signature, ("norm.running_mean", "norm.running_var"), [torch.randn(4, 8, 16)])

    def other(x: Tensor) -> Tensor:
        torch.rand(7)
        return module(x.flip(0))

    variant = Variant({}, "", (), (), (), 0)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        compare_gradients(called, variant, other, torch.device("cpu"))


class Slightly(torch.autograd.Function):
    """The identity, whose gradient is a multiple."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float) -> Tensor:
        ctx.times = times
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.times, None


class Bends(nn.Module):
    """Many values near the bends of `relu`, and a loss that is little beside the logits. The path through `slight` is
    one of two."""

    def __init__(self, hidden: float = 1.0, loss: float = 1.0) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(8, 256), nn.Linear(256, 256), nn.Linear(256, 100)
        self.hidden, self.loss = hidden, loss

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.enter(x))
        hidden = torch.relu(self.middle(Slightly.apply(hidden, self.hidden))) + hidden.sin()
        logits = self.leave(hidden)
        target = torch.arange(len(x), device=x.device) % 100
        return logits, F.cross_entropy(Slightly.apply(logits, self.loss), target)


def bends_compared(dtype: torch.dtype, compiled: Callable[[nn.Module], Any], seed: int = 0) -> None:
    torch.manual_seed(seed)
    module = Bends().to(dtype)
    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (64, 8)),))
    called = Called(module, signature, (), [torch.randn(64, 8, dtype=dtype)])
    compare_gradients(called, Variant({}, "", (), (), (), 0), compiled(module), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_rounding_that_decides_at_a_bend_is_no_wrong_gradient(dtype: torch.dtype, seed: int) -> None:
    def rounded(module: nn.Module) -> Any:
        def call(x: Tensor) -> Any:
            with _RoundedOtherwise():
                return module(x)

        return call

    bends_compared(dtype, rounded, seed)


@pytest.mark.parametrize("wrong", [{"hidden": 1.01}, {"loss": 1.002}])
def test_an_error_of_one_percent_in_one_path_is_found(wrong: dict[str, float]) -> None:
    """Of two, or of the loss beside logits whose gradients are a hundred times as large."""

    def other(module: nn.Module) -> nn.Module:
        made = Bends(**wrong)
        made.enter, made.middle, made.leave = module.enter, module.middle, module.leave
        return made

    with pytest.raises(LibraryError, match=r"the gradient of `\w+\.weight` differs from float64: rms error"):
        bends_compared(torch.float32, other)


def test_a_build_names_the_operator_whose_backward_is_wrong_and_its_line(tmp_path: Path) -> None:
    (outcome,) = build_here(HERE / "miscompiled.yaml", tmp_path / "store").outcomes
    assert outcome.error is not None
    said = str(outcome.error)
    assert "the gradient of `enter.weight` differs from float64" in said
    assert "torch's compiler makes wrong code of aten.silu.default of float32[4, 8] (the gradient of tanh)" in said
    assert "hidden = F.silu(hidden) + hidden.sin()" in outcome.error.fields["source"]
