"""The optimizers of `aotc.optim` are torch's, and import no compiler; a TrainingStep is the loop written out."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python
from torch import Tensor, nn
from torch.optim import lr_scheduler

import aotc

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [{}, {"weight_decay": 0.2, "betas": (0.8, 0.9), "amsgrad": True}, {"maximize": True}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.5, "dampening": 0.5}],
}
CASES = [(name, options) for name, all_options in OPTIONS.items() for options in all_options]


class Model(nn.Module):
    """A frozen parameter, one that never has a gradient, and two that are tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.leave.weight = self.enter.weight
        self.enter.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x))).square().mean()


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((2, 8), 0.1 * step)).backward()
        optimizer.step()


def made(module: Any, model: nn.Module, name: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    """With groups of their own options."""
    groups = [{"params": [each], "lr": 0.01 * (place + 1)} for place, each in enumerate(model.parameters())]
    optimizer: torch.optim.Optimizer = getattr(module, name)(groups, lr=0.02, **options)
    return optimizer


def assert_equal(given: Model, expected: Model) -> None:
    for one, other in zip(given.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", OPTIONS["SGD"])
def test_a_first_step_that_is_skipped_leaves_no_momentum(options: dict[str, Any]) -> None:
    """torch's fused operator leaves memory that nobody has written, which the next step adds to the weights."""

    def weights(optimizer: Any) -> Tensor:
        weight = nn.Parameter(torch.ones(5000))
        steps, scaler = optimizer([weight], lr=0.1, **options), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(3):
            steps.zero_grad()
            scaler.scale((weight * weight).sum() * (float("inf") if number == 0 else 1)).backward()
            used_before = [torch.full((5000,), 1e6) for _ in range(20)]
            del used_before
            scaler.step(steps)
            scaler.update()
        return weight.detach()

    torch.testing.assert_close(weights(aotc.optim.SGD), weights(torch.optim.SGD))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_steps_are_those_of_torch(name: str, options: dict[str, Any]) -> None:
    model = Model()
    expected = copy.deepcopy(model)
    own, torchs = made(aotc.optim, model, name, options), made(torch.optim, expected, name, options)
    assert isinstance(own, getattr(torch.optim, name))
    schedulers = [lr_scheduler.CosineAnnealingLR(each, 20) for each in (own, torchs)]
    clipped = [each.register_step_pre_hook(clip) for each in (own, torchs)]
    for step in range(10):
        train(model, own, range(step, step + 1))
        train(expected, torchs, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert len(clipped) == 2
    assert_equal(model, expected)
    assert own.param_groups[0]["lr"] == torchs.param_groups[0]["lr"] != 0.01


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_parameter_may_get_its_first_gradient_later_than_others(name: str, options: dict[str, Any]) -> None:
    """As one that was frozen at first, or an expert that had no tokens."""
    model = Model()
    expected = copy.deepcopy(model)
    own = getattr(aotc.optim, name)(model.parameters(), lr=0.02, **options)
    torchs = getattr(torch.optim, name)(expected.parameters(), lr=0.02, **options)
    for trained, optimizer in ((model, own), (expected, torchs)):
        train(trained, optimizer, range(3))
        trained.enter.bias.requires_grad_(True)
        train(trained, optimizer, range(3, 6))
    assert_equal(model, expected)


def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        torch.nn.utils.clip_grad_norm_(group["params"], 0.01)


@pytest.mark.parametrize(("before", "after"), [(torch.optim, aotc.optim), (aotc.optim, torch.optim)])
@pytest.mark.parametrize(("name", "options"), [CASES[1], CASES[4]])
def test_a_state_is_loaded_from_torch_s_and_by_torch_s(
    before: Any, after: Any, name: str, options: dict[str, Any]
) -> None:
    model = Model()
    expected = copy.deepcopy(model)
    train(expected, made(torch.optim, expected, name, options), range(10))
    first, second = made(before, model, name, options), made(after, model, name, {})
    fused = second.param_groups[0]["fused"]
    train(model, first, range(5))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(model, second, range(5, 10))
    assert_equal(model, expected)
    if after is aotc.optim:
        assert fused is second.param_groups[0]["fused"] is True, "how a step is computed is the optimizer's own"


def test_it_may_be_copied_and_pickled_and_takes_a_closure() -> None:
    model = Model()
    optimizer = aotc.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.step(lambda: torch.ones(()) if torch.is_grad_enabled() else None) == 1
    assert aotc.optim.SGD(model.parameters(), foreach=True).param_groups[0]["fused"] is None


# -- a step as one call ------------------------------------------------------------------------------------------------


def loaded(store: Path, models: Any, name: str) -> tuple[Any, nn.Module]:
    eager = getattr(models, name)().train()
    return aotc.load(f"{store}#{name}", copy.deepcopy(eager)), eager


def inputs(name: str, size: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    if name == "stack":
        return (torch.randint(0, 10, (size, 8), generator=generator),)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)


@pytest.mark.parametrize(("name", "optimizer"), [("mixed", "SGD"), ("stack", "AdamW")])
def test_twenty_steps_are_those_of_eager(training_store: Path, models: Any, name: str, optimizer: str) -> None:
    """Whole and by regions; of several sizes, with an lr that changes. (AdamW would make steps of the noise that is the
    gradient of a bias before batch norm.)"""
    compiled, eager = loaded(training_store, models, name)
    own = getattr(aotc.optim, optimizer)(compiled.parameters(), lr=0.01)
    torchs = getattr(torch.optim, optimizer)(eager.parameters(), lr=0.01)
    step = aotc.TrainingStep(compiled, own)
    for number in range(20):
        given = inputs(name, 6 if number % 3 else 8, number)
        own.param_groups[0]["lr"] = torchs.param_groups[0]["lr"] = 0.01 / (number + 1)
        loss = step(*given)
        torchs.zero_grad()
        result = eager(*given)
        expected = result["loss"] if isinstance(result, dict) else result
        expected.backward()
        torchs.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
        assert not loss.requires_grad
    assert all(each.grad is None for each in compiled.parameters())
    for (path, one), other in zip(compiled.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=path)


def test_the_loss_may_be_computed_from_the_result(training_store: Path, models: Any) -> None:
    compiled, _ = loaded(training_store, models, "mixed")
    optimizer = aotc.optim.SGD(compiled.parameters(), lr=0.1)
    before = compiled.leave.bias.detach().clone()
    loss = aotc.TrainingStep(compiled, optimizer, loss=lambda result: result["hidden"].sum())(*inputs("mixed", 6, 0))
    assert loss.dim() == 0
    assert torch.equal(before, compiled.leave.bias), "on which the hidden values do not depend"


def test_gradients_are_let_go_also_where_a_step_fails(training_store: Path, models: Any) -> None:
    compiled, _ = loaded(training_store, models, "mixed")
    optimizer = aotc.optim.SGD(compiled.parameters(), lr=0.1)
    step = aotc.TrainingStep(compiled, optimizer)

    def fail(*_: Any) -> None:
        assert compiled.leave.bias.grad is not None
        raise KeyError("a hook's")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        step(*inputs("mixed", 6, 0))
    handle.remove()
    step(*inputs("mixed", 6, 0))


def test_what_a_step_cannot_do_is_refused(training_store: Path, models: Any) -> None:
    compiled, eager = loaded(training_store, models, "mixed")
    optimizer = aotc.optim.AdamW(compiled.parameters())
    x, y = inputs("mixed", 6, 0)
    step = aotc.TrainingStep(compiled, optimizer)

    with pytest.raises(aotc.BindError, match=r"(?s)a Mixed gives no gradients.*train: true"):
        aotc.TrainingStep(eager, optimizer)  # type: ignore[arg-type]
    with pytest.raises(aotc.BindError, match="loss is 'mse', and may be a function"):
        aotc.TrainingStep(compiled, optimizer, loss="mse")  # type: ignore[arg-type]
    with pytest.raises(aotc.BindError, match=r"(?s)not the model's.*group 0.*\(16, 8\).*compiled\.parameters\(\)"):
        aotc.TrainingStep(compiled, aotc.optim.SGD(eager.parameters()))
    with pytest.raises(aotc.BindError, match="on cpu cannot be a CUDA graph"):
        aotc.TrainingStep(compiled, optimizer, cuda_graph=True)
    with pytest.raises(aotc.GradientError, match=r"(?s)an input requires a gradient.*detach"):
        step(x.clone().requires_grad_(), y)
    for loss, message in [
        (lambda result: None, "has no loss"),
        (lambda result: 1.0, "the loss is of float"),
        (lambda result: result["hidden"], r"shape \(6, 16\)"),
        (lambda result: result["loss"].detach(), "depends on no parameter"),
    ]:
        with pytest.raises(aotc.BindError, match=message):
            aotc.TrainingStep(compiled, optimizer, loss=loss)(x, y)
    compiled(x, y)["loss"].backward()
    with pytest.raises(aotc.GradientError, match=r"(?s)gradients from before.*zero_grad"):
        step(x, y)
    optimizer.zero_grad()
    with pytest.raises(aotc.MissError):
        step(x[:2], y[:2])
    step(x, y)
    compiled.update_weights({"leave.bias": torch.ones(4)})
    with pytest.raises(aotc.BindError, match=r"(?s)were replaced.*new optimizer"):
        step(x, y)


@pytest.mark.parametrize("changed", ["a parameter is frozen", "a part that stays eager is in eval mode"])
def test_a_graph_of_a_step_is_of_what_requires_gradients_and_of_all_modes(
    training_store: Path, models: Any, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """Only what is compared before a replay, since there is no GPU: a replay would go on training a frozen tensor."""
    from aotc.runtime.training import step_graphs

    for name in ("Turn", "make_stream"):
        monkeypatch.setattr(step_graphs, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    compiled, _ = loaded(training_store, models, "stack")
    optimizer = aotc.optim.SGD(compiled.parameters())
    graphs = step_graphs.StepGraphs(lambda args, kwargs: torch.ones(()), compiled._aotc, optimizer)
    before = graphs._current_facts()
    assert graphs._current_facts() == before
    if changed == "a parameter is frozen":
        compiled.head.weight.requires_grad_(False)
    else:
        compiled.head.eval()
    assert graphs._current_facts() != before


@pytest.mark.parametrize("result", ["tensor", "tuple", "dict", "attribute"])
def test_where_the_loss_is_found(result: str) -> None:
    from aotc.runtime.training.step import _loss_of

    class Output:
        loss = torch.ones(())

    results: dict[str, Any] = {
        "tensor": Output.loss,
        "tuple": (Output.loss, None),
        "dict": {"x": 1, "loss": Output.loss},
    }
    assert _loss_of(results.get(result, Output())) is Output.loss
    assert _loss_of(()) is None and _loss_of({}) is None and _loss_of(3) is None


@pytest.mark.every_torch
def test_no_compiler_is_imported_by_a_trainer(stepped_store: Path, models: Any) -> None:
    """Optimizer, schedule, clipping, checkpoint and a step that is written out."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(models.__file__).parent)!r})
import torch, aotc, trained_models
model = aotc.load({f"{stepped_store}#mixed"!r}, trained_models.mixed().train())
for make in (aotc.optim.AdamW, aotc.optim.SGD):
    optimizer = make(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    step = aotc.TrainingStep(model, optimizer)
    step(torch.randn(6, 8), torch.randn(6, 4))
    model(torch.randn(6, 8), torch.randn(6, 4))["loss"].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({{"params": [torch.nn.Parameter(torch.ones(2))]}})
print([name for name in ("torch._dynamo", "torch._inductor", "triton", "sympy") if name in sys.modules])
"""
    assert run_python(script).strip().endswith("[]")
