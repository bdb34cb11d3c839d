"""Models of DTensors are captured as code of local tensors. Here one process is a rank of a fake group."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ROOT

from aotc.compiler.capture.collectives import code_digest, name_groups
from aotc.compiler.capture.export import capture
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.plan import plan_units
from aotc.manifest import ModelSpec, read_manifest
from aotc.models.calls import signature_leaves
from aotc.models.factory import build_module
from aotc.models.ranks import group_left
from aotc.models.signature import make_signature
from aotc.records import Parallel

EXAMPLE = ROOT / "examples" / "tensor_parallel"
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def captured(spec: ModelSpec, rank: int, folder: Path = EXAMPLE) -> Capture:
    module = build_module(spec, folder, rank=rank)
    signature = make_signature(spec, module)
    leaves = signature_leaves(spec, signature, {}, "cpu", 0, Path())
    found = capture(module, signature, leaves, None, False)
    name_groups(found.graph, Parallel("tensor", 2))
    return found


def test_a_model_split_by_transformers_is_captured_alike_on_every_rank() -> None:
    pytest.importorskip("transformers")
    inputs = {
        "input_ids": {"shape": [1, 8], "dtype": "int64", "init": {"randint": [0, 64]}},
        "use_cache": False,
    }
    spec = ModelSpec(
        "llama",
        "transformers_llama.py:llama",
        inputs,
        ({},),
        {**TINY, "num_key_value_heads": 2},
        parallel={"tensor": 2},
    )
    with group_left():
        first, second = (captured(spec, rank) for rank in range(2))
    targets = [str(node.target) for node in first.graph.graph.nodes]
    assert targets.count("_c10d_functional.all_reduce.default") == 2  # of attention and MLP
    assert "model.layers.0.mlp.up_proj.weight._local_tensor" in first.state
    assert not any("DTensor" in target for target in targets)
    assert code_digest(first) == code_digest(second)


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
