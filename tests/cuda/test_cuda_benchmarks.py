"""Autotuning's benchmarks on a GPU: a kernel's own time, however slowly it is launched."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from gpu_runs import run_python

RACE = """
import json

import torch
import triton

from aotc.compiler.toolchain.triton_compilers import begin_triton_compilers, wait_for_triton_compilers

begin_triton_compilers({})
wait_for_triton_compilers()
found = {True: 0, False: 0}


def heard(*, cache_hit, **_):
    found[cache_hit] += 1


triton.knobs.compilation.listener = heard
layer = torch.nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16)
with torch.no_grad():
    options = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    torch.compile(layer, options=options)(torch.randn(256, 512, device="cuda", dtype=torch.bfloat16))
print(json.dumps([found[True], found[False]]))
"""
"""Autotune one linear layer among Triton's templates: how many kernels this process found compiled, and compiled."""

pytestmark = pytest.mark.cuda


def test_a_slow_launch_takes_no_part_in_a_kernel_s_time() -> None:
    from aotc.compiler.autotune.benchmarks import milliseconds

    values = torch.randn(1 << 20, device="cuda")
    result = torch.empty_like(values)

    def double() -> None:
        torch.mul(values, 2, out=result)

    def double_slowly() -> None:
        time.sleep(0.001)
        double()

    with torch.cuda.stream(torch.cuda.Stream()):
        plain, slow = milliseconds(double), milliseconds(double_slowly)
    assert plain is not None and slow is not None
    assert 0.001 < plain < 0.1 and abs(slow / plain - 1) < 0.3, (plain, slow)


def test_what_no_graph_can_hold_is_left_to_inductor() -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    from aotc.compiler.autotune.benchmarks import gpu_benchmarks_alone, milliseconds

    values = torch.randn(1 << 20, device="cuda")

    def waits() -> None:
        values.sum().item()

    with gpu_benchmarks_alone():
        assert milliseconds(waits) is None
        assert benchmarker.benchmark(waits, device="cuda") > 0
        assert bool(torch.randn(8, device="cuda").isfinite().all())


def test_a_candidate_that_fails_fails() -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    from aotc.compiler.autotune.benchmarks import gpu_benchmarks_alone

    def fails() -> None:
        raise ValueError("no good")

    with gpu_benchmarks_alone(), pytest.raises(ValueError, match="no good"):
        benchmarker.benchmark(fails, device="cuda")


def test_a_race_s_candidates_are_compiled_once(tmp_path: Path) -> None:
    """By Inductor's processes, whose work the one that asks them finds."""
    caches = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    found, compiled = json.loads(run_python(RACE, **caches).splitlines()[-1])
    assert found > 4 and compiled == 0, (found, compiled)
