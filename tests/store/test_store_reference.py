"""References: `[STORE#]model[:tag | @sha256:…]`."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotc.errors import AotcError, ReferenceFormatError
from aotc.store import Reference, parse_reference

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt", Reference(None, "gpt", "latest")),
        ("gpt:v1.2", Reference(None, "gpt", "v1.2")),
        (f"gpt@{DIGEST}", Reference(None, "gpt", None, DIGEST)),
        ("../some store#gpt", Reference("../some store", "gpt", "latest")),
        ("a#b#gpt:x", Reference("a#b", "gpt", "x")),
        (f"s#my_model-2.x@{DIGEST}", Reference("s", "my_model-2.x", None, DIGEST)),
        ("m" * 128, Reference(None, "m" * 128, "latest")),
    ],
)
def test_a_reference_is_read_and_written_back(text: str, expected: Reference) -> None:
    assert parse_reference(text) == expected
    assert parse_reference(str(expected)) == expected


def test_the_written_form_names_the_default_tag() -> None:
    assert str(parse_reference("s#gpt")) == "s#gpt:latest"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is no model: it is empty"),
        (":v1", "it is empty"),
        ("gpt:", "'' is no tag: it is empty"),
        ("#gpt", "the store before '#' is empty"),
        ("s\0#gpt", "store"),
        (".gpt", "it starts with '.'"),
        ("-gpt", "it starts with '-'"),
        ("gpt:.v", "it starts with '.'"),
        ("a..b", "it contains '..'"),
        ("a/b", "contains '/'"),
        ("oci://host/repo:tag", "contains '/'"),
        ("a b", "it contains ' '"),
        ("gpt:ä", "it contains 'ä'"),
        ("gpt\n", "it contains '\\n'"),
        ("gpt:v1:v2", "it contains ':'"),
        ("m" * 129, "it has 129 characters; at most 128"),
        ("gpt@sha256:abc", "is no digest"),
        (f"gpt@{DIGEST.upper()}", "is no digest"),
        (f"gpt@{DIGEST}\n", "is no digest"),
        (f"gpt:v1@{DIGEST}", "it has a tag and a digest"),
    ],
)
def test_a_bad_reference_says_what_is_wrong_and_what_to_write(text: str, says: str) -> None:
    with pytest.raises(ReferenceFormatError) as caught:
        parse_reference(text)
    assert says in caught.value.message
    assert caught.value.hint
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), ReferenceFormatError)


def test_a_reference_has_a_tag_or_a_digest_and_not_both() -> None:
    for tag, digest in [(None, None), ("v1", DIGEST)]:
        with pytest.raises(ReferenceFormatError, match="not both"):
            Reference(None, "gpt", tag, digest)


@given(st.text(max_size=200))
def test_any_text_is_a_reference_or_a_typed_error(text: str) -> None:
    try:
        reference = parse_reference(text)
    except AotcError:
        return
    assert parse_reference(str(reference)) == reference
