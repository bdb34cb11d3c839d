"""What the server of units makes before it forks is what their first compile would make, and leaves it fit to fork."""

from __future__ import annotations

import json

import pytest
from processes import run_python

MAKE = """
import json, os
from unittest import mock
import torch
from torch._inductor import compile_fx
from torch._inductor.fx_passes import joint_graph
from aotc.compiler.toolchain.pattern_warmup import make_patterns

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
with mock.patch("torch.cuda.is_available", lambda: {gpus}):
    make_patterns()
started = threads() - before
made = joint_graph.lazy_init.cache_info().currsize
with torch._subclasses.FakeTensorMode():
    graph = torch.fx.experimental.proxy_tensor.make_fx(torch.sin)(torch.empty(4))
joint_graph.joint_graph_passes(graph, torch.device("cpu"))
misses = joint_graph.lazy_init.cache_info().misses
print(json.dumps([made, misses, started]))
"""


@pytest.mark.parametrize(("gpus", "expected"), [(False, [1, 1, 0]), (True, [0, 1, 0])])
def test_a_compile_for_a_cpu_finds_the_patterns_made_unless_there_are_gpus(gpus: bool, expected: list[int]) -> None:
    """Whether they were made, how often in all, and threads that a fork would not have."""
    assert json.loads(run_python(MAKE.format(gpus=gpus))) == expected


ANOTHER_TORCH = """
import torch
from torch._inductor.fx_passes import joint_graph
from aotc.compiler.toolchain.pattern_warmup import make_patterns

del joint_graph.lazy_init
make_patterns()
print("left to the units")
"""


def test_of_another_torch_they_are_left_to_the_units() -> None:
    assert run_python(ANOTHER_TORCH).strip() == "left to the units"
