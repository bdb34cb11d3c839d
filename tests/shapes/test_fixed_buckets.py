"""Buckets that can be captured in the place of those that cannot: `aotc build --fix-buckets`.

All but the last test capture only.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import run_here

from aotc.compiler.fix_buckets import fix_buckets, why_not_captured
from aotc.manifest import read_manifest
from aotc.manifest.edit import ModelEdit, edited, rewrite
from aotc.records import bucket_name

MODELS = """
import torch
from torch import nn


class Eights(nn.Module):
    def forward(self, x):
        return x.view(-1, 8).sum(-1)


class NeedsOne(nn.Module):
    def forward(self, x):
        return x - x.max(0).values


class Long(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] > 4 else x * 3


class LongInBoth(nn.Module):
    def forward(self, x, y):
        x = x * 2 if x.shape[0] > 4 else x * 3
        return x, y * 2 if y.shape[0] == 1 else y * 3


class LoneBatch(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] != 1 else x * 3


class Counted(nn.Module):
    def forward(self, x):
        return x[: int(x.shape[0] / 1)]


class Root(nn.Module):
    def forward(self, x, y):
        return x * 2 if x.shape[0] ** 0.5 > 3 else x * 3, y + 1


class OneMore(nn.Module):
    def forward(self, x, y):
        return torch.cat([x, x[:1]]) + y


class Scattered(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] * x.shape[0] % 7 in (2, 4) else x * 3


class Pair(nn.Module):
    def forward(self, x, y):
        return x + y


class Sorted(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Long() for _ in range(2))

    def forward(self, x):
        for part in self.parts:
            x = part(x) if x.sum() > 0 else part(-x)
        return x
