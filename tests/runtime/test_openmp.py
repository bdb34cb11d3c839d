"""The threads of OpenMP: how long they spin is libgomp's affair, which counts those that sleep."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import run_python

CODE = """
import os, sys
import torch
torch.set_num_threads(int(sys.argv[2]))
torch.zeros(1 << 18).add_(1)  # makes torch's own threads
import aotc
from examples.models import transformer_block
threads = lambda: set(os.listdir("/proc/self/task"))
module, x = transformer_block(width=256, heads=4).eval(), torch.randn(1, 128, 256)
before = threads()
with torch.no_grad():
    compiled = aotc.load(sys.argv[1] + "#quickstart", module)
    assert torch.allclose(compiled(x), module(x), atol=1e-4)
    new = threads() - before
    aotc.load(sys.argv[1] + "#quickstart", module)
    assert threads() - before == new, "once in a process"
blocked = [line for thread in new for line in open(f"/proc/self/task/{thread}/status") if line.startswith("SigBlk")]
if (child := os.fork()) == 0:
    os._exit(0 if torch.equal(torch.ones(3) + 1, torch.full((3,), 2.0)) else 1)
assert os.waitpid(child, 0)[1] == 0
print(len(new), all(int(line.split()[1], 16) & 1 << 14 for line in blocked))  # 1 << 14: SIGTERM
"""
CPUS = len(os.sched_getaffinity(0))


@pytest.mark.skipif(CPUS < 2, reason="threads do not wait for each other on one CPU")
@pytest.mark.parametrize(
    ("threads", "settings", "sleeping"),
    [
        (CPUS, {}, 2),
        (1, {}, 0),
        (CPUS, {"OMP_WAIT_POLICY": "active"}, 0),
        (CPUS, {"GOMP_SPINCOUNT": "100"}, 0),
        (CPUS, {"AOTC_NATIVE_CALL": "0"}, 2),
    ],
    ids=str,
)
def test_a_load_adds_threads_that_sleep_unless_the_service_says_how_long_to_spin(
    quickstart_store: Path, monkeypatch: pytest.MonkeyPatch, threads: int, settings: dict[str, str], sleeping: int
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert run_python(CODE, quickstart_store, threads, **settings).split() == [str(sleeping), "True"]
