"""Gradients of compiled code are those of eager, by autograd's own rules."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from open_libraries import libraries_of
from processes import ROOT
from sharding import assert_sharded_as_whole
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aotc
from aotc.compiler.capture.regions.equal_regions import find_regions
from aotc.manifest.types import ModelSpec
from aotc.models.factory import build_module

HERE = Path(__file__).parent

Pair = tuple[nn.Module, nn.Module]
"""A compiled model, and the same module in eager."""


@pytest.fixture
def mixed(training_store: Path, models: Any) -> Pair:
    eager = models.mixed().train()
    compiled = aotc.load(f"{training_store}#mixed", copy.deepcopy(eager), on_miss="error")
    return compiled, eager


def batch(size: int = 6, *, requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 8, generator=generator).requires_grad_(requires_grad)
    return x, torch.randn(size, 4, generator=generator)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(pair: Pair) -> None:
    compiled, eager = map(gradients, pair)
    assert compiled.keys() == eager.keys()
    for name, gradient in eager.items():
        torch.testing.assert_close(compiled[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def both(pair: Pair, step: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    compiled, eager = (step(model) for model in pair)
    return compiled, eager


@pytest.mark.parametrize("size", [6, 13, 32])
def test_gradients_of_parameters_and_inputs_are_those_of_eager(mixed: Pair, size: int) -> None:
    """Of tied parameters too; none of those that are frozen, unused, or read under `torch.no_grad()` only."""

    def step(model: nn.Module) -> Tensor:
        x, y = batch(size, requires_grad=True)
        model(x, y)["loss"].backward()
        assert x.grad is not None
        return x.grad

    compiled, eager = both(mixed, step)
    torch.testing.assert_close(compiled, eager)
    assert_same_gradients(mixed)
    assert mixed[0].frozen.weight.grad is None
    assert mixed[0].unused.weight.grad is None
    assert mixed[0].scale.grad is None


@pytest.fixture
def padded(training_store: Path, models: Any) -> Pair:
    eager = models.padded().train()
    return aotc.load(f"{training_store}#padded", copy.deepcopy(eager)), eager


@pytest.mark.parametrize("size", [1, 18])
def test_gradients_of_a_padded_call_are_those_of_its_real_part(padded: Pair, size: int) -> None:
    """Within a range of multiples: pads and crops are differentiated."""
    labels = torch.arange(size) % 4

    def step(model: nn.Module) -> tuple[Tensor, Tensor | None]:
        x, _ = batch(size, requires_grad=True)
        result = model(x, labels)
        (result["loss"] + result["out"].square().sum()).backward()
        return result["out"].detach(), x.grad

    compiled, eager = both(padded, step)
    torch.testing.assert_close(compiled, eager)
    assert_same_gradients(padded)
    assert sum(bucket.padded_calls for bucket in padded[0].stats().buckets.values()) == 1


def doubled_in_place(gradient: Tensor) -> None:
    gradient.mul_(2)


@pytest.mark.parametrize("hook", [None, lambda gradient: gradient * 3, doubled_in_place])
def test_the_gradient_of_a_cropped_result_on_which_the_loss_depends(padded: Pair, hook: Any) -> None:
    def step(model: nn.Module) -> Any:
        x, _ = batch(18, requires_grad=True)
        labels = torch.arange(18) % 4
        result = model(x, labels)
        asked = torch.autograd.grad(result["loss"] + result["out"].cos().sum(), result["out"], retain_graph=True)
        result["out"].retain_grad()
        if hook is not None:
            result["out"].register_hook(hook)
        (result["loss"] + result["out"].square().sum()).backward()
        return asked, result["out"].grad, x.grad

    compiled, eager = both(padded, step)
    torch.testing.assert_close(compiled, eager)
    assert_same_gradients(padded)
    assert sum(bucket.padded_calls for bucket in padded[0].stats().buckets.values()) == 1


def test_results_have_a_grad_fn_where_eagers_have_one(mixed: Pair) -> None:
    result = mixed[0](*batch())
    assert {name: each.requires_grad for name, each in result.items()} == {
        "out": True, "hidden": True, "top": False, "loss": True, "turned": True,
    }  # fmt: skip
    torch.testing.assert_close(result, mixed[1](*batch()))


def test_every_result_may_have_a_gradient_of_any_layout(mixed: Pair) -> None:
    """As `sum` gives an expanded one, and a transposed product another order."""

    def step(model: nn.Module) -> None:
        result = model(*batch())
        turned = (result["turned"] * torch.arange(6)).sum() + result["turned"].T.square().sum()
        (result["out"].sum() * 0.1 + (result["hidden"].T @ torch.ones(6, 2)).square().mean() + turned).backward()

    both(mixed, step)
    assert_same_gradients(mixed)


def test_gradients_accumulate_over_calls_in_any_order(mixed: Pair) -> None:
    def step(model: nn.Module) -> None:
        first, second = (model(*batch(size))["loss"] for size in (6, 8))
        second.backward()
        first.backward()
        (model(*batch(8))["loss"] * 0.5).backward()

    both(mixed, step)
    assert_same_gradients(mixed)


def test_autograd_grad_gives_what_is_asked_for(mixed: Pair) -> None:
    def step(model: nn.Module) -> Any:
        x, y = batch(requires_grad=True)
        return torch.autograd.grad(model(x, y)["loss"], [x, model.enter.weight])

    compiled, eager = both(mixed, step)
    torch.testing.assert_close(compiled, eager)
    assert mixed[0].enter.weight.grad is None


def test_hooks_on_parameters_and_results_run(mixed: Pair) -> None:
    seen: list[str] = []
    model = mixed[0]
    model.enter.weight.register_hook(lambda gradient: seen.append("gradient"))
    model.enter.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    result = model(*batch())["loss"]
    result.register_hook(lambda gradient: seen.append("result"))
    result.backward()
    assert seen == ["result", "gradient", "accumulated"]


def test_batch_norm_updates_its_buffers(mixed: Pair) -> None:
    both(mixed, lambda model: model(*batch(13)))
    torch.testing.assert_close(dict(mixed[0].named_buffers()), dict(mixed[1].named_buffers()))
    assert mixed[0].norm.num_batches_tracked == 1


def test_a_batch_norm_that_stays_in_eval_mode_is_trained_and_updates_nothing(mixed: Pair) -> None:
    both(mixed, lambda model: model(*batch())["loss"].backward())
    torch.testing.assert_close(mixed[0].still.weight.grad, mixed[1].still.weight.grad)
    assert mixed[0].still.num_batches_tracked == 0
    assert torch.equal(mixed[0].still.running_mean, torch.zeros(16))
    mixed[0].still.train()
    with pytest.raises(aotc.MissError, match=r"still: .* False .*, it is True now") as error:
        mixed[0](*batch())
    assert "call module.get_submodule('still').eval()" in str(error.value)
    mixed[0].module.train()
    mixed[0](*batch())


def test_without_gradients_nothing_is_kept(mixed: Pair) -> None:
    with torch.no_grad():
        result = mixed[0](*batch())
    assert not result["loss"].requires_grad
    torch.testing.assert_close(result, mixed[1](*batch()))


def test_what_was_saved_goes_with_the_results(mixed: Pair) -> None:
    seen = []

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        seen.append(weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = mixed[0](*batch())
    assert seen
    del result
    gc.collect()
    assert not any(each() is not None for each in seen)


def test_the_backward_frees_what_was_saved_unless_the_graph_is_retained(mixed: Pair) -> None:
    """Its library is given the only references, so it frees each tensor after its last use."""
    (library,) = libraries_of(mixed[0].forward)
    own = [place for place, each in enumerate(library.saved) if (each.output or 0) >= library.results]
    run, freed = library.backward, []

    def watched(arguments: list[Tensor]) -> list[Tensor]:
        saved = [weakref.ref(arguments[place]) for place in own]
        result = run(arguments)
        freed.append([each() is None for each in saved])
        return result

    library.backward = watched
    loss = mixed[0](*batch())["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    assert own
    assert freed == [[False] * len(own), [True] * len(own)]


def test_a_write_to_what_the_backward_needs_is_noticed(mixed: Pair) -> None:
    loss = mixed[0](*batch())["loss"]
    with torch.no_grad():
        mixed[0].leave.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_checkpointing_around_a_call(mixed: Pair) -> None:
    def step(model: nn.Module) -> Tensor:
        x, y = batch(requires_grad=True)
        checkpoint(lambda value: model(value, y)["loss"], x, use_reentrant=False).backward()
        assert x.grad is not None
        return x.grad

    compiled, eager = both(mixed, step)
    torch.testing.assert_close(compiled, eager)
    assert_same_gradients(mixed)


def test_checkpointing_around_a_call_whose_result_is_hooked(heads: Pair) -> None:
    """The backward runs once for each of the results, and the checkpoint computes the call again only once."""

    def step(model: nn.Module) -> Tensor:
        results = checkpoint(lambda *given: tuple(model(*given).values()), *sequences(), use_reentrant=False)
        left, right, hidden = results
        hidden.register_hook(lambda gradient: gradient * 2)
        hidden.retain_grad()
        (left + right * 2 + hidden.cos().sum()).backward()
        return hidden.grad

    torch.testing.assert_close(*both(heads, step))
    assert_same_gradients(heads)


def test_a_second_derivative_is_refused_and_a_first_with_create_graph_is_not(mixed: Pair) -> None:
    x, y = batch(requires_grad=True)
    (first,) = torch.autograd.grad(mixed[0](x, y)["loss"], x, create_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(mixed[1](x, y)["loss"], x)[0])
    with pytest.raises(aotc.GradientError, match="no second derivative"):
        first.square().sum().backward()


@pytest.fixture
def heads(training_store: Path, models: Any) -> Pair:
    eager = models.heads().train()
    return aotc.load(f"{training_store}#heads", copy.deepcopy(eager)), eager


def sequences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 5, 8, generator=generator), torch.randn(6, 4, generator=generator)


def test_a_backward_of_the_models_own_is_kept(heads: Pair) -> None:
    """Of a `torch.autograd.Function`, that clips: gradients of two sizes are not multiples."""
    for scale in (0.01, 100):
        both(heads, lambda model, scale=scale: (model(*sequences())["left"] * scale).backward())
        assert_same_gradients(heads)
        assert heads[0].layer.weight_hh_l0.grad.abs().max() > 0


def test_what_only_an_unused_result_depends_on_gets_no_gradient(heads: Pair) -> None:
    both(heads, lambda model: model(*sequences())["left"].backward())
    assert_same_gradients(heads)
    assert heads[0].right.weight.grad is None
    both(heads, lambda model: sum(model(*sequences())[name] for name in ("left", "right")).backward())
    assert_same_gradients(heads)


def test_hooks_of_parameters_run_where_a_gradient_comes(heads: Pair) -> None:
    """Those of an unused head do not, unless a gradient comes from elsewhere; and they can be removed."""

    def step(model: nn.Module) -> Any:
        weight, bias = model.right.weight, model.right.bias
        seen: tuple[list[Any], ...] = ([], [], [], [])
        handles = [
            weight.register_hook(lambda gradient: seen[0].append(gradient.clone())),
            weight.register_post_accumulate_grad_hook(lambda each: seen[1].append(each.grad.clone())),
            bias.register_post_accumulate_grad_hook(lambda each: seen[2].append(each.grad.clone())),
            torch.autograd.graph.register_multi_grad_hook(
                [model.left.bias, bias], lambda given: seen[3].append([each is None for each in given])
            ),
        ]
        model(*sequences())["left"].backward()
        model(*sequences())["right"].backward()
        (model(*sequences())["left"] + weight.square().sum()).backward()
        model(*sequences())["left"].backward()
        for handle in handles:
            handle.remove()
        model(*sequences())["right"].backward()
        return seen

    compiled, eager = both(heads, step)
    assert [len(each) for each in eager] == [2, 2, 1, 4]
    torch.testing.assert_close(compiled[:3], eager[:3])
    assert compiled[3] == eager[3]
    assert_same_gradients(heads)


def weighted(result: dict[str, Tensor]) -> Tensor:
    return result["left"] * 3 + result["hidden"].square().sum()


def watched(model: nn.Module, loss: Callable[[dict[str, Tensor]], Tensor], hook: Any = None) -> Tensor | None:
    """The gradient that a hidden state keeps."""
    result = model(*sequences())
    result["hidden"].retain_grad()
    if hook is not None:
        result["hidden"].register_hook(hook)
    loss(result).backward()
    return result["hidden"].grad


@pytest.mark.parametrize("hook", [None, lambda gradient: gradient * 3, doubled_in_place])
@pytest.mark.parametrize("loss", [lambda result: result["left"], weighted, lambda result: result["hidden"].cos().sum()])
def test_the_gradient_of_a_result_on_which_others_depend(heads: Pair, loss: Any, hook: Any) -> None:
    """All of it is kept and comes to hooks; and what they return goes on to the parameters."""
    compiled, eager = both(heads, lambda model: watched(model, loss, hook))
    torch.testing.assert_close(compiled, eager)
    assert_same_gradients(heads)


def test_autograd_grad_takes_results_and_parameters(heads: Pair) -> None:
    def step(model: nn.Module) -> Any:
        result = model(*sequences())
        hidden, total = result["hidden"], weighted(result)
        bias, right = model.layer.bias_hh_l0, model.right.weight
        return [
            torch.autograd.grad(result["left"], hidden, retain_graph=True),
            torch.autograd.grad(total, [hidden, bias], retain_graph=True),
            torch.autograd.grad(result["left"], [bias, right], retain_graph=True, allow_unused=True),
            torch.autograd.grad(result["left"], [hidden, right], retain_graph=True, allow_unused=True),
            torch.autograd.grad(total + result["right"], list(model.parameters())),
        ]

    torch.testing.assert_close(*both(heads, step))


def test_a_hook_on_a_result_runs_where_a_gradient_comes(heads: Pair) -> None:
    def step(model: nn.Module) -> list[str]:
        result = model(*sequences())
        seen: list[str] = []
        for name, each in result.items():
            each.register_hook(lambda gradient, name=name: seen.append(f"{name} {tuple(gradient.shape)}"))
        result["left"].backward()
        return seen

    compiled, eager = both(heads, step)
    assert compiled == eager == ["left ()", "hidden (6, 6)"]


def test_the_gradient_of_a_result_cannot_be_differentiated(heads: Pair) -> None:
    result = heads[0](*sequences())
    (gradient,) = torch.autograd.grad(result["left"], result["hidden"], create_graph=True)
    with pytest.raises(aotc.GradientError, match="no second derivative"):
        gradient.square().sum().backward()


def test_a_result_may_be_written_to_unless_the_backward_needs_it(heads: Pair) -> None:
    def step(model: nn.Module) -> None:
        result = model(*sequences())
        result["left"].mul_(2).backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result["hidden"].mul_(2).sum().backward()

    heads[0](*sequences())["left"].mul_(2).backward()
    heads[1](*sequences())["left"].mul_(2).backward()
    assert_same_gradients(heads)


def test_a_penalty_on_gradients_is_refused_whatever_the_backward_keeps(heads: Pair) -> None:
    model = heads[0]
    loss = model(*sequences())["right"]
    gradients = torch.autograd.grad(loss, list(model.right.parameters()), create_graph=True)
    assert all(each.requires_grad for each in gradients)
    with pytest.raises(aotc.GradientError, match="no second derivative"):
        (loss + sum(each.square().sum() for each in gradients)).backward()
    x, y = sequences()
    scale = torch.ones((), requires_grad=True)
    stated = {name: each.detach() * scale for name, each in model.named_parameters()}
    result = torch.func.functional_call(model, stated, (x, y))["right"]
    (first,) = torch.autograd.grad(result, scale, create_graph=True)
    with pytest.raises(aotc.GradientError, match="no second derivative"):
        torch.autograd.grad(first, scale, allow_unused=True)


def test_hooks_on_saved_tensors_may_give_other_strides_and_no_other_tensor(heads: Pair) -> None:
    def transposed(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() else tensor

    def step(model: nn.Module, unpack: Callable[[Tensor], Tensor] = transposed) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            loss = model(*sequences())["left"]
        loss.backward()

    both(heads, step)
    assert_same_gradients(heads)
    for unpack in (Tensor.double, lambda tensor: tensor[None]):
        with pytest.raises(aotc.GradientError, match="a hook on saved tensors gave back"):
            step(heads[0], unpack)


@pytest.mark.parametrize(
    "gradient",
    [torch._efficientzerotensor((6, 6)), torch.ones(6, 6, dtype=torch.cfloat).conj().imag],
)
def test_a_gradient_may_be_a_tensor_without_memory_of_its_own(heads: Pair, gradient: Tensor) -> None:
    both(heads, lambda model: model(*sequences())["hidden"].backward(gradient))
    assert_same_gradients(heads)


def test_batched_gradients_are_refused(heads: Pair) -> None:
    hidden = heads[0](*sequences())["hidden"]
    with pytest.raises(aotc.GradientError, match="no memory of its own") as error:
        torch.autograd.grad(hidden, heads[0].layer.bias_hh_l0, torch.ones(2, 6, 6), is_grads_batched=True)
    assert "is_grads_batched" in str(error.value)


def test_forward_mode_is_refused(mixed: Pair) -> None:
    x, y = batch()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(aotc.MissError, match="tangent"):
            mixed[0](dual, y)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_tangent_on_a_parameter_is_a_miss_and_eager_may_take_it(mixed: Pair, enabled: bool) -> None:
    """Also under `torch.no_grad()`, which leaves forward-mode derivatives on."""
    mixed[0].forward.on_miss = "eager"

    def tangent(model: nn.Module) -> Tensor:
        weight = torch.autograd.forward_ad.make_dual(model.leave.weight.detach(), torch.ones(4, 16))
        result = torch.func.functional_call(model, {"leave.weight": weight}, batch())["loss"]
        return torch.autograd.forward_ad.unpack_dual(result).tangent

    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(enabled):
        torch.testing.assert_close(*both(mixed, tangent))
        mixed[0].forward.on_miss = "error"
        with pytest.raises(aotc.MissError, match=r"leave\.weight: it has a tangent"):
            tangent(mixed[0])


def test_what_had_no_gradient_at_build_is_refused(mixed: Pair) -> None:
    """A parameter that was frozen, and an input that the manifest does not name."""
    x, y = batch()
    with pytest.raises(aotc.MissError, match="requires_grad: true"):
        mixed[0](x, y.requires_grad_())
    mixed[0].frozen.bias.requires_grad_()
    with pytest.raises(aotc.GradientError, match=r"frozen\.bias"):
        mixed[0](*batch())
    with torch.no_grad():
        mixed[0](*batch())


def test_a_parameter_may_be_frozen_after_the_build(mixed: Pair) -> None:
    def step(model: nn.Module) -> None:
        model.leave.requires_grad_(False)
        model(*batch())["loss"].backward()

    both(mixed, step)
    assert_same_gradients(mixed)
    assert mixed[0].leave.weight.grad is None


def test_random_numbers_follow_torchs_seed_and_agree_in_both_halves(training_store: Path, models: Any) -> None:
    """The gradient of a dropped element is 0, of another one it is that of eager with that mask."""
    model = aotc.load(f"{training_store}#random", models.random().train())
    x = torch.randn(16, 8)

    def run(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        model.zero_grad()
        result = model(x)
        torch.rand(3)  # what is drawn in between changes nothing
        result.sum().backward()
        return result.detach(), model.enter.weight.grad

    (first, gradient), (again, gradient_again), (other, _) = run(1), run(1), run(2)
    torch.testing.assert_close((first, gradient), (again, gradient_again), rtol=0, atol=0)
    assert not torch.equal(first, other)
    torch.manual_seed(1)
    step = 1e-3
    with torch.no_grad():
        weight = model.enter.weight
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
        weight.add_(step * direction)
        torch.manual_seed(1)
        above = model(x).sum()
        weight.sub_(2 * step * direction)
        torch.manual_seed(1)
        below = model(x).sum()
    torch.testing.assert_close((above - below) / (2 * step), (gradient * direction).sum(), rtol=2e-2, atol=2e-2)


def test_a_module_is_needed_and_must_be_in_train_mode(training_store: Path, models: Any) -> None:
    with pytest.raises(aotc.BindError, match="parameters get the gradients"):
        aotc.load(f"{training_store}#random", weights=models.random().state_dict())
    with pytest.raises(aotc.BindError, match=r"call module\.train\(\) before the load"):
        aotc.load(f"{training_store}#random", models.random().eval())


def test_a_load_names_modules_of_another_mode_and_parameters_that_were_frozen(
    training_store: Path, models: Any
) -> None:
    module = models.mixed().train()
    module.still.train()
    with pytest.raises(aotc.BindError, match=r"training=False, training=True in 1 of its modules, first `still`"):
        aotc.load(f"{training_store}#mixed", module)
    module.train().frozen.requires_grad_()
    with pytest.raises(aotc.BindError, match="requires a gradient, and did not at build") as error:
        aotc.load(f"{training_store}#mixed", module)
    assert {issue.where for issue in error.value.issues} == {"frozen.weight", "frozen.bias"}
    blocks = models.stack().train()
    blocks.blocks[1].base.bias.requires_grad_()
    with pytest.raises(aotc.BindError, match=r"blocks\.1\.base\.bias"):
        aotc.load(f"{training_store}#stack", blocks)


@pytest.fixture
def stack(training_store: Path, models: Any) -> Pair:
    eager = models.stack().train()
    module = copy.deepcopy(eager)
    return aotc.load(f"{training_store}#stack", module), eager


def ids(size: int) -> Tensor:
    return torch.randint(0, 10, (size, 8), generator=torch.Generator().manual_seed(size))


def test_regions_are_trained_within_a_model_that_stays_eager(stack: Pair) -> None:
    """One library for all blocks, though they are frozen in different places; and the module itself can be called."""

    def step(model: nn.Module) -> Tensor:
        loss = model(ids(3)) + (model.module if isinstance(model, aotc.Compiled) else model)(ids(8))
        loss.backward()
        return loss.detach()

    compiled, eager = both(stack, step)
    torch.testing.assert_close(compiled, eager)
    assert_same_gradients(stack)
    assert stack[0].blocks[2].norm.weight.grad is not None
    assert stack[0].blocks[0].norm.weight.grad is None
    assert stack[0].stats().calls == 6


def test_distributed_data_parallel_around_regions(stack: Pair, tmp_path: Path) -> None:
    """In a group of one process: its hooks on parameters fire, and gradients lie in its buckets."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(stack[0], gradient_as_bucket_view=True)
        for _ in range(2):
            parallel(ids(4)).backward()
            stack[1](ids(4)).backward()
        assert_same_gradients(stack)
        del parallel
    finally:
        torch.distributed.destroy_process_group()


def test_fully_sharded_regions_on_two_ranks(training_store: Path) -> None:
    assert_sharded_as_whole(training_store, "cpu", 1e-6)


def test_gradient_checkpointing_of_a_region(stack: Pair) -> None:
    def step(model: nn.Module) -> None:
        hidden = model.embed(ids(4))
        for block in model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        model.head(hidden).square().mean().backward()

    both(stack, step)
    assert_same_gradients(stack)


def test_layers_are_one_region_though_the_input_of_the_first_requires_no_gradient() -> None:
    """Torch calls other operators for tensors that require gradients; regions are compared without."""
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    kwargs = {"rank": 2, "intermediate_size": 16, "num_key_value_heads": 2, **sizes}
    inputs = {"ids": {"shape": [2, 4], "dtype": "int64"}}
    regions = ("llama.model.layers.*",)
    spec = ModelSpec(
        "lora", "tests/benchmarks/training_models.py:lora", inputs, ({},), kwargs=kwargs, train=True, regions=regions
    )
    (part,) = find_regions(spec, build_module(spec, ROOT), ROOT)
    assert len(part.region.instances) == 3
