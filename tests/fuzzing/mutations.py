"""Bytes that somebody else may have written: valid documents with something wrong in them.

A change is drawn from a `random.Random`, so that a seed gives the same case in hypothesis, in a script and in a fuzzer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

Place = tuple[Any, Any]
"""A container and a key or index in it."""

DIGEST = "sha256:" + "0" * 64
_RAW = "\u2400raw:"  # stands for JSON text that Python's own writer would not give

RAW_TEXTS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e-999", "9" * 400, "9" * 5000, "-" + "9" * 30, "0x10", "01", "1.0",
    "1e2", '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\x41"', "nul", "'a'", "[1,]", '{"a":1,"a":2}', "", "//",
    "[" * 900 + "]" * 900, "[" * 5000 + "]" * 5000, "[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000,
    "[" + "{}," * 3000 + "0]",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 64, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, 0.0, -0.0,
    0.5, 1e308,
    "", "a", "x", "batch", "seq", "*", ".", "..", "../../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "a\nb", "\x00",
    ".tmp-0123456789abcdef", "ｂatch", "a" * 300, "€" * 100, "\U0001f600", "tensor", "constant", "frozen", "live",
    "_dynamo", "_inductor", "onnx", "float32", "float64", "int64", "bool", "complex64", "bits8", "quint8", "Tensor",
    "channels_last",
    "channels_last_3d", "keyword", "positional", DIGEST, DIGEST.upper(), DIGEST[:-1], "sha512:" + "0" * 64,
    "batch*0", "1//batch", "batch%0", "min(batch,", "8-batch", "batch**9", "__import__('os')", "batch.__class__",
    "-" * 500 + "1",
    "(" * 300, "batch<seq", "2*batch+1", "lambda: 1", [], {}, [[]], [0, 0], [1, 0], {"a": 0}, {"min": 3, "max": 1},
    {"min": 0, "max": 2**70, "multiple_of": 0}, {"edge": True}, {"type": "tensor"},
    {"leaf": 0, "state": "a"}, {"index": -1},
    {"__enum__": True, "fqn": "antigravity:x", "name": "y"},
)  # fmt: skip


def places(value: Any) -> Iterator[Place]:
    """Every place in a JSON document that holds something."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def mutate_document(document: Any, random: Random) -> Any:
    """A copy with one to four changes of its structure."""
    box = {"root": copy.deepcopy(document)}
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        found = list(places(box))
        container, key = random.choice(found)
        _CHANGES[random.randrange(len(_CHANGES))](container, key, found, random)
        box.setdefault("root", None)
    return box["root"]


def _replace(container: Any, key: Any, found: list[Place], random: Random) -> None:
    container[key] = copy.deepcopy(random.choice(VALUES))


def _replace_raw(container: Any, key: Any, found: list[Place], random: Random) -> None:
    container[key] = _RAW + random.choice(RAW_TEXTS)


def _transplant(container: Any, key: Any, found: list[Place], random: Random) -> None:
    other, other_key = random.choice(found)
    container[key] = copy.deepcopy(other[other_key])


def _near(container: Any, key: Any, found: list[Place], random: Random) -> None:
    """A number a little beside, a text with one character changed."""
    value = container[key]
    if isinstance(value, bool):
        container[key] = not value
    elif isinstance(value, int):
        container[key] = value + random.choice((-1, 1, -100, 100))
    elif isinstance(value, str) and value:
        position = random.randrange(len(value))
        container[key] = (
            value[:position] + chr(random.choice((0, 46, 47, 48, 58, 97, 233, 0x4E2D))) + value[position + 1 :]
        )


def _remove(container: Any, key: Any, found: list[Place], random: Random) -> None:
    del container[key]


def _repeat(container: Any, key: Any, found: list[Place], random: Random) -> None:
    if isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    else:
        container[f"{key}{random.choice(('', ' ', '2'))}x"] = copy.deepcopy(container[key])


def _rename(container: Any, key: Any, found: list[Place], random: Random) -> None:
    if isinstance(container, dict):
        container[str(random.choice((*container, "", "a", "type", "schema", "__class__")))] = container.pop(key)


_CHANGES = (_replace, _replace, _replace_raw, _transplant, _near, _near, _remove, _repeat, _rename)


def written(document: Any, random: Random) -> bytes:
    """JSON, with the raw texts in their places."""
    text = json.dumps(document, ensure_ascii=random.random() < 0.5)
    for raw in RAW_TEXTS:
        text = text.replace(json.dumps(_RAW + raw), raw).replace(json.dumps(_RAW + raw, ensure_ascii=False), raw)
    return text.encode("utf-8", "surrogatepass")


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """One to three changes of bytes: the nine kinds of damage that disks, networks and people do."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        if not changed:
            return random.randbytes(random.randrange(40))
        start = random.randrange(len(changed))
        stop = min(len(changed), start + random.choice((1, 1, 2, 8, 64, 512)))
        piece = bytes(changed[start:stop])
        match random.randrange(9):
            case 0:
                changed[start] ^= 1 << random.randrange(8)
            case 1:
                changed[start] = random.randrange(256)
            case 2:
                changed[start:start] = random.randbytes(random.choice((1, 2, 16)))
            case 3:
                del changed[start:stop]
            case 4:
                del changed[start:]
            case 5:
                changed[start:start] = piece * random.choice((1, 1, 50))
            case 6:
                changed[start:stop] = bytes(len(piece))
            case 7:
                other = random.randrange(len(changed))
                changed[other : other + len(piece)], changed[start:stop] = piece, changed[other : other + len(piece)]
            case 8:
                changed[start:stop] = random.choice(
                    (b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80", b"\xef\xbb\xbf", b"\\u", b'"')
                )
    return bytes(changed)


def mutate(data: bytes, random: Random) -> bytes:
    """A document changed in its structure, in its bytes, or in both; other bytes in their bytes alone."""
    kind = random.random()
    if kind < 0.75:
        try:
            data = written(mutate_document(json.loads(data), random), random)
        except (ValueError, RecursionError):
            kind = 1.0
    return mutate_bytes(data, random) if kind > 0.6 else data
