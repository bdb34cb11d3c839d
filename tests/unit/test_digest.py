"""Canonical JSON and sha256: equal data has equal bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from aotc.digest import CHUNK, canonical_json, sha256_bytes, sha256_file, sha256_json
from aotc.records import SizeRange

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def reordered(value: object) -> object:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@given(plain)
def test_the_order_of_keys_does_not_matter_at_any_depth(value: object) -> None:
    assert canonical_json(value) == canonical_json(reordered(value))
    assert sha256_json(value) == sha256_json(reordered(value))


@given(plain)
def test_it_is_json_that_says_the_same(value: object) -> None:
    assert json.loads(canonical_json(value)) == value


@given(plain, plain)
def test_other_data_has_another_digest(a: object, b: object) -> None:
    same = json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    assert (sha256_json(a) == sha256_json(b)) == same


def test_the_order_of_lists_true_and_1_and_1_and_1_0_do_matter() -> None:
    assert len({canonical_json(value) for value in ([1, 2], [2, 1], True, 1, 1.0, "1", None)}) == 7


def test_records_are_written_by_their_fields_without_spaces() -> None:
    assert canonical_json(SizeRange(min=1, max=8, tune_at=8)) == b'{"max":8,"min":1,"tune_at":8}'


def test_digests_are_those_of_oci(tmp_path: Path) -> None:
    data = b"x" * (CHUNK + 1)
    (tmp_path / "file").write_bytes(data)
    expected = "sha256:" + hashlib.sha256(data).hexdigest()
    assert sha256_bytes(data) == sha256_file(tmp_path / "file") == expected
