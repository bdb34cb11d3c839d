"""Run in a process in which `import torch` raises: calls with arrays whose DLPack or buffers are odd, drawn from seeds,
beside what numpy computes of copies."""

from __future__ import annotations

import ctypes
import gc
import json
import random
import sys
from typing import Any

import numpy
from without_torch import NoTorch

Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
api = ctypes.pythonapi
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, Deleter]
api.PyCapsule_IsValid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


class Fields(ctypes.Structure):
    """DLTensor"""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("sizes", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class Legacy(ctypes.Structure):
    """DLManagedTensor"""

    _fields_ = (("tensor", Fields), ("context", ctypes.c_void_p), ("deleter", Deleter))


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned"""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", Fields),
    )


class Producer:
    """Speaks DLPack for memory at an address; `odd` are fields that are set otherwise than they should be.

    `made` counts capsules, `deleted` calls of the deleter.
    """

    def __init__(
        self, address: int, shape: Any, strides: Any, *, legacy: bool = False, read_only: bool = False
    ) -> None:
        self.address, self.shape, self.strides, self.legacy, self.read_only = address, shape, strides, legacy, read_only
        self.odd: dict[str, Any] = {}
        self.made, self.deleted = 0, 0
        self.kept: list[Any] = []

    def __dlpack_device__(self) -> Any:
        return self.odd.get("told", tuple(self.odd.get("device", (1, 0))))

    def __dlpack__(self, **options: Any) -> Any:
        if self.legacy and options:
            raise TypeError("no such options")
        if "raises" in self.odd:
            raise self.odd["raises"]("no")
        if "gives" in self.odd:
            return self.odd["gives"]
        rank = len(self.shape)
        sizes, strides = (ctypes.c_int64 * rank)(*self.shape), (ctypes.c_int64 * rank)(*self.strides)
        managed = (Legacy if self.legacy else Versioned)()
        given, offset = managed.tensor, self.odd.get("byte_offset", 0)
        given.data, given.byte_offset, given.rank = self.address - offset, offset, rank
        given.device[0], given.code, given.bits, given.lanes = 1, 2, 32, 1
        given.sizes, given.strides = ctypes.addressof(sizes), ctypes.addressof(strides)
        for name in ("data", "rank", "code", "bits", "lanes", "sizes", "strides"):
            if name in self.odd:
                setattr(given, name, self.odd[name])
        if not self.legacy:
            managed.version[0], managed.flags = self.odd.get("version", 1), int(self.read_only)
        name = b"dltensor" if self.legacy else b"dltensor_versioned"

        def delete(_: Any) -> None:
            self.deleted += 1

        def destroy(capsule: int) -> None:
            if api.PyCapsule_IsValid(capsule, name):
                delete(None)

        managed.deleter, destructor = Deleter(delete), Deleter(destroy)
        self.kept += [sizes, strides, managed, destructor, name]
        self.made += 1
        capsule = api.PyCapsule_New(ctypes.addressof(managed), name, destructor)
        if self.odd.get("consumed"):
            numpy.from_dlpack(Holding(capsule))
        return capsule


class Holding:
    """Gives the capsule that it has, once more."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


ODD: list[dict[str, Any]] = [
    *({"device": device} for device in ((2, 0), (10, 0), (13, 0), (-1, 5))),
    *({"told": told} for told in (None, (1,), ("cpu", 0), (1 << 40, 0), 7)),
    *({"raises": error} for error in (BufferError, TypeError, ValueError, MemoryError, OSError, StopIteration)),
    *({"gives": given} for given in (None, 5, "capsule", b"dltensor")),
    *({"code": code} for code in (0, 1, 3, 4, 17, 255)),
    *({"bits": bits} for bits in (0, 4, 8, 16, 64, 255)),
    *({"lanes": lanes} for lanes in (0, 2, 65535)),
    *({"rank": rank} for rank in (-1, 17, 1 << 30, 1)),
    {"version": 2},
    {"version": 0},
    {"consumed": True},
    {"sizes": None},
    {"huge": (1 << 62, 6)},
    {"huge": (4, 1 << 62)},
    {"huge": (-4, 6)},
    {"huge": (-1, -6)},
    {"far": (1 << 62, 1)},
    {"far": (-(1 << 63), 1)},
]
"""What no call takes, wherever it comes."""


class Drawn:
    """A float32 array of [rows, 6] in 4 KiB of memory, any way round, and an object that gives it; `fits` where a call
    may read it, `array` is numpy's view of it."""

    def __init__(self, draw: random.Random, memory: numpy.ndarray, rows: int) -> None:
        gap, extra = draw.choice([1, 1, 1, 2, 3]), draw.choice([0, 0, 0, 1, 6])
        steps = [6 * gap + extra, gap] if draw.random() < 0.7 else [gap, rows * gap + extra]
        steps = [step * draw.choice([1, 1, 1, 1, -1, 0]) for step in steps]
        spare = [max(-step * (size - 1), 0) for step, size in zip(steps, (rows, 6), strict=True)]
        first = 4 * (sum(spare) + draw.randrange(120)) + draw.choice([0] * 9 + [1, 2])
        strides = [4 * step for step in steps]
        self.array = numpy.ndarray((rows, 6), numpy.float32, memory, first, strides)
        self.repeats = any(step == 0 and size > 1 for step, size in zip(steps, (rows, 6), strict=True)) and rows > 0
        self.read_only = draw.random() < 0.15
        self.fits = not (rows and first % 4)
        kind, self.producer = draw.choice(["numpy", "buffer", "legacy", "versioned", "versioned"]), None
        if kind in ("numpy", "buffer"):
            view = self.array.view()
            view.flags.writeable = not self.read_only
            if draw.random() < 0.1:
                view, self.fits = view.astype(draw.choice([">f4", "f8", "i4", "U4", "V8", "M8[s]"])), False
                kind = "numpy"
            self.given: Any = view if kind == "numpy" else memoryview(view)
            return
        self.read_only = self.read_only and kind == "versioned"
        address = memory.ctypes.data + first
        self.given = self.producer = made = Producer(
            address, (rows, 6), steps, legacy=kind == "legacy", read_only=self.read_only
        )
        if draw.random() < 0.25:
            made.odd, self.fits = draw.choice(ODD), False
            if "version" in made.odd and made.legacy:
                made.odd, self.fits = {}, not (rows and first % 4)
            if "huge" in made.odd:
                made.shape = made.odd["huge"]
            if "far" in made.odd:
                made.strides = made.odd["far"]
                self.fits = rows == 0 or (rows == 1 and not first % 4)
                self.repeats, strides[1] = False, 4
                self.array = numpy.ndarray((rows, 6), numpy.float32, memory, first, strides)
        elif draw.random() < 0.3:
            made.odd = {"byte_offset": 4 * draw.randrange(30)}
        elif draw.random() < 0.1 and steps == [6, 1]:
            made.odd = {"strides": None}


def in_numpy(tensor: Any) -> numpy.ndarray:
    return tensor if isinstance(tensor, numpy.ndarray) else numpy.asarray(memoryview(tensor))


def try_call(model: Any, seed: int) -> str:
    """What is wrong; "ran" or "missed" where nothing is."""
    from aotc.errors import MissError

    draw = random.Random(seed)
    memory = numpy.frombuffer(
        bytearray(numpy.random.default_rng(seed).standard_normal(1024).astype("f4").tobytes()), "u1"
    )
    other = memory.copy() if draw.random() < 0.8 else memory
    rows = draw.choice([0, 1, 2, 3, 4, 4, 4])
    total, x = Drawn(draw, memory, rows), Drawn(draw, other, rows)
    fits = total.fits and x.fits and not (total.read_only or total.repeats)
    fits = fits and not numpy.shares_memory(total.array, x.array)
    before = memory.copy(), other.copy()
    expected = total.array + x.array
    try:
        result = model(total.given, x.given)
    except MissError as error:
        if fits:
            return f"a miss: {error}"
        if (memory != before[0]).any() or (other != before[1]).any():
            return "a miss wrote to memory"
    else:
        if not fits:
            return "it ran"
        if not numpy.array_equal(in_numpy(result["doubled"]), expected * 2, equal_nan=True):
            return "other values"
        if result["total"] is not total.given or not numpy.array_equal(total.array, expected, equal_nan=True):
            return "the caller's array has not what was written"
        first = in_numpy(result["first"])
        if rows and (first.ctypes.data != x.array.ctypes.data or first.flags.writeable is x.read_only):
            return "the view is none of the input"
        if x.producer and x.producer.deleted:
            return "what a result is a view of was deleted"
        total.array[:] -= total.array  # zeros; the rest must be as it was
        untouched = numpy.ndarray(
            (rows, 6), numpy.float32, before[0], total.array.ctypes.data - memory.ctypes.data, total.array.strides
        )
        untouched[:] = 0
        if (memory != before[0]).any():
            return "other memory was written to"
        del result, first
    for producer in (total.producer, x.producer):
        if producer and producer.deleted != producer.made:
            return f"{producer.deleted} calls of the deleter for {producer.made} capsules, {producer.odd}"
    return "ran" if fits else "missed"


def main(store: str, first: int, count: int) -> None:
    import aotc.standalone
    from aotc.standalone.cpu_environment import open_cpu

    numpy.seterr(all="ignore")
    gc.disable()  # what a call has taken goes with it, and waits for no collection
    trust = aotc.Trust(allow_untested=True)  # on a CPU that the build machine lacks
    model = aotc.standalone.load(f"{store}#accumulating", weights={}, trust=trust)
    said = {seed: try_call(model, seed) for seed in range(first, first + count)}
    wrong = {seed: words for seed, words in said.items() if words not in ("ran", "missed")}
    counts = [list(said.values()).count(word) for word in ("ran", "missed")]
    stats = model.stats()
    told = {"wrong": wrong, "counts": counts, "stats": [stats.calls, stats.misses, stats.contiguous_copies]}
    print(json.dumps({**told, "runtime": open_cpu().__file__}))


if __name__ == "__main__":
    sys.meta_path.insert(0, NoTorch())
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
