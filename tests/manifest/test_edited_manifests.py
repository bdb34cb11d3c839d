"""Edits of a manifest's text: other buckets in the place of one, and all else as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotc.errors import ManifestError
from aotc.manifest import read_manifest
from aotc.manifest.edit import BucketChange, ModelEdit, edited, rewrite, with_buckets, with_related
from aotc.records import Bucket, SizeRange

HEAD = "version: 1\n# of two models\nmodels:\n"
OLD: Bucket = {"batch": 2, "seq": SizeRange(1, 64, 1, 64)}
NEW: list[Bucket] = [{"batch": 2, "seq": 1}, {"batch": 2, "seq": SizeRange(2, 64, 1, 32)}]
FACTORY = "factory: m:f, inputs: {x: {shape: [batch, seq]}}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            "    buckets: # mine\n"
            "      # short ones\n"
            "      - {batch: 2, seq: [1, 64]} # all\n"
            "      - {batch: 4, seq: 8}\n",
            "    buckets: # mine\n"
            "      # short ones\n"
            "      # 1 is special\n"
            "      - {batch: 2, seq: 1} # all\n"
            "      - {batch: 2, seq: {range: [2, 64], tune_at: 32}}\n"
            "      - {batch: 4, seq: 8}\n",
            id="a line for each bucket",
        ),
        pytest.param(
            "    buckets:\n"
            "      - batch: 2 # two\n"
            "        seq:\n"
            "          range: [1, 64]\n"
            "          tune_at: 64 # long\n"
            "\n"
            "      # the end\n",
            "    buckets:\n"
            "      # 1 is special\n"
            "      - batch: 2 # two\n"
            "        seq:\n"
            "          1 # long\n"
            "      - {batch: 2, seq: {range: [2, 64], tune_at: 32}}\n"
            "\n"
            "      # the end\n",
            id="a line for each size",
        ),
        pytest.param(
            "    buckets: [{seq: [1, 64], batch: 2}, {batch: 4, seq: 8}]\n",
            "    # 1 is special\n"
            "    buckets: [{seq: 1, batch: 2}, {seq: {range: [2, 64], tune_at: 32}, batch: 2}, {batch: 4, seq: 8}]\n",
            id="all in one line",
        ),
    ],
)
def test_a_bucket_becomes_others_below_the_reason(tmp_path: Path, before: str, after: str) -> None:
    model = "  m:\n    factory: m:f\n    inputs: {x: {shape: [batch, seq]}}\n"
    behind = f"  other: {{{FACTORY}, buckets: [{{batch: 2, seq: [1, 64]}}]}}\n"
    edited = with_buckets(HEAD + model + before + behind, "m", OLD, NEW, ["1 is special"])
    assert edited == HEAD + model + after + behind
    (tmp_path / "manifest.yaml").write_text(edited)
    models = read_manifest(tmp_path / "manifest.yaml").models
    assert models["m"].buckets[:2] == tuple(NEW)
    assert models["other"].buckets == (OLD,)


@pytest.mark.parametrize(
    "models",
    [
        f"  m: {{{FACTORY}, buckets: [&shared {{batch: 2, seq: [1, 64]}}]}}\n"
        f"  other: {{{FACTORY}, buckets: [*shared]}}\n",
        f"  other: {{{FACTORY}, buckets: [&shared {{batch: 2, seq: [1, 64]}}]}}\n"
        f"  m: {{{FACTORY}, buckets: [*shared]}}\n",
        f"  other: {{{FACTORY}, buckets: &shared [{{batch: 2, seq: [1, 64]}}]}}\n"
        f"  m: {{{FACTORY}, buckets: *shared}}\n",
        f"  other: &shared {{{FACTORY}, buckets: [{{batch: 2, seq: [1, 64]}}]}}\n  m: {{<<: *shared, mode: default}}\n",
        f"  m: {{{FACTORY}, grid: {{batch: [2], seq: [[1, 64]]}}}}\n",
    ],
    ids=["an anchor", "an alias", "an alias of all buckets", "a merged model", "a grid"],
)
def test_a_bucket_that_stands_elsewhere_too_is_left_with_the_buckets_to_write(models: str) -> None:
    with pytest.raises(ManifestError) as caught:
        with_buckets(HEAD + models, "m", OLD, NEW, ["1 is special"])
    assert "{batch: 2, seq: 1}, {batch: 2, seq: {range: [2, 64], tune_at: 32}}" in str(caught.value)


RELATED = (
    "  m:\n    factory: m:f\n    inputs:\n      x: {shape: [batch, seq]}\n      more: {mask: {shape: [2*seq2, seq2]}}\n"
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "    buckets:\n      - {batch: 1, seq: [1, 8], seq2: [2, 9]} # all\n",
            "      - {batch: 1, seq: [1, 8]} # all\n",
        ),
        ("    buckets: [{seq2: [2, 9], batch: 1, seq: [1, 8]}]\n", "    buckets: [{batch: 1, seq: [1, 8]}]\n"),
        (
            "    buckets:\n      - batch: 1\n        seq2: [2, 9]\n        seq: [1, 8] # all\n",
            "      - batch: 1\n        seq: [1, 8] # all\n",
        ),
    ],
    ids=["the last", "the first", "a line for each"],
)
def test_a_dim_becomes_an_expression_of_another(tmp_path: Path, before: str, after: str) -> None:
    edited = with_related(HEAD + RELATED + before, "m", "seq2", "seq + 1")
    assert '["2*(seq + 1)", "seq + 1"]' in edited and after in edited
    assert "    # the model needs `seq2` to be `seq + 1`\n    inputs:\n" in edited
    (tmp_path / "manifest.yaml").write_text(edited)
    assert read_manifest(tmp_path / "manifest.yaml").models["m"].buckets == (
        {"batch": 1, "seq": SizeRange(1, 8, 1, 8)},
    )


def test_a_dim_of_a_grid_is_left_with_the_expression_to_write() -> None:
    grid = "    grid: {batch: [1], seq: [[1, 8]], seq2: [[2, 9]]}\n"
    with pytest.raises(ManifestError, match="`seq2` must be `seq \\+ 1`"):
        with_related(HEAD + RELATED + grid, "m", "seq2", "seq + 1")


def test_what_cannot_be_edited_is_told_and_the_rest_is(tmp_path: Path) -> None:
    change = BucketChange(OLD, tuple(NEW), ())
    text = (
        f"{HEAD}  grid: {{{FACTORY}, grid: {{batch: [2], seq: [[1, 64]]}}}}\n"
        f"  m: {{{FACTORY}, buckets: [{{batch: 2, seq: [1, 64]}}]}}\n"
    )
    after, errors = edited(text, [ModelEdit("grid", (change,)), ModelEdit("m", (change,))])
    assert len(errors) == 1 and "of grid cannot be edited" in errors[0].message
    assert "[{batch: 2, seq: 1}, {batch: 2, seq: {range: [2, 64], tune_at: 32}}]" in after


def test_a_manifest_is_not_replaced_by_one_with_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_text("version: 1\n")
    path.chmod(0o640)
    with pytest.raises(ManifestError):
        rewrite(path, "version: 1\nmodels: {m: {}}\n")
    assert path.read_text() == "version: 1\n" and list(tmp_path.iterdir()) == [path]
    right = f"{HEAD}  m: {{{FACTORY}, buckets: [{{batch: 2, seq: 1}}]}}\n"
    rewrite(path, right)
    assert path.read_text() == right and path.stat().st_mode & 0o777 == 0o640
