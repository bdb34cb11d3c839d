"""What `aotc verify` reports of the calls with extreme inputs."""

from __future__ import annotations

from typing import Any, cast

import pytest

from aotc.cli.verify import _show
from aotc.manifest.types import ModelSpec
from aotc.models.extreme_calls import AtExtremes
from aotc.verify.compare_worker import _verify_extremes
from aotc.verify.comparison import Comparison, VerifyJob
from aotc.verify.verdicts import VerifyReport

SPEC = ModelSpec(name="net", factory="a:b", inputs={}, buckets=({"n": 3},), targets=("cpu:x86-64-v3",))
JOB = VerifyJob("net", "store", SPEC, ".", "cpu:x86-64-v3", 1)


class Judged:
    """In the place of a comparison: what is found with each draw."""

    def __init__(self, **found: AtExtremes) -> None:
        self.found = found

    def compare_at_extremes(self, dims: Any, draw: str) -> AtExtremes:
        return self.found[draw]


def report(**found: AtExtremes) -> VerifyReport | None:
    return _verify_extremes(cast(Comparison, Judged(**found)), JOB, "n=3", {"n": 3})


def test_the_first_wrong_draw_is_a_failure() -> None:
    found = report(extreme=AtExtremes(skipped="no"), edges=AtExtremes(wrong="output 0 is 1, 2 in eager"))
    assert found is not None and (found.status, found.extremes, found.sizes) == ("failed", "edges", "n=3")
    assert found.detail == "with extreme inputs, output 0 is 1, 2 in eager"


def test_what_is_right_has_no_row() -> None:
    assert report(extreme=AtExtremes(), edges=AtExtremes()) is None


def test_what_was_not_compared_is_told_and_fails_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(extreme=AtExtremes(skipped="it draws"), edges=AtExtremes())
    assert found is not None and (found.status, found.error) == ("ok", None)
    _show([found])
    shown = capsys.readouterr()
    assert "net" not in shown.out.split("result")[1]
    assert "ok: net n=3 cpu:x86-64-v3 n=3: not compared with extreme inputs: it draws" in shown.err
