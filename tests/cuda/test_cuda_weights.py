"""Checkpoints without a module, and swaps while serving, with and without CUDA graphs, on several streams."""

from __future__ import annotations

import copy
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import FOLDER, Gpu, all_close, close, inputs, run_python
from safetensors.torch import save_file
from torch import Tensor, nn

import aotc

pytestmark = pytest.mark.cuda

LAUNCHES = ["never", "always"]
WAYS = ["module", "weights"]
SLEEP = 100_000_000
"""Cycles that a stream is kept busy: about 50 ms, far longer than a call."""


def scaled(module: nn.Module, factor: float) -> dict[str, Tensor]:
    return {name: each.detach() * factor for name, each in module.named_parameters()}


def twin(module: nn.Module, factor: float) -> nn.Module:
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.mul_(factor)
    return other


def served(gpu: Gpu, way: str, model: str = "mlp", **options: Any) -> tuple[Any, nn.Module]:
    """A loaded model, and its weights in a module for eager."""
    module = gpu.module(model)
    given: dict[str, Any] = {"module": copy.deepcopy(module)} if way == "module" else {"weights": scaled(module, 1)}
    return aotc.load(f"{gpu.store}#{model}", device="cuda:0", **given, **options), module


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_file_is_copied_straight_to_the_gpu(gpu: Gpu, launch: str, tmp_path: Path) -> None:
    module = gpu.module("mlp")
    save_file({name: each.cpu() for name, each in scaled(module, 1).items()}, tmp_path / "model.safetensors")
    compiled = aotc.load(f"{gpu.store}#mlp", weights=tmp_path, graphs=aotc.Graphs(use=launch))
    assert compiled.device == torch.device("cuda:0")
    for batch in (4, 16):
        assert all_close(compiled, module, inputs(2, batch, 64))


def test_a_fresh_process_needs_neither_module_nor_compiler(gpu: Gpu, tmp_path: Path) -> None:
    save_file({name: each.cpu() for name, each in scaled(gpu.module("mlp"), 1).items()}, tmp_path / "m.safetensors")
    code = (
        "import sys, torch, aotc\n"
        "compiled = aotc.load(sys.argv[1] + '#mlp', weights=sys.argv[2], device='cuda')\n"
        "compiled(torch.ones(4, 64, device='cuda')).sum().item()\n"
        "compiled.update_weights(sys.argv[2])\n"
        "compiled(torch.ones(4, 64, device='cuda')).sum().item()\n"
        "banned = ('torch._dynamo', 'torch._inductor', 'triton', 'sympy', 'gpu_models')\n"
        "print([name for name in sys.modules if name.startswith(banned)])\n"
    )
    assert FOLDER.is_dir()
    assert run_python(code, gpu.store, tmp_path / "m.safetensors") == "[]\n"


def test_buffers_that_the_model_writes_to_are_its_own(gpu: Gpu) -> None:
    module = gpu.module("stateful")
    state = {name: each.detach() for name, each in module.state_dict().items()}
    before = {name: each.clone() for name, each in state.items()}
    compiled, x = aotc.load(f"{gpu.store}#stateful", weights=state), inputs(1, 1, 8)[0]
    eager = copy.deepcopy(module)
    for step in range(3):
        position = torch.tensor(step, device="cuda:0")
        output, steps = compiled(x, position, x.clone())
        expected, expected_steps = eager(x, position, x.clone())
        assert close(output, expected) and torch.equal(steps, expected_steps)
    assert all(torch.equal(state[name], before[name]) for name in state)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("capture", ["eager", "lazy"])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_next_call_uses_the_new_weights(gpu: Gpu, launch: str, capture: str, way: str) -> None:
    compiled, module = served(gpu, way, graphs=aotc.Graphs(use=launch, capture=capture))
    for factor in (1.0, 1.5, 0.5):
        compiled.update_weights(scaled(module, factor))
        for batch in (4, 16, 3):
            assert all_close(compiled, twin(module, factor), inputs(2, batch, 64))


