"""Loops of C++ kernels: how many threads they ask for, which only the service knows."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.codecache import AotCodeCompiler

from aotc.compiler.patches import serial_small_loops

CHUNK = 512
"""Inductor's default of `cpp.min_chunk_size`: the iterations that a thread is worth."""


class Model(nn.Module):
    def forward(self, small: Tensor, ranged: Tensor, large: Tensor) -> tuple[Tensor, ...]:
        return small.tanh() @ small, ranged.softmax(-1) @ ranged.t(), (large @ large).relu().sum(), ranged.sum()


@pytest.fixture(scope="module")
def conditions() -> list[str]:
    """Of each OpenMP region in Model's kernels: when it asks for threads."""
    found: list[str] = []
    rows = torch.export.Dim("rows", min=2, max=5000)
    examples = (torch.rand(8, 8), torch.rand(40, 32), torch.rand(512, 512))
    captured = torch.export.export(Model().eval(), examples, dynamic_shapes=({}, {0: rows}, {}))
    with (
        torch.no_grad(),
        mock.patch.object(AotCodeCompiler, "compile", lambda graph, wrapper, code, *a, **k: found.append(code) or []),
        serial_small_loops.apply(),
    ):
        options = {"aot_inductor.package": True, "cpp.dynamic_threads": True}
        torch._inductor.aot_compile(captured.module(), examples, options=options)
    return re.findall(r"#pragma omp parallel\b *(.*)", found[0])


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("rows", [2, 40, 5000])
def test_a_loop_is_parallel_where_it_has_work_for_all_threads(conditions: Any, rows: int, threads: int) -> None:
    names = {"static_cast<int64_t>": "", "omp_get_max_threads()": str(threads), "||": "or", "ks0": str(rows)}
    parallel = []
    for condition in conditions:
        for name, value in names.items():
            condition = condition.replace(name, value)
        parallel.append(eval(re.sub(r"(?<=\d)L\b", "", condition.removeprefix("if"))))
    works = [64, rows * 32, 512 * 512, rows * 32]  # tanh, softmax, relu with its sum, the last sum
    assert sorted(parallel) == sorted(work >= CHUNK * threads for work in works)