"""
ONE, TWO = "{x: {shape: [n, 4]}}", "{x: {shape: [n, 4]}, y: {shape: [m, 4]}}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fixed.py").write_text(MODELS)
    return tmp_path


def fixed(folder: Path, model: str, inputs: str, bucket: str, more: str = "") -> ModelEdit:
    (folder / "manifest.yaml").write_text(
        f"version: 1\nmodels: {{m: {{factory: 'fixed.py:{model}', inputs: {inputs}, buckets: [{bucket}]{more}}}}}\n"
    )
    return fix_buckets(read_manifest(folder / "manifest.yaml").models["m"], folder)


@pytest.mark.parametrize(
    ("model", "inputs", "bucket", "instead", "reason"),
    [
        ("Long", ONE, "{n: [5, 32]}", [], ""),
        ("Long", ONE, "{n: [1, 32]}", ["n=1..4", "n=5..32"], "it needs `5 <= n"),
        ("Eights", "{x: {shape: [n]}}", "{n: [8, 64]}", ["n=8", "n=16..64 step 8"], "`n % 8 == 0`"),
        ("NeedsOne", ONE, "{n: [0, 32]}", ["n=1..32"], "the model itself fails there"),
        ("LoneBatch", ONE, "{n: [1, 2]}", ["n=1", "n=2"], "1 is a special size"),
        ("Long", ONE, "{n: {range: [1, 32], tune_at: 1}}", ["n=1", "n=2..4", "n=5..32"], "tuned at 1"),
        ("Scattered", ONE, "{n: [2, 64]}", ["n=64"], "as one graph"),
        ("Counted", ONE, "{n: [2, 64]}", ["n=64"], "the captured graph holds for `n` of 64"),
        ("Counted", ONE, "{n: [2, 4]}", ["n=2", "n=3", "n=4"], "the captured graph holds for `n` of 4"),
        (
            "LongInBoth",
            TWO,
            "{n: [2, 32], m: [1, 8]}",
            ["m=1,n=2..4", "m=2..8,n=2..4", "m=1,n=5..32", "m=2..8,n=5..32"],
            "it needs `5 <= n",
        ),
    ],
)
def test_a_refused_range_becomes_buckets_that_can_be_captured(
    folder: Path, model: str, inputs: str, bucket: str, instead: list[str], reason: str
) -> None:
    found = fixed(folder, model, inputs, bucket)
    assert found.problem is None
    assert [bucket_name(one) for change in found.changes for one in change.instead] == instead
    assert not instead or reason in found.changes[0].reasons[0]


def test_what_is_found_so_far_is_told_after_each_bucket(folder: Path) -> None:
    so_far: list[ModelEdit] = []
    model = f"{{factory: 'fixed.py:Long', inputs: {ONE}, buckets: [{{n: [1, 32]}}, {{n: 40}}]}}"
    (folder / "manifest.yaml").write_text(f"version: 1\nmodels: {{m: {model}}}\n")
    found = fix_buckets(read_manifest(folder / "manifest.yaml").models["m"], folder, so_far.append)
    assert [(edit.changes, edit.left) for edit in so_far] == [(found.changes, 1)] and found.left == 0


def test_a_range_is_split_where_the_root_of_a_size_decides(folder: Path) -> None:
    """The root of 9 is 3. No record can hold such a condition: the build evaluates it."""
    found = fixed(folder, "Root", TWO, "{n: [2, 64], m: [2, 32]}")
    assert found.problem is None
    assert [bucket_name(one) for one in found.changes[0].instead] == ["m=2..32,n=2..9", "m=2..32,n=10..64"]


@pytest.mark.parametrize(
    ("model", "inputs", "bucket", "message", "hint"),
    [
        (
            "OneMore",
            TWO,
            "{n: [2, 32], m: {range: [2, 34], tune_at: 33}}",  # 34 is not a size of n, and one more
            "the model needs `m` to be `n + 1`",
            'write "n + 1" for `m`',
        ),
        ("Sorted", ONE, "{n: [2, 32]}", "data-dependent", "torch.where"),
    ],
)
def test_what_no_sizes_help_is_told_and_the_bucket_stays(
    folder: Path, model: str, inputs: str, bucket: str, message: str, hint: str
) -> None:
    found = fixed(folder, model, inputs, bucket)
    assert not found.changes
    assert found.problem is not None
    assert message in found.problem.message
    assert hint in found.problem.hint


@pytest.mark.parametrize(
    ("model", "bucket", "related", "shape"),
    [
        ("OneMore", "{n: [2, 32], m: [3, 33]}", {"m": "n + 1"}, '["n + 1", 4]'),
        ("Pair", "{n: [2, 32], m: [2, 32]}", {"n": "m"}, "[m, 4]"),
    ],
)
def test_a_dim_that_follows_from_another_becomes_an_expression(
    folder: Path, model: str, bucket: str, related: dict[str, str], shape: str
) -> None:
    found = fixed(folder, model, TWO, bucket)
    assert found == ModelEdit("m", related=related)
    text, errors = edited((folder / "manifest.yaml").read_text(), [found])
    assert not errors and shape in text
    rewrite(folder / "manifest.yaml", text)
    spec = read_manifest(folder / "manifest.yaml").models["m"]
    assert [bucket.keys() for bucket in spec.buckets] == [{"m", "n"} - related.keys()]
    assert fix_buckets(spec, folder) == ModelEdit("m")


def test_regions_are_captured_in_the_place_of_the_model(folder: Path) -> None:
    found = fixed(folder, "Stack", ONE, "{n: [2, 32]}", ", regions: ['parts.*']")
    assert found.problem is None
    assert [bucket_name(one) for one in found.changes[0].instead] == ["n=2..4", "n=5..32"]


def test_the_command_writes_the_manifest_and_builds_it(folder: Path) -> None:
    manifest = folder / "manifest.yaml"
    manifest.write_text(
        "version: 1\ndefaults: {mode: default}  # in haste\nmodels:\n  m:\n    factory: fixed.py:Long\n"
        f"    inputs: {ONE}\n    buckets:\n      - {{n: [1, 32]}}  # all\n"
    )
    before = manifest.read_text()
    shown = run_here("build", manifest, "--fix-buckets", "--dry-run", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    assert "\n-      - {n: [1, 32]}  # all\n" in shown.stdout
    assert "\n+      - {n: {range: [1, 4]}}  # all\n+      - {n: {range: [5, 32]}}\n" in shown.stdout
    assert manifest.read_text() == before
    as_json = json.loads(run_here("build", manifest, "--fix-buckets", "--dry-run", "--json", cwd=folder).stdout)
    assert as_json["models"][0]["changes"][0]["instead"][0] == {"n": {"min": 1, "max": 4, "tune_at": 4}}
    built = run_here("build", manifest, "--fix-buckets", "--store", folder / "store", "--json", cwd=folder)
    assert built.returncode == 0, built.stderr
    assert {unit["bucket"] for unit in json.loads(built.stdout)["units"]} == {"n=1..4", "n=5..32"}
    assert (
        "# in haste" in manifest.read_text() and "# the model does not take all of `n: 1..32`" in manifest.read_text()
    )
    spec = read_manifest(manifest).models["m"]
    assert [why_not_captured(spec, folder, bucket) for bucket in spec.buckets] == [None, None]