def test_graphs_are_captured_by_the_update_and_not_by_the_next_call(gpu: Gpu, graphs: Any) -> None:
    compiled, module = served(gpu, "weights", graphs=aotc.Graphs(use="always"))
    captured = graphs.captured
    compiled.update_weights(scaled(module, 2))
    assert graphs.captured == captured + 2
    assert all_close(compiled, twin(module, 2), [*inputs(1, 4, 64), *inputs(1, 16, 64)])
    assert graphs.captured == captured + 2


def called_behind_a_sleep(compiled: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Stream]:
    """The output of a call that waits on another stream, and that stream."""
    stream = torch.cuda.Stream()
    compiled(x)  # the first direct call loads kernels, which waits for the device
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40 * SLEEP)
        return compiled(x), stream


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_work_that_waits_on_another_stream_finishes_on_the_old_weights(gpu: Gpu, launch: str, way: str) -> None:
    """The old weights' memory is asked for again, and overwritten, before that work begins."""
    compiled, module = served(gpu, way, graphs=aotc.Graphs(use=launch))
    (x,) = inputs(1, 4, 64)
    expected = module(x)
    output, stream = called_behind_a_sleep(compiled, x)
    if way == "module":
        module = copy.deepcopy(module)
    compiled.update_weights(scaled(module, 3))
    junk = [torch.full((size,), float("nan"), device="cuda:0") for size in (64, 256, 16384, 65536) * 8]
    assert not stream.query(), "the sleep was too short for this test"
    stream.synchronize()
    assert close(output, expected)
    assert close(compiled(x), twin(module, 3)(x))
    del junk


@pytest.mark.parametrize("launch", LAUNCHES)
def test_work_that_waits_on_another_stream_finishes_when_the_callable_is_gone(gpu: Gpu, launch: str) -> None:
    """The memory of its weights and static buffers is asked for again, and overwritten, before that work begins."""
    compiled, module = served(gpu, "weights", graphs=aotc.Graphs(use=launch))
    (x,) = inputs(1, 4, 64)
    expected = module(x)
    output, stream = called_behind_a_sleep(compiled, x)
    gone = weakref.ref(compiled)
    del compiled
    assert gone() is None
    junk = [torch.full((size,), float("nan"), device="cuda:0") for size in (64, 256, 1024, 16384, 65536) * 8]
    assert not stream.query(), "the sleep was too short for this test"
    stream.synchronize()
    assert close(output, expected)
    del junk


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_no_call_sees_a_mixture_whatever_its_stream(gpu: Gpu, launch: str, way: str) -> None:
    compiled, module = served(gpu, way, graphs=aotc.Graphs(use=launch))
    xs = [x for batch in (4, 16, 3) for x in inputs(4, batch, 64)]
    factors = (1.0, 3.0)
    expected = [[twin(module, factor)(x) for x in xs] for factor in factors]
    torch.cuda.synchronize()
    wrong: list[str] = []
    stop = threading.Event()

    def call(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            count = number
            while not stop.is_set():
                count += 1
                index = count % len(xs)
                output = compiled(xs[index])
                stream.synchronize()
                if not any(close(output, right[index]) for right in expected):
                    wrong.append(f"thread {number}, call {count}")

    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(call, number) for number in range(3)]
        try:
            for number in range(40):
                compiled.update_weights(scaled(module, factors[number % 2]))
                assert close(compiled(xs[0]), expected[number % 2][0])
        finally:
            stop.set()
    for one in calls:
        one.result()
    assert not wrong, f"{len(wrong)}, first {wrong[:3]}"


def test_a_cache_stays_as_it_is_through_a_swap(gpu: Gpu) -> None:
    """Capturing anew neither runs the model on the cache nor forgets it."""
    compiled, module = served(gpu, "module", "stateful", graphs=aotc.Graphs(use="always"))
    eager, (x,) = copy.deepcopy(module), inputs(1, 1, 8)
    for step in range(4):
        if step == 2:
            compiled.update_weights(scaled(module, 2))
            for name, value in scaled(module, 2).items():
                eager.get_parameter(name).copy_(value)
        position = torch.tensor(step, device="cuda:0")
        output, steps = compiled(x, position, x.clone())
        expected, expected_steps = eager(x, position, x.clone())
        assert close(output, expected) and torch.equal(steps, expected_steps)
    assert close(compiled.module.keys, eager.keys)


