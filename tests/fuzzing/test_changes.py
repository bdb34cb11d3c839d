"""A minute of `changes.py`: changes of every kind, at every moment, of each form. None may be followed by silence."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import changes
from fuzzing.change_kinds import KINDS, MOMENTS, guide_table
from in_process import code_forgotten
from processes import ROOT

COUNT, SEED = 3 * len(KINDS), 0


@pytest.fixture(scope="module")
def folder(shared_folder: Path) -> Path:
    """The subjects' files, written once."""
    import filelock

    folder = shared_folder / "change-subjects"
    with filelock.FileLock(shared_folder / "change-subjects.lock"):
        if not folder.exists():
            changes.write_subjects(folder, changes.SAMPLED)
    return folder


@pytest.fixture(scope="module")
def tried(folder: Path, shared_folder: Path, built: Any) -> Iterator[list[changes.Tried]]:
    store = built(shared_folder, "changes-store", folder / "manifest.yaml")
    threads, path = torch.get_num_threads(), [*sys.path]
    torch.set_num_threads(1)
    with code_forgotten(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.path.insert(0, str(folder))
        cases = changes.choose(changes.SAMPLED, folder, COUNT, SEED)
        yield changes.run(cases, folder, store, 2, lambda one: None)
    torch.set_num_threads(threads)
    sys.path[:] = path


def test_no_change_is_silent(tried: list[changes.Tried]) -> None:
    faults = [str(one) for one in tried if one.verdict in changes.FAULTS]
    assert not faults, "\n".join(faults)


def test_changes_are_told_from_no_changes(tried: list[changes.Tried]) -> None:
    """The oracle works: most changes are seen in eager's results, and some leave them as they were."""
    told = [one for one in tried if one.verdict != "skipped"]
    assert len(told) > COUNT * 3 // 4
    assert COUNT // 3 < sum(not one.kept for one in told) < len(told)


def test_every_kind_is_tried(tried: list[changes.Tried]) -> None:
    assert {one.kind for one in tried} == {kind.title for kind in KINDS if kind.blind != MOMENTS}


def test_no_change_is_told_from_eager(tried: list[changes.Tried]) -> None:
    """So that a silent difference is due to the change."""
    assert {one.verdict for one in tried if one.kind == "nothing"} == {"equal"}


def test_the_guide_s_table_is_current() -> None:
    """`python tests/fuzzing/changes.py --table` prints it."""
    assert guide_table() in (ROOT / "aotc/runtime/GUIDE.md").read_text()


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
