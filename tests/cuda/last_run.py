"""The log of the last run of the whole suite on a GPU, `last_run.json` beside this file, which is committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_log import write_log


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if torch.cuda.is_available():
        facts = {"torch": str(torch.__version__), "gpu": torch.cuda.get_device_name()}
        write_log(Path(__file__).parent, facts, terminalreporter, exitstatus, config)
