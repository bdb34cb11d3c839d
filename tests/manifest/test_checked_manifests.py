"""`aotc.record` and `aotc init` check what they write: what cannot be captured as it is, is written so that it can."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python

import aotc
from aotc.compiler.fix_buckets import fix_buckets
from aotc.manifest import read_manifest
from aotc.manifest.edit import BucketChange, ModelEdit
from aotc.manifest.sizes import parse_size
from aotc.records import SizeRange
from aotc.tools.recording import check_written as module
from aotc.tools.recording.check_written import check_written
from aotc.tools.recording.first_manifest import write_first_manifest

NETS = """\
import torch
from torch import nn


class Long(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[1] > 16 else x * 3


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Long()) for _ in range(2))

    def forward(self, x):
        for part in self.parts:
            x = part(x) if x.sum() > 0 else part(-x)
        return self.head(x)


class Branches(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x * 3

    def example_inputs(self):
        return (torch.ones(2, 4),)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "checked_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "checked_nets", raising=False)
    import checked_nets

    return checked_nets


def test_what_was_recorded_can_be_captured(nets: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    modules = {name.lower(): getattr(nets, name)().eval() for name in ("Long", "Stack", "Branches")}
    with torch.no_grad(), aotc.record("nets.yaml", modules):
        for net in modules.values():
            for seq in (12, 40):
                net(torch.ones(2, seq, 8))
    text, models = " ".join(Path("nets.yaml").read_text().replace("#", "").split()), read_manifest("nets.yaml").models
    split = ({"batch": 2, "seq": SizeRange(12, 16, 1, 16)}, {"batch": 2, "seq": SizeRange(17, 40, 1, 40)})
    assert models["long"].buckets == split and models["stack"].buckets == split
    assert "the model does not take all of `seq: 12..40`" in text
    assert models["stack"].regions == ("parts.*",)
    assert "cannot be captured whole" in text and "Outside of them: head." in text
    assert [fix_buckets(models[name], tmp_path) for name in ("long", "stack")] == [
        ModelEdit("long"),
        ModelEdit("stack"),
    ]
    assert (
        models["branches"].buckets == ({"batch": 2, "seq": SizeRange(12, 40, 1, 40)},)
        and not models["branches"].regions
    )
    assert "cannot be captured: forward takes a branch" in text
    assert "branches cannot be captured" in caplog.text and "return x * 2 if x.sum() > 0" in caplog.text


def test_a_first_manifest_is_checked_too(nets: Any, tmp_path: Path) -> None:
    text = write_first_manifest(tmp_path / "first.yaml", "checked_nets:Branches", None, {}, check=True)
    assert text == (tmp_path / "first.yaml").read_text()
    assert "# cannot be captured: forward takes a branch" in text


def test_a_check_that_takes_too_long_is_left_out_and_that_is_said(
    nets: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_first_manifest(tmp_path / "first.yaml", "checked_nets:Branches", None, {})
    before = (tmp_path / "first.yaml").read_text()
    with caplog.at_level(logging.WARNING, "aotc"):
        check_written(tmp_path / "first.yaml", {"branches": [{}]}, seconds=0.2)
    assert (tmp_path / "first.yaml").read_text() == before
    assert "not checked in 0 s of CPU time: branches; what was found is written, `aotc build --fix" in caplog.text


@pytest.mark.parametrize(("used", "waits", "ended"), [(9.0, 1, True), (0.1, 1, False), (0.1, 100, True)])
def test_the_check_may_use_so_much_cpu_time_and_wait_ten_times_as_long(
    used: float, waits: float, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a minute goes by in which nothing was captured."""

    class Busy:
        killed = False

        def cpu_seconds(self) -> float:
            return used

        def kill(self) -> None:
            self.killed = True

    class Clock(threading.Event):
        now, left = 0.0, 3

        def wait(self, timeout: float | None = None) -> bool:
            Clock.now += waits
            self.left -= 1
            return self.left < 0

    monkeypatch.setattr(module.time, "monotonic", lambda: Clock.now)
    busy, over, Clock.now = Busy(), threading.Event(), 0.0
    module._end_in_time(busy, 5.0, Clock(), over)  # type: ignore[arg-type]
    assert busy.killed is over.is_set() is ended


def test_what_was_found_of_some_buckets_is_written_and_the_others_are_said(
    nets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = "{factory: 'checked_nets:Branches', inputs: {x: {shape: [n, 4]}}, buckets: [{n: [2, 8]}, {n: [9, 20]}]}"
    path = tmp_path / "some.yaml"
    path.write_text(f"version: 1\nmodels:\n  m: {model}\n")
    first = parse_size([2, 8])
    change = BucketChange({"n": first}, ({"n": 2}, {"n": parse_size([3, 8])}), ("2 is special",))
    monkeypatch.setattr(module, "_edits", lambda *asked: iter([ModelEdit("m", (change,), left=1)]))
    with caplog.at_level(logging.WARNING, "aotc"):
        check_written(path, {"m": [{"n": 2}]})
    sizes = [bucket["n"] for bucket in read_manifest(path).models["m"].buckets]
    assert sizes == [2, parse_size([3, 8]), parse_size([9, 20])] and "1 bucket of m" in caplog.text


def test_sizes_that_were_recorded_stay_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of one size, or of multiples, is not all that the program called."""
    path = tmp_path / "manifest.yaml"
    path.write_text(
        "version: 1\nmodels:\n  m:\n    factory: m:f\n    inputs: {x: {shape: [batch, seq]}}\n"
        "    buckets:\n      - {batch: 1, seq: [8, 64]}\n      - {batch: 2, seq: 9}\n"
    )
    change = BucketChange(
        {"batch": 1, "seq": SizeRange(8, 64, 1, 64)}, ({"batch": 1, "seq": SizeRange(8, 64, 8, 64)},), ()
    )
    monkeypatch.setattr(module, "_edits", lambda *arguments: iter([ModelEdit("m", (change,))]))
    called = [{"batch": batch, "seq": seq} for batch, seq in ((1, 8), (1, 30), (1, 64), (2, 9), (1, 30))]
    check_written(path, {"m": called})
    assert read_manifest(path).models["m"].buckets == (
        {"batch": 1, "seq": SizeRange(8, 64, 8, 64)},
        {"batch": 1, "seq": 30},
        {"batch": 2, "seq": 9},
    )


def test_the_process_that_records_imports_no_compiler(nets: Any, tmp_path: Path) -> None:
    code = (
        f"import os, sys\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, '')\n"
        "import torch, aotc, checked_nets\nnet = checked_nets.Branches()\n"
        "with aotc.record('net.yaml', net): net(torch.ones(1, 2, 3))\n"
        "print([name for name in sys.modules if name.startswith(('torch._dynamo', 'torch._inductor', 'sympy'))])\n"
        "print('cannot be captured' in open('net.yaml').read())"
    )
    assert run_python(code).split("\n")[:2] == ["[]", "True"]
