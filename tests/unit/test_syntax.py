"""Python code by its meaning: what leaves the digest as it is, and what does not."""

import pytest

from aotc.digest import sha256_bytes
from aotc.reads.syntax import syntax_digest

CODE = b"""class Block:
    def forward(self, x, *, scale=2.0):
        return f"{x!r}" + 'a' if scale else {**x, 'b': -1}
"""


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace(b":\n", b":  # a comment\n"),
        CODE.replace(b"'", b'"'),
        CODE.replace(b"    ", b"\t").replace(b"\n", b"\r\n\n"),
        CODE.replace(b"+ 'a'", b"+ \\\n    ('a')"),
        b"# -*- coding: latin-1 -*-\n" + CODE.replace(b"Block:\n", b'Block:\n    """\xfc"""\n'),
        CODE + b"'what stands here'\n",
    ],
    ids=["comment", "quotes", "layout", "brackets", "docstring", "string alone"],
)
def test_what_does_nothing_changes_nothing(same: bytes) -> None:
    assert same != CODE and syntax_digest(same) == syntax_digest(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"2.0", b"2"),
        (b"2.0", b"2.5"),
        (b"scale=2.0", b"scale=None"),
        (b"!r", b"!s"),
        (b"*, ", b""),
        (b"**x, 'b'", b"'b'"),
        (b"-1", b"+1"),
        (b"'a'", b"b'a'"),
        (b"'a'", b"''"),
        (b"x, *", b"x: int, *"),
        (b"return", b"yield"),
        (b"forward", b"backward"),
    ],
)
def test_what_does_something_counts(old: bytes, new: bytes) -> None:
    assert syntax_digest(CODE.replace(old, new)) != syntax_digest(CODE)


def test_a_digest_is_the_same_in_each_version_of_python() -> None:
    """As `python -c` of 3.11, 3.12 and 3.13 gives it."""
    assert syntax_digest(CODE) == "sha256:42b8d921aad979fa787a4b0e810b95370ea37ab5e309a9c93a036790b56bb91a"


@pytest.mark.parametrize("other", [b"\x7fELF\0", b"def", b"(" * 10_000], ids=["no text", "no Python", "too deep"])
def test_what_is_no_python_goes_by_its_bytes(other: bytes) -> None:
    assert syntax_digest(other) == sha256_bytes(other)
