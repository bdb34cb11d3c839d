"""Canonical JSON and sha256: one way to turn data into bytes, one way to name bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

CHUNK = 1 << 20


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces: equal data gives equal bytes, in every process."""
    return msgspec.json.encode(msgspec.to_builtins(value), order="sorted")


def sha256_bytes(data: bytes | memoryview) -> str:
    """The OCI digest of `data`: `sha256:` and 64 hexadecimal digits."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    return sha256_bytes(canonical_json(value))


def sha256_stream(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(CHUNK):
        digest.update(chunk)
    return "sha256:" + digest.hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as stream:
        return sha256_stream(stream)
