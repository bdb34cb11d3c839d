"""Models of DTensors are captured as code of local tensors. Here one process is a rank of a fake group."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest
import torch
from processes import ROOT
from torch import nn
from torch.torch_version import TorchVersion

from aotc.compiler.capture.checks.captured_graph import call_captured
from aotc.compiler.capture.collectives import code_digest, name_groups
from aotc.compiler.capture.export import capture
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.messages import Job
from aotc.compiler.planning.plan import plan_units
from aotc.compiler.rank_kinds import with_own_regions
from aotc.errors import BuildError
from aotc.manifest import ModelSpec, read_manifest
from aotc.models.calls import signature_leaves
from aotc.models.factory import build_module
from aotc.models.fake_ranks import group_left
from aotc.models.signature import make_signature
from aotc.records import Parallel

EXAMPLE = ROOT / "examples" / "tensor_parallel"
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}

OF_2_13 = TorchVersion(torch.__version__) >= (2, 13)
INPUTS = {
    "input_ids": {"shape": [1, 8], "dtype": "int64", "init": {"randint": [0, 64]}},
    "use_cache": False,
}


def captured(spec: ModelSpec, rank: int, folder: Path = EXAMPLE) -> Capture:
    module = build_module(spec, folder, rank=rank)
    signature = make_signature(spec, module)
    # transformers makes its model on a GPU, where there is one.
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    leaves = signature_leaves(spec, signature, {}, device, 0, Path())
    found = capture(module, signature, leaves, None, False)
    name_groups(found.graph, Parallel("tensor", 2))
    return found


def test_a_checkpoint_that_transformers_splits_is_captured_as_local_tensors(tmp_path: Path) -> None:
    """`from_pretrained(tp_plan="auto")`, in a process that torchrun did not start."""
    transformers = pytest.importorskip("transformers")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(tmp_path)
    kwargs = {"checkpoint": str(tmp_path)}
    spec = ModelSpec(
        "pretrained", "transformers_llama.py:pretrained", INPUTS, ({},), kwargs=kwargs, parallel={"tensor": 2}
    )
    with group_left():
        ranks = [captured(spec, rank) for rank in range(2)]
    for rank in ranks:
        targets = [str(node.target) for node in rank.graph.graph.nodes]
        # Of attention and MLP; by the plans of some versions, of the embedding, too.
        assert targets.count("_c10d_functional.all_reduce.default") in (2, 3)
        assert "model.layers.0.mlp.up_proj.weight._local_tensor" in rank.state
        assert not any("DTensor" in target for target in targets)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_ranks_shard_holds_its_part_of_the_weight(rank: int) -> None:
    spec = ModelSpec("shards", "dtensors.py:feed_forward", {}, ({},), kwargs={"hidden": 5}, parallel={"tensor": 2})
    with group_left():
        module = build_module(spec, EXAMPLE, rank=rank)
        up, down = (layer.weight.to_local() for layer in (module.up, module.down))
    torch.manual_seed(0)
    whole = nn.ModuleDict({"up": nn.Linear(32, 5), "down": nn.Linear(5, 32)})
    assert torch.equal(up, whole["up"].weight.chunk(2)[rank])
    assert torch.equal(down, whole["down"].weight.chunk(2, dim=1)[rank])


def test_ranks_that_compute_with_their_number_are_not_of_one_code(tmp_path: Path) -> None:
    (tmp_path / "numbered.py").write_text(NUMBERED)
    spec = ModelSpec("numbered", "numbered.py:make", {"x": {"shape": [2, 8]}}, ({},), parallel={"tensor": 2})
    with group_left():
        first, second = (captured(spec, rank, tmp_path) for rank in range(2))
    assert code_digest(first) != code_digest(second)


NUMBERED = """
import torch
class Numbered(torch.nn.Module):
    def forward(self, x):
        return x + self._number
def make(rank):
    module = Numbered()
    module._number = rank
    return module
