"""Processes of one process group, as torchrun would start them."""

from __future__ import annotations

import json
from typing import Any

from processes import ROOT, finish, start

from aotc.verify.rank_processes import variables_of_ranks


def run_ranks(count: int, *arguments: object, **variables: str) -> list[dict[str, Any]]:
    """Run `tests/end_to_end/rank.py` in each rank. Returns what each said; nothing of one that was killed."""
    variables |= {"OMP_NUM_THREADS": "1"}
    script = ROOT / "tests" / "end_to_end" / "rank.py"
    with variables_of_ranks(count) as ranks:
        started = [start(script, *arguments, **variables, **rank) for rank in ranks]
        ran = [finish(process) for process in started]
    failed = [one.stderr for one in ran if one.returncode > 0]
    assert not failed, "\n".join(failed)
    return [json.loads(one.stdout.splitlines()[-1]) if one.stdout else {} for one in ran]
