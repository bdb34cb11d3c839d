"""Weights, buffers and inputs that change, under CUDA graphs: nothing stale, nothing twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_runs import Gpu, all_close, close, inputs
from torch import nn

import aotc

pytestmark = pytest.mark.cuda

LAUNCHES = ["never", "always"]


def overwrite_free_memory() -> None:
    """Fill what the allocator has free, so that a read of freed memory shows."""
    torch.cuda.synchronize()
    junk = [torch.full((size,), float("nan"), device="cuda:0") for size in (64, 256, 4096, 16384, 65536) * 8]
    torch.cuda.synchronize()
    del junk


def scale_in_place(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(1.5)


def scale_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 1.5


def scale_by_assignment(module: nn.Module) -> None:
    module.load_state_dict({name: value * 1.5 for name, value in module.state_dict().items()}, assign=True)


def scale_one_parameter(module: nn.Module) -> None:
    module.up.weight = nn.Parameter(module.up.weight * 1.5, requires_grad=False)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_weights_changed_in_place_are_seen(gpu: Gpu, graphs: Any, launch: str) -> None:
    module = gpu.module("mlp")
    compiled = gpu.load("mlp", module, graphs=aotc.Graphs(use=launch))
    captured = graphs.captured
    assert all_close(compiled, copy.deepcopy(module), inputs(2, 4, 64))
    scale_in_place(module)
    assert all_close(compiled, copy.deepcopy(module), inputs(2, 4, 64))
    assert graphs.captured == captured


@pytest.mark.parametrize("change", [scale_data, scale_by_assignment, scale_one_parameter])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_weights_replaced_by_new_tensors_are_noticed(
    gpu: Gpu, graphs: Any, launch: str, change: Callable[[nn.Module], None]
) -> None:
    """The old tensors' memory is filled with NaN before the next call: a graph must be captured again."""
    module = gpu.module("mlp")
    compiled = gpu.load("mlp", module, graphs=aotc.Graphs(use=launch))
    xs = inputs(3, 4, 64)
    before = [compiled(x) for x in xs]
    captured = graphs.captured
    for _ in range(3):
        change(module)
        overwrite_free_memory()
        expected = [copy.deepcopy(module)(x) for x in xs]
        assert all(close(compiled(x), y) for x, y in zip(xs, expected, strict=True))
    assert graphs.captured == captured + (3 if launch == "always" else 0)  # of the bucket that was called, each time
    assert not any(torch.allclose(old, new) for old, new in zip(before, expected, strict=True))


def test_a_graph_of_another_bucket_is_recaptured_too(gpu: Gpu) -> None:
    module = gpu.module("mlp")
    compiled = gpu.load("mlp", module, graphs=aotc.Graphs(use="always"))
    scale_data(module)
    overwrite_free_memory()
    for batch in (4, 16, 4, 16):
        assert all_close(compiled, copy.deepcopy(module), inputs(2, batch, 64))


def test_a_tensor_of_another_shape_is_refused(gpu: Gpu) -> None:
    from aotc import BindError

    module = gpu.module("mlp")
    compiled = gpu.load("mlp", module, graphs=aotc.Graphs(use="always"))
    module.up.weight = nn.Parameter(torch.zeros(8, 64, device="cuda:0"))
    with pytest.raises(BindError, match=r"up\.weight"):
        compiled(*inputs(1, 4, 64))


# -- buffers and inputs that the model writes to ----------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["eager", "lazy"])
@pytest.mark.parametrize("launch", ["never", "always"])
def test_buffers_advance_once_per_call(gpu: Gpu, launch: str, capture: str) -> None:
    """Neither the warm-up nor the capture leaves a trace in a counter or a cache, before the first call or at it."""
    module = gpu.module("stateful")
    module.steps.fill_(100)
    module.keys.copy_(torch.arange(128.0).reshape(16, 8))
    eager = copy.deepcopy(module)
    compiled = gpu.load("stateful", module, graphs=aotc.Graphs(use=launch, capture=capture))
    torch.cuda.synchronize()
    assert module.steps.item() == 100 and torch.equal(module.keys, eager.keys)
    for step, x in enumerate(inputs(5, 1, 8)):
        position = torch.tensor(3 * step, device="cuda:0")
        total, twin_total = torch.full((1, 8), 2.0, device="cuda:0"), torch.full((1, 8), 2.0, device="cuda:0")
        output, steps = compiled(x, position, total)
        expected, expected_steps = eager(x, position, twin_total)
        assert close(output, expected) and torch.equal(steps, expected_steps)
        assert torch.equal(total, twin_total)  # the caller's input is written to, once
        assert module.steps.item() == eager.steps.item() == 101 + step
        assert close(module.keys, eager.keys)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_an_input_at_an_odd_address_is_written_to(gpu: Gpu, launch: str) -> None:
    """Inductor's code for GPUs takes a copy of what is not aligned."""
    compiled, eager = gpu.loaded("stateful", graphs=aotc.Graphs(use=launch))
    x, position = inputs(1, 1, 8)[0], torch.tensor(0, device="cuda:0")
    total, twin = (torch.full((9,), 2.0, device="cuda:0")[1:].view(1, 8) for _ in range(2))
    assert total.data_ptr() % 16 == 4
    for _ in range(2):
        compiled(x, position, total)
        eager(x, position, twin)
        assert torch.equal(total, twin)


def test_a_buffer_at_an_odd_address_that_is_written_to_is_refused(gpu: Gpu) -> None:
    from aotc import BindError

    module = gpu.module("stateful")
    compiled = gpu.load("stateful", module, graphs=aotc.Graphs(use="never"))
    together = torch.zeros(2, dtype=torch.int64, device="cuda:0")
    module.steps = together[1]
    with pytest.raises(BindError) as caught:
        compiled(*inputs(1, 1, 8), torch.tensor(0, device="cuda:0"), torch.zeros(1, 8, device="cuda:0"))
    assert caught.value.issues[0].where == "steps" and "16" in caught.value.issues[0].message
    module.steps = together[0]
    compiled(*inputs(1, 1, 8), torch.tensor(0, device="cuda:0"), torch.zeros(1, 8, device="cuda:0"))
    assert together.tolist() == [1, 0]


def test_a_recapture_leaves_buffers_alone(gpu: Gpu) -> None:
    module = gpu.module("stateful")
    compiled = gpu.load("stateful", module, graphs=aotc.Graphs(use="always"))
    x, position = inputs(1, 1, 8)[0], torch.tensor(5, device="cuda:0")
    compiled(x, position, x.clone())
    scale_data(module)  # parameters only: the next call captures anew
    module.steps = module.steps.clone()
    eager = copy.deepcopy(module)
    output, _ = compiled(x, position, x.clone())
    expected, _ = eager(x, position, x.clone())
    assert close(output, expected) and close(module.keys, eager.keys)
    assert module.steps.item() == 2


def test_outputs_do_not_change_with_the_buffers_they_came_from(gpu: Gpu) -> None:
    compiled, _ = gpu.loaded("stateful", graphs=aotc.Graphs(use="always"))
    x, position = inputs(1, 1, 8)[0], torch.tensor(0, device="cuda:0")
    kept = [compiled(x, position, x.clone())[1] for _ in range(4)]
    assert [int(steps) for steps in kept] == [10, 20, 30, 40]
