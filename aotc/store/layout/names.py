"""Rules for names: digests, models, tags, files. No text of a record becomes a path unchecked."""

from __future__ import annotations

import re

from aotc.errors import CorruptError

NAME_LIMIT = 128
FILE_NAME_LIMIT = 200  # bytes; leaves room in the usual 255 for what a layer's title and a temporary's name add

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def hex_of(digest: str) -> str:
    """The 64 digits of a digest. Raises CorruptError for another text, so that it never becomes a path."""
    if not is_digest(digest):
        raise CorruptError(
            f"{digest[:100]!r} is not a digest; expected sha256: and 64 lower-case hexadecimal digits",
            expected="sha256:<64 hex>",
            actual=digest[:100],
        )
    return digest.removeprefix("sha256:")


def name_flaw(name: str) -> str:
    """Why `name` is not a valid name of a model or tag; "" if it is.

    A leading dash is refused with the leading dot: no registry takes such a tag, and a command line reads an option.
    """
    if not name:
        return "it is empty"
    if len(name) > NAME_LIMIT:
        return f"it has {len(name)} characters; at most {NAME_LIMIT} are allowed"
    if name[0] in ".-":
        return f"it starts with {name[0]!r}"
    if ".." in name:
        return "it contains '..'"
    if bad := _NOT_IN_NAMES.search(name):
        return f"it contains {bad[0]!r}; letters, digits, '.', '_' and '-' are allowed"
    return ""


def file_name_flaw(name: str) -> str:
    """Why `name` is not one safe component of a path; "" if it is."""
    if name in ("", ".", ".."):
        return "it names no file"
    if "/" in name or "\\" in name:
        return "it contains a path separator"
    if not name.isprintable():  # NUL, newlines, lone surrogates
        return "it contains an unprintable character"
    if name.startswith(".tmp-"):
        return "it looks like a temporary file"
    if len(name.encode()) > FILE_NAME_LIMIT:
        return f"it has {len(name.encode())} bytes; at most {FILE_NAME_LIMIT} are allowed"
    return ""


def check_file_name(name: str) -> None:
    """Raises CorruptError where a record's file name could leave the folder it belongs to."""
    if flaw := file_name_flaw(name):
        raise CorruptError(
            f"the file name {name[:100]!r} in a record is not safe: {flaw}",
            hint="the record was not written by aotc, or was changed: do not trust where it came from",
            expected="a single path component",
            actual=name[:100],
        )