def test_a_capture_that_fails_leaves_the_old_weights(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, module = served(gpu, "module", graphs=aotc.Graphs(use="always"))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no capture today")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", fail)
    with pytest.raises(aotc.LibraryError, match="no capture today"):
        compiled.update_weights(scaled(module, 2))
    monkeypatch.undo()
    assert all_close(compiled, module, inputs(2, 4, 64))
    assert torch.equal(compiled.module.up.weight, module.up.weight)


def test_swaps_do_not_add_up_memory(gpu: Gpu) -> None:
    compiled, module = served(gpu, "weights", graphs=aotc.Graphs(use="always"))
    weights = scaled(module, 2)
    used = []
    for _ in range(6):
        compiled.update_weights(weights)
        compiled(*inputs(1, 4, 64))
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[1]


@pytest.mark.parametrize("pinned", [True, False])
def test_large_weights_go_through_small_pinned_buffers(
    pinned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of several sizes and layouts, some of which are copied plainly; all are, where no memory can be pinned."""
    from aotc.runtime.checkpoints import checkpoint_files, staged

    monkeypatch.setattr(staged, "SMALL", 64 << 20)
    if not pinned:

        def refuse(*_: object) -> None:
            raise RuntimeError("the limit on locked memory")

        monkeypatch.setattr(staged, "CudaLane", refuse)
    device = torch.device("cuda", torch.cuda.current_device())
    sources = [torch.randn(9 << 20), torch.randn(3000, 3001).t(), torch.randn(7, dtype=torch.bfloat16)]
    sources += [torch.randn(1000, 2000)[:, ::2], torch.randn(1 << 20, device=device), torch.randn(11 << 20)[1:]]
    copies = [(torch.empty_like(each, device=device), each) for each in sources]
    for placed, _ in copies:
        placed.fill_(-1)  # on the caller's stream, just before
    with caplog.at_level("INFO", logger="aotc"):
        checkpoint_files._copy_all(copies, device)
    assert all(torch.equal(placed.cpu(), source.cpu()) for placed, source in copies)
    assert ("no memory can be pinned" in caplog.text) is not pinned


def test_a_child_of_a_process_that_prepared_loads_on_the_gpu(gpu: Gpu, tmp_path: Path) -> None:
    """Twice, in children of one parent that has touched no GPU; not in one of a parent that has."""
    save_file({name: each.cpu() for name, each in scaled(gpu.module("mlp"), 1).items()}, tmp_path / "m.safetensors")
    code = (
        "import os, sys, torch, aotc\n"
        "prepared = aotc.prepare(sys.argv[1] + '#mlp', weights=sys.argv[2])\n"
        "def child():\n"
        "    reading, writing = os.pipe()\n"
        "    if os.fork() == 0:\n"
        "        try:\n"
        "            y = prepared.load()(torch.ones(4, 64, device='cuda')).sum().item()\n"
        "            os.write(writing, f'{y:.4f}'.encode())\n"
        "        except Exception as error:\n"
        "            os.write(writing, type(error).__name__.encode())\n"
        "        os._exit(0)\n"
        "    os.close(writing)\n"
        "    os.wait()\n"
        "    return os.read(reading, 100).decode()\n"
        "assert not torch.cuda.is_initialized()\n"
        "said = [child(), child()]\n"
        "said.append(f\"{prepared.load()(torch.ones(4, 64, device='cuda')).sum().item():.4f}\")\n"
        "print(*said, child())\n"
    )
    first, second, here, refused = run_python(code, gpu.store, tmp_path / "m.safetensors").split()
    assert first == second == here
    assert refused == "ForkError"