"""


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}])
def test_variables_of_a_rank_are_set_for_its_factory_and_what_that_sets_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, int]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACME_MODE"):
        monkeypatch.setenv(name, "before")  # which is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "7")
    (tmp_path / "setting.py").write_text(SETTING)
    with group_left():
        module = build_module(ModelSpec("set", "setting.py:make", {}, ({},), parallel=parallel), tmp_path, rank=0)
    assert module.seen == (["0", "2", "0"] if parallel else [None, "7", None])
    assert os.environ["ACME_MODE"] == "fast", "forward may read it"
    assert os.environ["WORLD_SIZE"] == "7" and "RANK" not in os.environ


SETTING = """
import os
import torch
def make():
    module = torch.nn.Linear(2, 2)
    module.seen = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    os.environ["ACME_MODE"] = "fast"
    return module
"""


@pytest.mark.parametrize("part", ["buffer", "attribute"])
def test_the_key_of_a_unit_depends_on_every_rank(tmp_path: Path, part: str) -> None:
    """Of a factory that reads a file for each rank: a buffer that no checkpoint holds, or a plain attribute."""
    (tmp_path / "by_file.py").write_text(BY_FILE)
    (tmp_path / "manifest.yaml").write_text(OF_FILES.replace("PART", part))
    keys = []
    for first, second in [("1", "1"), ("1", "1"), ("1", "2"), ("2", "1")]:
        for rank, number in enumerate([first, second]):
            (tmp_path / f"rank{rank}.txt").write_text(number)
        with group_left():
            keys += [unit.key for unit in plan_units(read_manifest(tmp_path / "manifest.yaml"))]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


BY_FILE = """
from pathlib import Path
import torch
class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * self.scale
def make(rank, part):
    module, scale = Scaled(), float((Path(__file__).parent / f"rank{rank}.txt").read_text())
    if part == "buffer":
        module.register_buffer("scale", torch.tensor(scale), persistent=False)
    else:
        module.scale = scale
    return module
"""

OF_FILES = """
version: 1
models:
  scaled:
    factory: by_file.py:make
    kwargs: {part: PART}
    parallel: {tensor: 2}
    inputs: {x: {shape: [2, 8]}}
    buckets: [{}]
