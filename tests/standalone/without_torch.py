"""Run in a process in which `import torch` raises: calls of models, as JSON says, and what the process has mapped."""

from __future__ import annotations

import importlib.abc
import json
import platform
import sys
from pathlib import Path
from typing import Any


class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{name} was imported in a process without torch")


def mapped_names() -> list[str]:
    """Of the files that this process has mapped."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return sorted(Path(name).name for name in mapped)


def main(folder: Path) -> None:
    import numpy

    import aotc.standalone

    told = {}
    for case in json.loads((folder / "cases.json").read_text()):
        name = case["name"]
        weights = folder / f"{name}.safetensors"
        trust = aotc.Trust(allow_untested=True)  # on a CPU that the build machine lacks
        model = aotc.standalone.load(case["ref"], weights=weights if weights.exists() else None, trust=trust)
        arrays = numpy.load(folder / f"{name}.npz")
        inputs = [arrays[key] for key in sorted(arrays) if key.startswith("x")]
        result = model(*inputs)
        results = list(result.values()) if isinstance(result, dict) else [result]
        expected = [arrays[key] for key in sorted(arrays) if key.startswith("y")]
        told[name] = {
            "differences": [float(abs(one - other).max()) for one, other in zip(results, expected, strict=True)],
            "types": [type(each).__name__ for each in results],
            "shapes": [list(one.shape) == list(other.shape) for one, other in zip(results, expected, strict=True)],
            "calls": model.stats().calls,
            "target": model.artifact.target,
        }
    told["machine"] = platform.machine()
    told["mapped"] = mapped_names()
    told["imported"] = sorted(name for name in sys.modules if name.startswith(("torch", "aotc.runtime")))
    print(json.dumps(told))


if __name__ == "__main__":
    sys.meta_path.insert(0, NoTorch())
    main(Path(sys.argv[1]))
