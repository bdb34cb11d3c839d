"""A seeded sample of `values.py`: at extreme values and at a vector's tail, compiled code gives what eager decides."""

from __future__ import annotations

import torch
from fuzzing.values import DTYPES, Wanted, kinds_of_values, plan_of
from processes import ROOT, finish, start

SEED = 15
SAMPLE = Wanted(("float32", "int8", "bfloat16", "int64", "uint8"), expressions=12, draws=6)
BUILDS = len(SAMPLE.dtypes)
SCRIPT = ROOT / "tests" / "fuzzing" / "values.py"


def test_a_sample_of_operators_dtypes_lengths_and_values() -> None:
    """In a process of its own, whose torch is patched."""
    size = ["--dtypes", ",".join(SAMPLE.dtypes), "--expressions", SAMPLE.expressions, "--draws", SAMPLE.draws]
    ran = finish(start(SCRIPT, "--seed", SEED, "--builds", BUILDS, *size))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"| {BUILDS} builds |" in ran.stdout


def test_the_sample_has_a_range_and_most_forms() -> None:
    plans = [plan_of(SEED, number, SAMPLE) for number in range(BUILDS)]
    assert {None} < {plan.length for plan in plans}
    assert len({plan.form for plan in plans}) >= 3


def test_bugs_that_a_patch_mends_are_found_without_it() -> None:
    names = ["amin", "argmax", "sum_same"]
    options = ["--operators", ",".join(names), "--dtypes", "int8", "--length", 17, "--form", "flat", "--builds", 1]
    ran = finish(start(SCRIPT, *options, "--draws", 9, "--off", "reductions_of_int8"))
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert all(f"\n{name}:all int8: " in f"\n{ran.stdout}" for name in names)


def test_inputs_have_the_limits_of_their_dtype() -> None:
    for name in DTYPES:
        dtype = getattr(torch, name)
        for kind, numbers in kinds_of_values(dtype).items():
            given = torch.tensor(list(numbers), dtype=dtype)
            if not dtype.is_floating_point:
                assert given.tolist() == list(numbers), kind
