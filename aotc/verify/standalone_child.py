"""The process without torch that `aotc verify --standalone` compares: `python -m aotc.verify.standalone_child`.

It reads lines of JSON from standard input and answers each with one: first what to load, then calls. Values are
encoded by `encoded`; the bytes of tensors are in a file that the line names.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ALIGNMENT = 64
"""Bytes, of a tensor in a file."""


def encoded(value: Any, put: Callable[[Any], list[Any] | None]) -> Any:
    """A value as JSON holds it. `put` gives, of a tensor, its place in a file, dtype, shape and strides."""
    if (placed := put(value)) is not None:
        return {"tensor": placed}
    if isinstance(value, dict):
        return {"dict": [[key, encoded(item, put)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encoded(item, put) for item in value]}
    if value is None or type(value) in (bool, int, float, str):
        return {"plain": value}
    raise TypeError(f"{type(value).__qualname__} cannot be given to a process without torch")


def decoded(value: Any, get: Callable[[list[Any]], Any]) -> Any:
    """The inverse of `encoded`."""
    ((kind, held),) = value.items()
    if kind == "tensor":
        return get(held)
    if kind == "dict":
        return {key: decoded(item, get) for key, item in held}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(decoded(item, get) for item in held)
    return held


def main() -> None:
    from aotc.standalone.cpu_environment import open_cpu
    from aotc.standalone.loading import load
    from aotc.tensors.formats import strides_in

    core = open_cpu()

    def read(message: Any) -> Any:
        data = bytearray(Path(message["file"]).read_bytes())
        return decoded(
            message["value"], lambda held: core.placed(data, held[0], held[1], tuple(held[2]), tuple(held[3]))
        )

    def write(value: Any, file: Path) -> Any:
        data = bytearray()

        def put(part: Any) -> list[Any] | None:
            if not isinstance(part, core.Tensor):
                return None
            strides = strides_in("contiguous", part.shape)
            dense = core.copied(part, part.shape, strides)
            data.extend(bytes(-len(data) % ALIGNMENT))
            begin = len(data)
            count = dense.itemsize
            for size in part.shape:
                count *= size
            data.extend(ctypes.string_at(dense.address, count) if count else b"")
            return [begin, part.dtype, list(part.shape), list(strides)]

        held = encoded(value, put)
        file.write_bytes(data)
        return held

    model: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            given = read(message)
            if model is None:
                model = load(message["ref"], store=message["store"], target=message["target"], weights=given or None)
            else:
                before = model.stats().buckets
                result = model(*given["args"], **given["kwargs"])
                now = model.stats().buckets
                answer["bucket"] = next(name for name in now if now[name] != before.get(name, 0))
                answer["value"] = write(result, Path(message["file"]))
            if "torch" in sys.modules:
                raise AssertionError("torch was imported")
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
