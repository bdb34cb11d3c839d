"""References: `[STORE#]model[:tag | @sha256:…]`."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotc.errors import AotcError, ReferenceFormatError
from aotc.store.reference import Reference, parse_reference

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
        ("", "'' is not a model name: it is empty"),
        (":v1", "it is empty"),
        ("gpt:", "'' is not a tag name: it is empty"),
        ("#gpt", "the store before '#' is empty"),
        ("s\0#gpt", "store"),
        (".gpt", "it starts with '.'"),
        ("-gpt", "it starts with '-'"),
        ("gpt:.v", "it starts with '.'"),
        ("a..b", "it contains '..'"),
        ("a/b", "contains '/'"),
        ("ftp://host/repo:tag", "contains '/'"),
        ("a b", "it contains ' '"),
        ("gpt:ä", "it contains 'ä'"),
        ("gpt\n", "it contains '\\n'"),
        ("gpt:v1:v2", "it contains ':'"),
        ("m" * 129, "it has 129 characters; at most 128"),
        ("gpt@sha256:abc", "is not a digest"),
        (f"gpt@{DIGEST.upper()}", "is not a digest"),
        (f"gpt@{DIGEST}\n", "is not a digest"),
        (f"gpt:v1@{DIGEST}", "it has a tag and a digest"),
    ],
)
def test_a_bad_reference_says_what_is_wrong_and_what_to_write(text: str, says: str) -> None:
    with pytest.raises(ReferenceFormatError) as caught:
        parse_reference(text)
    assert says in caught.value.message
    assert caught.value.hint
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), ReferenceFormatError)


@pytest.mark.parametrize("text", ["registry.example.com/team/gpt:v1", "localhost/gpt", "10.0.0.7:5000/gpt:v1"])
def test_a_registry_without_its_scheme_is_asked_for_with_it(text: str) -> None:
    with pytest.raises(ReferenceFormatError) as caught:
        parse_reference(text)
    assert caught.value.hint == f"did you mean oci://{text}?" and parse_reference(f"oci://{text}").in_registry


@pytest.mark.parametrize("text", ["./store/gpt", "store/gpt", "/srv/store.d/gpt"])
def test_a_folder_before_a_model_is_no_registry(text: str) -> None:
    with pytest.raises(ReferenceFormatError, match="contains '/'"):
        parse_reference(text)


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


# -- registries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "store", "tag", "digest"),
    [
        ("oci://h.test/team/m:v1", "oci://h.test/team/m", "v1", None),
        ("oci://h.test:5000/m", "oci://h.test:5000/m", "latest", None),
        ("oci+http://[::1]:5000/a/b-c__d.e:v1", "oci+http://[::1]:5000/a/b-c__d.e", "v1", None),
        (f"oci+https://localhost/m@{DIGEST}", "oci+https://localhost/m", None, DIGEST),
    ],
)
def test_a_registry_s_repository_is_a_store_with_one_bundle_for_each_tag(
    text: str, store: str, tag: str | None, digest: str | None
) -> None:
    reference = parse_reference(text)
    assert reference == Reference(store, "", tag, digest)
    assert reference.in_registry
    assert reference.name == str(reference) == (text if tag != "latest" else f"{text}:latest")


@pytest.mark.parametrize(
    "text",
    [
        "oci://",
        "oci://h",
        "oci://h:5000",
        "oci:///r",
        "oci://h/",
        "oci://h/R",
        "oci://h/../r",
        "oci://h/a//b",
        "oci://h/r:",
        "oci://h/r:a/b",
        "oci://h/r:-a",
        f"oci://h/r:t@{DIGEST}",
        "oci://h/r@sha256:0",
        "oci://h/r#model:tag",
        "oci://-h/r",
        "oci://h h/r",
        "oci://h/r\n",
    ],
)
def test_what_names_no_bundle_of_a_registry_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ReferenceFormatError) as caught:
        parse_reference(text)
    assert caught.value.hint


def test_a_password_in_a_reference_is_refused_and_not_repeated() -> None:
    with pytest.raises(ReferenceFormatError) as caught:
        parse_reference("oci://user:hunter2@h/r:t")
    assert "hunter2" not in str(caught.value)
    assert "docker login" in caught.value.hint


def test_other_urls_hold_models_as_folders_do() -> None:
    assert parse_reference("s3://bucket/path#m:v1") == Reference("s3://bucket/path", "m", "v1")
