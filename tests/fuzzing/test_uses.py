"""A seeded sample of `uses.py`: what a user does with a trained model is what eager does, or is refused with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fuzzing.setups import SETUPS
from fuzzing.steps import STEPS
from fuzzing.used import models_of
from fuzzing.uses import case_of, difference
from processes import ROOT, finish, start

MODELS = ("mixed", "padded", "random_as_eager", "stack")
CASES = 60


def test_a_sample_of_uses(training_store: Path) -> None:
    """In a process of its own, which forks: threads of this one would not survive it."""
    script = ROOT / "tests" / "fuzzing" / "uses.py"
    options = ["--count", CASES, "--seed", 5, "--models", ",".join(MODELS), "--store", training_store, "--no-build"]
    ran = finish(start(script, *options))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"| all cases | {CASES} |" in ran.stdout


def test_the_sample_has_every_step_and_most_of_what_is_done_around_one() -> None:
    kinds = {kind for number in range(CASES) for kind in case_of(5, number, MODELS).kinds}
    assert {each.__name__ for each in STEPS} <= kinds
    assert len({each.__name__ for each in SETUPS} & kinds) >= len(SETUPS) - 1
    assert {*MODELS} < models_of().keys()


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (torch.ones(2), ""),
        (torch.ones(2) + 1e-6, ""),
        (torch.ones(2) + 1e-2, "they differ by 0.01 of 1"),
        (torch.tensor([1.0, torch.nan]), "eager is finite where ours is not, or the reverse"),
        (torch.ones(2, 1), "eager a strided tensor [2], ours a strided tensor [2, 1]"),
        (torch.ones(2).to_sparse(), "eager a strided tensor [2], ours a sparse_coo tensor [2]"),
        (None, "eager a strided tensor [2], ours None"),
    ],
)
def test_a_difference_is_seen(ours: torch.Tensor | None, said: str) -> None:
    found = difference([("gradients", {"weight": torch.ones(2)})], [("gradients", {"weight": ours})], torch.float32)
    assert found == (f"gradients['weight']: {said}" if said else "")


def test_zeros_are_another_thing_than_no_gradient() -> None:
    assert "of zeros" in difference([("gradient", None)], [("gradient", torch.zeros(2))], torch.float32)
    assert difference([("first", 1)], [("first", 1), ("second", 2)], torch.float32)
