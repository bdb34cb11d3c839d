"""Processes of one process group, as torchrun would start them."""

from __future__ import annotations

import json
import socket
from typing import Any

from processes import ROOT, finish, start


def run_ranks(count: int, *arguments: object, **variables: str) -> list[dict[str, Any]]:
    """Run `tests/end_to_end/rank.py` in each rank. Returns what each said; nothing of one that was killed."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    script = ROOT / "tests" / "end_to_end" / "rank.py"
    started = [start(script, *arguments, RANK=str(rank), **variables) for rank in range(count)]
    ran = [finish(process) for process in started]
    failed = [one.stderr for one in ran if one.returncode > 0]
    assert not failed, "\n".join(failed)
    return [json.loads(one.stdout.splitlines()[-1]) if one.stdout else {} for one in ran]
