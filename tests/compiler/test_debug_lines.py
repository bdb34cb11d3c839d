"""What a library does not hold, whatever its target."""

from __future__ import annotations

import pytest
from torch._inductor import config

from aotc.compiler.codegen.inductor_options import inductor_options
from aotc.machine.targets import parse_target
from aotc.manifest import ModelSpec


@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cuda:sm_90"])
def test_a_library_has_no_debug_lines(target: str) -> None:
    """They make it three to five times as large, and torch writes them by default from 2.13 on."""
    options = inductor_options(ModelSpec("m", "m:m", inputs={}, buckets=({},)), parse_target(target))
    with config.patch(options):
        assert getattr(config.aot_inductor, "enable_line_tables", False) is False  # torch 2.11 and 2.12 have none
