"""Eight processes that load one artifact at once."""

from __future__ import annotations

import time
from pathlib import Path

from processes import finish, start

LOAD = """
import logging, sys, time
from pathlib import Path
import torch
import aotc, models

logging.basicConfig(level=logging.DEBUG, format="%(message)s")
aotc.load
store, ready, go, number = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
module = models.Pooled().eval()
(ready / number).touch()
while not go.exists():
    time.sleep(0.001)
compiled = aotc.load("pooled", module, store=store)
ids, mask = torch.arange(16).expand(4, 16).contiguous(), torch.ones(4, 16, dtype=torch.bool)
with torch.no_grad():
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(compiled(ids, mask), module(ids, mask)))
"""
COUNT = 8


def test_all_of_them_load_it(zoo_store: Path, tmp_path: Path) -> None:
    ready, go = tmp_path / "ready", tmp_path / "go"
    ready.mkdir()
    started = [start("-c", LOAD, zoo_store, ready, go, number, OMP_NUM_THREADS="1") for number in range(COUNT)]
    deadline = time.monotonic() + 120
    while len(list(ready.iterdir())) < COUNT and time.monotonic() < deadline:
        time.sleep(0.01)
    go.touch()
    ran = [finish(process) for process in started]
    assert [one.returncode for one in ran] == [0] * COUNT, "\n".join(one.stderr for one in ran)
