"""What the server of units makes before it forks is what their first compile would make, and leaves it fit to fork."""

from __future__ import annotations

import json

from processes import run_python

CASES = """
import json, os
from unittest import mock
import torch
from torch._inductor import compile_fx
from torch._inductor.fx_passes import joint_graph
from aotc.compiler.toolchain.pattern_warmup import make_patterns

def threads():
    return len(os.listdir("/proc/self/task"))

def made(gpus):
    before = threads()
    with mock.patch("torch.cuda.is_available", lambda: gpus):
        make_patterns()
    started = threads() - before
    made = joint_graph.lazy_init.cache_info().currsize
    with torch._subclasses.FakeTensorMode():
        graph = torch.fx.experimental.proxy_tensor.make_fx(torch.sin)(torch.empty(4))
    joint_graph.joint_graph_passes(graph, torch.device("cpu"))
    return made, joint_graph.lazy_init.cache_info().misses, started

def of_another_torch():
    del joint_graph.lazy_init
    make_patterns()
    return "left to the units"

for case in (lambda: made(False), lambda: made(True), of_another_torch):
    if (child := os.fork()) == 0:
        print(json.dumps(case()))
        break
    os.waitpid(child, 0)
"""


def test_a_compile_for_a_cpu_finds_the_patterns_made_unless_there_are_gpus_or_torch_is_another() -> None:
    """Whether they were made, how often in all, and threads that a fork would not have. Each in a fork of a process
    that has made none."""
    told = [json.loads(line) for line in run_python(CASES).splitlines()]
    assert told == [[1, 1, 0], [0, 1, 0], "left to the units"]
