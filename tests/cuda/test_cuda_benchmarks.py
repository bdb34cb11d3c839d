"""Autotuning's benchmarks on a GPU: a kernel's own time, however slowly it is launched."""

from __future__ import annotations

import time

import pytest
import torch

pytestmark = pytest.mark.cuda


def test_a_slow_launch_takes_no_part_in_a_kernel_s_time() -> None:
    from aotc.build.replayed import milliseconds

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

    from aotc.build.replayed import gpu_benchmarks_alone, milliseconds

    values = torch.randn(1 << 20, device="cuda")

    def waits() -> None:
        values.sum().item()

    with gpu_benchmarks_alone():
        assert milliseconds(waits) is None
        assert benchmarker.benchmark(waits, device="cuda") > 0
        assert bool(torch.randn(8, device="cuda").isfinite().all())


def test_a_candidate_that_fails_fails() -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    from aotc.build.replayed import gpu_benchmarks_alone

    def fails() -> None:
        raise ValueError("no good")

    with gpu_benchmarks_alone(), pytest.raises(ValueError, match="no good"):
        benchmarker.benchmark(fails, device="cuda")
