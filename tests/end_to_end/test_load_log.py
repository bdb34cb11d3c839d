"""What a load writes into the log: one line at INFO, each decision at DEBUG, and of calls the first of each sizes."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import aotc
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference


@pytest.fixture
def lines(zoo: Any, zoo_store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Of a load of a remote, and two equal calls."""
    x = torch.randn(2, 8)
    with caplog.at_level(logging.DEBUG, logger="aotc"), torch.no_grad():
        compiled = aotc.load(f"file://{zoo_store}#linear", zoo.Linear().eval(), cache=tmp_path)
        compiled(x)
        compiled(x)
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "aotc"]


def test_at_info_there_is_one_line_of_the_fetch_and_one_of_the_load(
    zoo_store: Path, lines: list[tuple[str, str]]
) -> None:
    digest = read_bundle(Store.open(zoo_store), parse_reference("linear")).digest
    fetched, loaded = (line for level, line in lines if level == "INFO")
    assert fetched.startswith(f"fetched file://{zoo_store}#linear:latest, {digest}, for cpu:")
    assert re.search(r"(\d+) of \1 blobs were not there", fetched)
    assert loaded.startswith(f"loaded linear:latest from file://{zoo_store}, {digest} for cpu:")
    times = re.search(r": 2 buckets in ([\d.]+) ms \((.*)\)$", loaded)
    assert times is not None
    parts = dict(part.split() for part in times[2].split(", "))
    assert list(parts) == ["record", "module", "libraries", "graphs"]
    assert float(times[1]) == pytest.approx(sum(map(float, parts.values())), abs=0.3)


def test_at_debug_there_is_each_decision(lines: list[tuple[str, str]]) -> None:
    decisions = [line for level, line in lines if level == "DEBUG"]
    assert any(re.fullmatch(r"linear: of \['(cpu:\S+)'\], \1 is taken", line) for line in decisions)
    assert any(
        re.fullmatch(r"linear: opened the library of batch=2, \d+ bytes, in [\d.]+ ms", line) for line in decisions
    )
    assert [line for line in decisions if " runs in " in line] == ["linear: batch=2 runs in batch=2 (exact)"]
