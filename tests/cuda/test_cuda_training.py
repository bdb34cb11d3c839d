"""Whole training steps as CUDA graphs: those of eager with torch's optimizers, whatever is changed between them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import FOLDER, start_aotc
from sharding import assert_sharded_as_whole
from torch import Tensor, nn

import aotc
from aotc.machine.native_target import resolve_target
from aotc.manifest import read_manifest
from aotc.models.factory import build_module
from aotc.verify.comparison import Comparison, VerifyJob
from aotc.verify.training import compare_training

pytestmark = pytest.mark.cuda

Step = Callable[..., Tensor]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    output = folder / "build.json"
    command = ("build", FOLDER / "training.yaml", "--store", folder / "store", "--jobs", "4", "--json")
    status = start_aotc(*command, output=output).wait()
    assert status == 0, output.read_text() + output.with_name("build.json.log").read_text()
    return folder / "store"


def loaded(store: Path, name: str) -> tuple[Any, nn.Module]:
    manifest = read_manifest(FOLDER / "training.yaml")
    torch.manual_seed(0)
    module = build_module(manifest.models[name], manifest.folder).to("cuda:0").train()
    return aotc.load(f"{store}#{name}", module), copy.deepcopy(module)


def inputs(name: str, size: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    if name == "stack":
        return (torch.randint(0, 10, (size, 8), generator=generator).cuda(),)
    return torch.randn(size, 8, generator=generator).cuda(), torch.randn(size, 4, generator=generator).cuda()


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(*given: Tensor) -> Tensor:
        optimizer.zero_grad()
        result = model(*given)
        loss: Tensor = result["loss"] if isinstance(result, dict) else result
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)


def assert_same(compiled: nn.Module, eager: nn.Module) -> None:
    for (path, one), other in zip(compiled.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=path)


@pytest.mark.parametrize(
    ("name", "optimizer", "options"),
    [
        ("mixed", "SGD", {}),
        ("mixed", "SGD", {"momentum": 0.9, "nesterov": True}),
        ("stack", "AdamW", {"weight_decay": 0.1}),
        ("stack", "AdamW", {"amsgrad": True}),
    ],
)
def test_steps_are_those_of_eager(store: Path, graphs: Any, name: str, optimizer: str, options: dict[str, Any]) -> None:
    """Whole and by regions, of two sizes, on two streams, with an lr that a scheduler sets."""
    compiled, eager = loaded(store, name)
    own = getattr(aotc.optim, optimizer)(compiled.parameters(), lr=0.01, **options)
    torchs = getattr(torch.optim, optimizer)(eager.parameters(), lr=0.01, **options)
    step, expected = aotc.TrainingStep(compiled, own), eager_step(eager, torchs)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 40) for each in (own, torchs)]
    other = torch.cuda.Stream()
    kept = []
    for number in range(20):
        given = inputs(name, 6 if number % 3 else 8, number)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other if number > 10 else None):
            loss = step(*given)
        torch.cuda.current_stream().wait_stream(other)
        kept.append((loss, expected(*given)))
        for schedule in schedules:
            schedule.step()
    assert (graphs.captured, graphs.replayed) == (2, 18)  # the first steps of both sizes are direct
    if name == "mixed":
        assert compiled.stats().calls == 20
    for one, same in kept:
        torch.testing.assert_close(one, same, rtol=1e-3, atol=1e-4)
    assert_same(compiled, eager)
    assert all(each.grad is None for each in compiled.parameters())


def test_dropout_draws_anew_in_each_replay_and_follows_the_seed(store: Path, graphs: Any) -> None:
    compiled, _ = loaded(store, "random")
    step = aotc.TrainingStep(compiled, aotc.optim.SGD(compiled.parameters(), lr=0.0), loss=lambda result: result.sum())
    x = inputs("random", 16, 0)[0]
    step(x), step(x)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([step(x).item() for _ in range(3)])
    assert runs[0] == runs[1] and len({*runs[0]}) == 3
    assert graphs.captured == 1


@pytest.mark.parametrize(("name", "size"), [("mixed", 6), ("random_as_eager", 16), ("stack", 6)])
def test_verify_trains_by_graphs(store: Path, graphs: Any, name: str, size: int) -> None:
    spec = read_manifest(FOLDER / "training.yaml").models[name]
    job = VerifyJob(f"{store}#{name}", str(store), spec, str(FOLDER), resolve_target("cuda"), 1)
    found = compare_training(Comparison(job), {"batch": size})
    assert all(each.ok for each in found), [each.detail for each in found]
    assert (graphs.captured, graphs.replayed) == (1, 9)


def test_what_is_changed_between_steps_is_used(store: Path, graphs: Any) -> None:
    """A state that is loaded, options, weights that are loaded in place, clipping, and steps without graphs."""
    compiled, eager = loaded(store, "stack")
    own = aotc.optim.AdamW(compiled.parameters(), lr=0.01)
    torchs = torch.optim.AdamW(eager.parameters(), lr=0.01, fused=True)
    step, expected = aotc.TrainingStep(compiled, own), eager_step(eager, torchs)

    def train(count: int) -> None:
        for number in range(count):
            given = inputs("stack", 6, number)
            torch.testing.assert_close(step(*given), expected(*given), rtol=1e-3, atol=1e-4)

    train(4)
    assert (graphs.captured, graphs.replayed) == (1, 3)
    for optimizer in (own, torchs):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(3)
    assert (graphs.captured, graphs.replayed) == (2, 5)
    for optimizer in (own, torchs):
        optimizer.param_groups[0]["weight_decay"] = 0.5
        optimizer.param_groups[0]["lr"] = 0.002
    train(3)
    assert (graphs.captured, graphs.replayed) == (3, 7)
    for model in (compiled, eager):
        with torch.no_grad():
            model.head.weight.mul_(0.5)
    train(1)
    assert (graphs.captured, graphs.replayed) == (3, 8)
    for optimizer in (own, torchs):
        optimizer.register_step_pre_hook(clip)
        optimizer.param_groups[0]["eps"] = 1e-6
    train(3)
    assert (graphs.captured, graphs.replayed) == (4, 10)
    assert_same(compiled, eager)


def test_what_cannot_be_captured_is_refused_and_leaves_all_as_it_was(store: Path) -> None:
    compiled, _ = loaded(store, "mixed")
    with pytest.raises(aotc.BindError, match=r"(?s)AdamW with fused=None.*fused=True.*cuda_graph=False"):
        aotc.TrainingStep(compiled, torch.optim.AdamW(compiled.parameters()))
    optimizer = aotc.optim.SGD(compiled.parameters(), lr=0.01)
    step = aotc.TrainingStep(compiled, optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: torch.cuda.synchronize())
    given = inputs("mixed", 6, 0)
    step(*given)
    before = copy.deepcopy(compiled.state_dict())
    with pytest.raises(aotc.LibraryError, match=r"(?s)cannot be captured.*cuda_graph=False"):
        step(*given)
    assert all(map(torch.equal, compiled.state_dict().values(), before.values()))
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    torch.randn(2, device="cuda")
    handle.remove()
    losses = [step(*given).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    optimizer.param_groups[0]["lr"] = "0.1"
    with pytest.raises(aotc.BindError, match=r"lr is '0\.1'"):
        step(*given)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(aotc.MissError):
        step(*inputs("mixed", 2, 0))
    compiled.update_weights({"leave.bias": torch.ones(4)})
    with pytest.raises(aotc.BindError, match="were replaced"):
        step(*given)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fully_sharded_regions_on_two_gpus(store: Path) -> None:
    """Each rank loads the code for the GPU of its number."""
    assert_sharded_as_whole(store, "cuda", 1e-5, NCCL_NVLS_ENABLE="0")  # multicast needs rights
