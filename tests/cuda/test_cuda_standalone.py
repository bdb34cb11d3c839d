"""Code for a GPU in a process without torch: values against eager, as graphs, over many calls and threads."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import filelock
import numpy
import pytest
import torch
from processes import ROOT, finish, run_aotc, start
from safetensors.torch import save_file
from torch import Tensor, nn

from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference

HERE = Path(__file__).parent
pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def store(shared_folder: Path) -> Path:
    """Built by the first of pytest-xdist's processes that asks."""
    store = shared_folder / "standalone"
    with filelock.FileLock(store.with_suffix(".lock")):
        if not store.with_suffix(".built").exists():
            built = run_aotc("build", HERE / "standalone.yaml", "--store", store, "--untuned", "--jobs", "4")
            assert built.returncode == 0, built.stdout + built.stderr
            store.with_suffix(".built").touch()
    return store


def models() -> Any:
    spec = importlib.util.spec_from_file_location("standalone_models", HERE / "standalone_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(store: Path, folder: Path, name: str, module: nn.Module, calls: list[list[Tensor]], kind: str = "") -> Any:
    """What the process tells, and the largest difference from eager, of results that are at most `1 + |expected|`. The
    weights are others than those that the code was built with."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + torch.rand(parameter.shape).to(parameter.dtype) / 4)
    weights = {key: value.clone().contiguous() for key, value in module.state_dict().items()}
    save_file(weights, folder / "weights.safetensors")
    arrays = {f"x{call}_{at}": each.numpy() for call, inputs in enumerate(calls) for at, each in enumerate(inputs)}
    numpy.savez(folder / "given.npz", calls=len(calls), inputs=len(calls[0]), **arrays)
    ran = finish(start(HERE / "without_torch_on_gpu.py", f"{store}#{name}", folder, kind, cwd=ROOT))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout)
    module = module.cuda()
    worst = 0.0
    with numpy.load(folder / "results.npz") as results, torch.no_grad():
        for at, inputs in enumerate(calls):
            result: Any = module(*(each.cuda() for each in inputs))
            value = result if isinstance(result, Tensor) else result[0]
            expected = value.float().cpu().numpy()
            worst = max(worst, float((abs(results[f"y{at}"] - expected) / (1 + abs(expected))).max()))
    assert told["torch"] == told["mapped"] == [] and told["calls"] == told["graphs"] == len(calls)
    return told, worst


def test_a_block_of_float16_gives_eagers_values_many_times(store: Path, tmp_path: Path) -> None:
    from examples.models import transformer_block

    torch.manual_seed(0)
    module = transformer_block(width=256, heads=4).half().eval()
    told, worst = run(store, tmp_path, "block", module, [[torch.randn(4, 128, 256).half()]], "many")
    assert worst < 0.02
    assert told["grown"] == 0 and told["wrong"] == 0 and told["on_gpu"] == 2 and told["after"]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in told["out_of_memory"]


def test_a_product_of_zeros_gives_eagers_values(store: Path, tmp_path: Path) -> None:
    _, worst = run(store, tmp_path, "queries", models().queries().half(), [[torch.randn(64, 64).half()]])
    assert worst < 0.02


def test_large_weights_reach_the_gpu_by_several_threads(store: Path, tmp_path: Path) -> None:
    module = models().wide().half()
    _, worst = run(store, tmp_path, "wide", module, [[torch.randperm(module.ROWS)]])
    assert worst == 0


def test_bert_of_bfloat16_gives_eagers_values_with_a_mask(store: Path, tmp_path: Path) -> None:
    ids, mask = torch.randint(0, 128, (2, 128)), torch.ones(2, 128, dtype=torch.int64)
    mask[0, 100:] = 0
    _, worst = run(store, tmp_path, "bert", models().bert().bfloat16(), [[ids, mask]])
    assert worst < 0.05


def test_transposed_and_dilated_convolutions_of_a_vocoder_give_eagers_values(store: Path, tmp_path: Path) -> None:
    _, worst = run(store, tmp_path, "vocoder", models().vocoder().half(), [[torch.randn(2, 40, 80).half()]])
    assert worst < 0.02


def test_a_llama_keeps_its_cache_between_calls(store: Path, tmp_path: Path) -> None:
    module = models().decode().bfloat16()
    prompt = [torch.arange(3, 11)[None], torch.tensor([0])]
    steps = [[torch.tensor([[at + 3]]), torch.tensor([at])] for at in range(8, 16)]
    _, worst = run(store, tmp_path, "decode", module, [prompt, *steps])
    assert worst < 0.05


def test_attention_of_few_rows_gives_eagers_values(store: Path, tmp_path: Path) -> None:
    """With fewer than 128 rows it is another template."""
    given = [torch.randn(shape).half() for shape in ((2, 128, 512), (2, 8, 256, 64), (2, 8, 256, 64))]
    _, worst = run(store, tmp_path, "attentions", models().attentions(), [given])
    assert worst < 0.02


@pytest.mark.parametrize("name", ["block", "bert", "decode", "attentions", "vocoder"])
def test_verify_finds_what_runs_without_torch_right(store: Path, name: str) -> None:
    """With extreme inputs, and the buffers that a model writes to."""
    ran = run_aotc("verify", f"{store}#{name}", "--standalone", "--seeds", "2", "--json", cwd=HERE)
    assert_right(ran)


@pytest.mark.parametrize("runtime", [["--standalone"], []])
def test_logits_of_clip_that_share_memory_share_it_in_the_results_of_a_graph(store: Path, runtime: list[str]) -> None:
    """`verify` compares addresses."""
    opened = Store.open(store)
    (entry,) = read_bundle(opened, parse_reference("clip")).artifacts
    assert all(variant.launch and variant.launch.graph for variant in read_artifact(opened, entry).variants)
    assert_right(run_aotc("verify", f"{store}#clip", *runtime, "--seeds", "1", "--json", cwd=HERE))


def assert_right(verified: subprocess.CompletedProcess[str]) -> None:
    rows = json.loads(verified.stdout)
    assert verified.returncode == 0 and rows, verified.stdout + verified.stderr
    assert {row["status"] for row in rows} == {"ok"}
