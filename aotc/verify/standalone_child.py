"""The process without torch that `aotc verify --standalone` compares: `python -m aotc.verify.standalone_child`.

It reads lines of JSON from standard input and answers each with one: first what to load, then calls. Values are
encoded by `encoded`; the bytes of tensors are in a file that the line names. The answer to a call has the file of the
call with what the model wrote to its inputs, and behind that what it gave and its buffers.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ALIGNMENT = 64
"""Bytes, of a tensor in a file."""


def encoded(value: Any, put: Callable[[Any], list[Any] | None]) -> Any:
    """A value as JSON holds it. `put` gives, of a tensor, whose memory it has (a name of the module's state, or "" for
    the file), its place there in bytes, dtype, shape and strides in elements."""
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


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements lie without gaps, each in a place of its own, in any order of the axes."""
    step = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def main() -> None:
    from aotc.records import names_of
    from aotc.standalone.cpu_environment import open_cpu
    from aotc.standalone.loading import load
    from aotc.store.signing.policy import Trust
    from aotc.tensors.strides import strides_in

    core = open_cpu()

    def put(part: Any, data: bytearray) -> list[Any]:
        (part,) = core.to_host([part])
        strides = part.strides if is_dense(part.shape, part.strides) else strides_in("contiguous", part.shape)
        dense = core.copied(part, part.shape, strides)
        data.extend(bytes(-len(data) % ALIGNMENT))
        begin = len(data)
        count = math.prod(part.shape) * dense.itemsize
        data.extend(ctypes.string_at(dense.address, count) if count else b"")
        return ["", begin, part.dtype, list(part.shape), list(strides)]

    def put_result(part: Any, owners: list[tuple[str, int, Any]], data: bytearray) -> list[Any] | None:
        """`owners` are tensors without gaps, each with where it begins in the memory of that name."""
        if not isinstance(part, core.Tensor):
            return None
        for name, begin, owner in owners if 0 not in part.shape else ():
            if owner.address <= part.address < owner.address + math.prod(owner.shape) * owner.itemsize:
                place = begin + part.address - owner.address
                return [name, place, part.dtype, list(part.shape), list(part.strides)]
        placed = put(part, data)
        if part.strides == tuple(placed[-1]):
            owners.append(("", placed[1], part))
        return placed

    def answer_call(given: Any, memory: bytearray, file: Path) -> dict[str, Any]:
        if given["state"]:
            model.update_weights(given["state"])
        before = model.stats().buckets
        result = model(*given["args"], **given["kwargs"])
        now = model.stats().buckets
        data, owners = bytearray(memory), [("", 0, core.view(memory))]
        owners += [(spec.name, 0, each) for spec, each in zip(model.artifact.state, model._state, strict=True)]
        value = encoded(result, lambda part: put_result(part, owners, data))
        pairs = zip(model.artifact.state, model._state, strict=True)
        state = {name: put(each, data) for spec, each in pairs for name in names_of(spec) if name in given["state"]}
        file.write_bytes(data)
        bucket = next(name for name in now if now[name] != before.get(name, 0))
        return {"bucket": bucket, "value": value, "state": state}

    def read(message: Any, memory: bytearray) -> Any:
        return decoded(message["value"], lambda held: core.placed(memory, *held[1:3], *map(tuple, held[3:])))

    model: Any = None
    for line in sys.stdin:
        message = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            memory = bytearray(Path(message["file"]).read_bytes())
            given = read(message, memory)
            if model is None:
                where = {name: message[name] for name in ("store", "target", "device")}
                model = load(message["ref"], weights=given or None, trust=Trust(allow_untested=True), **where)
            else:
                answer = answer_call(given, memory, Path(message["file"]))
            if "torch" in sys.modules:
                raise AssertionError("torch was imported")
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
