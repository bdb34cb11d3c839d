"""A seeded sample of `view_chains.py`: results that are views are views of the same elements in compiled code."""

from __future__ import annotations

from pathlib import Path

import torch
from fuzzing.view_chains import SIZES, SOURCES, draw, try_model

SEED, CHAINS = 2004, 60


def test_a_sample_of_chains(tmp_path: Path) -> None:
    drawn = draw(SEED, CHAINS)
    tally = try_model(drawn, tmp_path, "sampled_views")
    assert (tally.wrong, tally.refused) == ([], "")
    assert tally.calls == 2 * len(SIZES), "as they come, and in another layout"


def test_the_sample_has_every_source_and_writes() -> None:
    torch.manual_seed(0)
    drawn = draw(SEED, CHAINS)
    assert drawn.any_layout and {chain.source for chain in drawn.chains.values()} == {*SOURCES}
    assert all(f"{name}." in drawn.text for name in ("c", "self.b")) and "_(" in drawn.text
