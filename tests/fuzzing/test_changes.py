"""A sample of `changes.py`: changes of every kind, at every moment, of each form. None may be followed by silence."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import filelock
import pytest
from fuzzing import changes
from fuzzing.change_kinds import KINDS, MOMENTS, guide_table
from processes import ROOT, finish, start

COUNT, SEED = len(KINDS), 0
MORE, ANOTHER_SEED = 5 * len(KINDS), 1


@pytest.fixture(scope="module")
def work(shared_folder: Path, built: Any) -> Path:
    """The folder with the models of the sample, built."""
    work = shared_folder / "changes"
    with filelock.FileLock(shared_folder / "changes.lock"):
        if not work.exists():
            changes.write_subjects(work / "subjects", changes.SAMPLED)
    built(work, "store", work / "subjects" / "manifest.yaml")
    return work


def tried_in(work: Path, results: Path, count: int, seed: int) -> list[changes.Tried]:
    """Changes are made in a process of its own: its forks need one without threads, and without a compiler."""
    options = ("--sampled", "--work", work, "--count", count, "--seed", seed, "--jobs", 2, "--results", results)
    ran = finish(start(ROOT / "tests" / "fuzzing" / "changes.py", *options))
    assert results.exists(), ran.stdout + ran.stderr
    return [changes.Tried(**one) for one in json.loads(results.read_text())]


@pytest.fixture(scope="module")
def tried(work: Path, tmp_path_factory: pytest.TempPathFactory) -> list[changes.Tried]:
    return tried_in(work, tmp_path_factory.mktemp("changes") / "results.json", COUNT, SEED)


def test_no_change_is_silent(tried: list[changes.Tried]) -> None:
    faults = [str(one) for one in tried if one.verdict in changes.FAULTS]
    assert not faults, "\n".join(faults)


@pytest.mark.nightly
def test_no_change_of_a_larger_sample_is_silent(work: Path, tmp_path: Path) -> None:
    """Five of each kind, so that each is tried at several moments and in several forms."""
    found = tried_in(work, tmp_path / "results.json", MORE, ANOTHER_SEED)
    faults = [str(one) for one in found if one.verdict in changes.FAULTS]
    assert not faults and len(found) == MORE, "\n".join(faults)


def test_changes_are_told_from_no_changes(tried: list[changes.Tried]) -> None:
    """The oracle works: most changes are seen in eager's results, and some leave them as they were."""
    told = [one for one in tried if one.verdict != "skipped"]
    assert len(told) > COUNT * 3 // 4
    assert COUNT // 3 < sum(not one.kept for one in told) < len(told)


def test_every_kind_that_can_be_noticed_is_tried(tried: list[changes.Tried]) -> None:
    assert {one.kind for one in tried} >= {kind.title for kind in KINDS if kind.blind != MOMENTS}


def test_no_change_is_told_from_eager(tried: list[changes.Tried]) -> None:
    """So that a silent difference is due to the change."""
    assert {one.verdict for one in tried if one.kind == "nothing"} == {"equal"}


def test_the_guide_s_table_is_current() -> None:
    """`python tests/fuzzing/changes.py --table` prints it."""
    assert guide_table() in (ROOT / "aotc/runtime/REFERENCE.md").read_text()


GOOD, OTHER = [("torch.float32", (2,), [1.0, 2.0])], [("torch.float32", (2,), [1.0, 3.0])]
ERROR, REFUSED = changes.Raised("other", "ValueError"), changes.Raised("refused", "BindError")


@pytest.mark.parametrize(
    ("eager", "answer", "expected"),
    [
        ([GOOD, GOOD], GOOD, "equal"),
        ([GOOD, GOOD], OTHER, "silent"),
        ([GOOD, GOOD], [("torch.float64", (2,), [1.0, 2.0])], "silent"),
        ([GOOD, GOOD], [], "silent"),
        ([GOOD, OTHER], OTHER, "skipped"),
        ([ERROR, ERROR], GOOD, "silent"),
        ([ERROR, ERROR], ERROR, "skipped"),
        ([GOOD, GOOD], ERROR, "untyped"),
        ([GOOD, GOOD], REFUSED, "refused"),
        ([GOOD, GOOD], None, "built"),
        ([GOOD, GOOD], changes.Cached(REFUSED), "stuck"),
        ([GOOD, GOOD], changes.Cached(OTHER), "silent"),
        ([GOOD, GOOD], changes.Ended(-11), "crash"),
        (changes.Ended(-11), GOOD, "skipped"),
    ],
)
def test_verdicts(eager: Any, answer: Any, expected: str) -> None:
    assert changes.verdict(eager, answer)[0] == expected
    assert changes.verdict(eager, answer, seen=False)[0] == ("not seen" if expected == "silent" else expected)


def test_a_process_that_hangs_or_crashes_is_told() -> None:
    codes = [
        answer.code
        for _, answer in changes.in_children(
            [lambda: time.sleep(60), lambda: os.kill(os.getpid(), signal.SIGKILL)], 2, 1
        )
    ]
    assert sorted(codes) == sorted([-signal.SIGALRM, -signal.SIGKILL])
