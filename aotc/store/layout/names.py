"""Rules for names: digests, models, tags, files. No text of a record becomes a path unchecked."""

from __future__ import annotations

import re

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
"""A file name; and without `..`, a name of a model or tag. `name_flaws` judges every other name."""


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def hex_of(digest: str) -> str:
    """The 64 digits of a digest. Raises CorruptError for another text, so that it never becomes a path."""
    if not is_digest(digest):
        from aotc.store.layout.name_flaws import not_a_digest

        raise not_a_digest(digest)
    return digest.removeprefix("sha256:")


def name_flaw(name: str) -> str:
    """Why `name` is not a valid name of a model or tag; "" if it is."""
    if _PLAIN.fullmatch(name) and ".." not in name:
        return ""
    from aotc.store.layout.name_flaws import flaw_of_name

    return flaw_of_name(name)


def check_file_name(name: str) -> None:
    """Raises CorruptError where a record's file name could leave the folder it belongs to."""
    if not _PLAIN.fullmatch(name):
        from aotc.store.layout.name_flaws import file_name_flaw, unsafe_file_name

        if flaw := file_name_flaw(name):
            raise unsafe_file_name(name, flaw)
