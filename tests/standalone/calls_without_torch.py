"""Run in a process in which `import torch` raises: calls of models, as a pickle says, and what came of each."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

from without_torch import NoTorch, mapped_names


class Part(NamedTuple):
    """A view of a whole tensor or array, which others may view, too: strides and the offset in elements."""

    whole: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


def parts_made(value: Any, make: Any) -> Any:
    """The value with `make(…)` of each Part in its place."""
    if isinstance(value, Part):
        return make(value)
    if isinstance(value, dict):
        return {key: parts_made(item, make) for key, item in value.items()}
    return type(value)(parts_made(item, make) for item in value) if isinstance(value, list | tuple) else value


def leaves_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves_of(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def whose_memory(one: Any, others: list[Any]) -> int | None:
    """The first of the arrays that shares an element with this one."""
    import numpy

    found = [at for at, other in enumerate(others) if isinstance(other, numpy.ndarray)]
    return next((at for at in found if isinstance(one, numpy.ndarray) and numpy.shares_memory(one, others[at])), None)


def main(folder: Path) -> None:
    import numpy

    import aotc.standalone
    from aotc.errors import MissError
    from aotc.standalone.cpu_environment import open_cpu

    core = open_cpu()

    def plain(value: Any) -> Any:
        """A copy of numpy's: of bfloat16, the bits."""
        if isinstance(value, core.Tensor):
            assert value.dtype == "bfloat16"
            return numpy.asarray(memoryview(core.strided(value, value.shape, value.strides, 0, "uint16"))).copy()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(plain, value))
        return value.copy() if isinstance(value, numpy.ndarray) else value

    def called(model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        """In the last entries, of each part of the result: the argument that it is, and the one whose memory it has."""
        explained = model.explain(*args, **kwargs)
        before = model.stats()
        try:
            result = model(*args, **kwargs)
        except MissError as error:
            issues = [(issue.where, issue.message) for issue in error.issues]
            return {"error": issues, "misses": model.stats().misses - before.misses, "kind": explained.kind}
        given, parts = leaves_of([args, kwargs]), leaves_of(result)
        return {
            "result": plain(result),
            "given": plain(given),
            "kind": explained.kind,
            "bucket": explained.bucket,
            "pads": explained.pads,
            "ran": [name for name, count in model.stats().buckets.items() if count != before.buckets.get(name, 0)],
            "padded": model.stats().padded_calls - before.padded_calls,
            "is": [next((at for at, each in enumerate(given) if each is part), None) for part in parts],
            "memory": [whose_memory(part, given) for part in parts],
        }

    def made(part: Part) -> Any:
        strides = [step * part.whole.itemsize for step in part.stride]
        return numpy.lib.stride_tricks.as_strided(part.whole.ravel()[part.offset :], part.shape, strides)

    told = {}
    for name, (ref, weights, calls) in pickle.loads((folder / "asked.pickle").read_bytes()).items():
        model = aotc.standalone.load(ref, weights=weights)
        told[name] = [called(model, *parts_made(call, made)) for call in calls]
    told["mapped"] = mapped_names()
    told["imported"] = sorted(name for name in sys.modules if name.startswith(("torch", "aotc.runtime")))
    (folder / "told.pickle").write_bytes(pickle.dumps(told))


if __name__ == "__main__":
    sys.meta_path.insert(0, NoTorch())
    import calls_without_torch  # the pickle names classes of this file by that name

    calls_without_torch.main(Path(sys.argv[1]))