"""


@pytest.mark.parametrize(
    ("call", "name", "hint"),
    [
        ("dist.broadcast(x, 0)", "torch.distributed.broadcast", "_functional_collectives.broadcast(tensor"),
        ("dist.all_reduce(x, async_op=True).wait()", "torch.distributed.all_reduce", "all_reduce(tensor"),
        pytest.param(
            *("functional.all_reduce(x)", "torch.distributed.nn.functional.all_reduce", "all_reduce(tensor"),
            marks=pytest.mark.skipif(not OF_2_13, reason="before torch 2.13, it is captured"),
        ),
        ("dist.all_gather_into_tensor(x.new_empty(2, *x.shape), x)", "all_gather_into_tensor", "all_gather_tensor("),
        (
            "dist.all_to_all([x.clone(), x.clone()], [x, x])",
            "torch.distributed.all_to_all",
            "all_to_all_single(tensor, received_sizes, sent_sizes, group)",
        ),
        ("dist.gather(x, [x.clone(), x.clone()])", "torch.distributed.gather", "which every rank gets"),
        ("dist.send(x, 1)", "torch.distributed.send", "by `regions`"),
        ("dist.barrier()", "torch.distributed.barrier", "leave it out"),
        ("dist.all_gather_object([None, None], 3)", "torch.distributed.all_gather_object", "before the call"),
    ],
)
def test_a_collective_that_cannot_be_captured_is_named_with_one_that_can(
    tmp_path: Path, call: str, name: str, hint: str
) -> None:
    (tmp_path / "calling.py").write_text(CALLING.replace("CALL", call))
    spec = ModelSpec("calling", "calling.py:Calling", {"x": {"shape": [2, 8]}}, ({},), parallel={"tensor": 2})
    with group_left(), pytest.raises(BuildError, match=re.escape(f"{name}, which cannot be captured")) as caught:
        captured(spec, 0, tmp_path)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("call", "operator"),
    [
        ("dist.all_reduce(x)", "all_reduce"),
        ("dist.all_to_all_single(x, x.clone())", "all_to_all_single"),
        ("dist.reduce_scatter_tensor(x[:1], x.clone())", "reduce_scatter_tensor"),
        ("dist.all_gather([x, x], x.clone())", "all_gather_into_tensor"),
    ],
)
def test_collectives_in_place_are_captured_as_functional_ones(tmp_path: Path, call: str, operator: str) -> None:
    """The captured code computes what eager does, as one of fake ranks."""
    (tmp_path / "calling.py").write_text(CALLING.replace("CALL", call))
    spec = ModelSpec("calling", "calling.py:Calling", {"x": {"shape": [2, 8]}}, ({},), parallel={"tensor": 2})
    with group_left():
        found = captured(spec, 1, tmp_path)
        module, x = build_module(spec, tmp_path, rank=1), torch.arange(16.0).view(2, 8)
        outputs, _ = call_captured(module, found, [x.clone()], (), {})
        if OF_2_13:  # fake groups of earlier versions write nothing into some of the outputs
            torch.testing.assert_close(outputs[0], module(x.clone()))
    assert f"_c10d_functional.{operator}.default" in [str(node.target) for node in found.graph.graph.nodes]


CALLING = """
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
class Calling(torch.nn.Module):
    def forward(self, x):
        x = x * 2
        CALL
        return x + 1
"""


def test_a_collective_without_ranks_in_the_manifest_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "calling.py").write_text(CALLING.replace("CALL", "dist.all_reduce(x)"))
    spec = ModelSpec("calling", "calling.py:Calling", {"x": {"shape": [2, 8]}}, ({},))
    with pytest.raises(BuildError) as caught:
        captured(spec, 0, tmp_path)
    assert "`parallel: {tensor: N}`" in caught.value.hint


def test_a_further_rank_calls_a_region_with_inputs_of_its_own_sizes(tmp_path: Path) -> None:
    """Five columns are three of rank 0, which the plan found, and two of rank 1."""
    (tmp_path / "uneven.py").write_text(UNEVEN)
    (tmp_path / "manifest.yaml").write_text(BY_REGIONS)
    with group_left():
        (unit,) = plan_units(manifest := read_manifest(tmp_path / "manifest.yaml"))
        spec = manifest.models["uneven"]
        job = Job(unit, str(tmp_path), "")
        own = with_own_regions(job, build_module(spec, tmp_path, rank=1), 1)
        renamed = msgspec.structs.replace(job, unit=msgspec.structs.replace(unit, region="0.up"))
        with pytest.raises(BuildError, match=r"rank 1 calls the regions 0.down -; rank 0 calls 0.up -, too"):
            with_own_regions(renamed, build_module(spec, tmp_path, rank=1), 1)
    shapes = [region.signature.leaves[0].shape for regions in (unit.regions, own.unit.regions) for region in regions]
    assert shapes == [(4, 3), (4, 2)]
    assert own.unit.regions[0].instances == ("0.down", "1.down")


UNEVEN = """
import torch
from torch import nn
class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(16, hidden), nn.Linear(hidden, 16)
    def forward(self, x):
        return self.down(self.up(x))
def make(rank, world_size):
    return nn.Sequential(*(Layer(len(torch.arange(5).chunk(world_size)[rank])) for _ in range(2)))
"""

BY_REGIONS = """
version: 1
models:
  uneven:
    factory: uneven.py:make
    parallel: {tensor: 2}
    regions: ["*.down"]
    inputs: {input: {shape: [4, 16]}}
    buckets: [{}]
"""
