"""Run in a process without torch: a model's calls on a GPU. Prints one object of JSON."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

OF_TORCH = ("libtorch", "libc10", "libcudart", "libcublas", "libcudnn", "libnvrtc", "libtriton")


def main(ref: str, folder: Path, kind: str) -> dict[str, Any]:
    import numpy

    import aotc
    import aotc.standalone
    from aotc.errors import MemoryLimitError
    from aotc.standalone.cpu_environment import open_cpu

    options: dict[str, Any] = {"device": "cuda", "trust": aotc.Trust(allow_untested=True)}
    model = aotc.standalone.load(ref, weights=folder / "weights.safetensors", **options)
    given = numpy.load(folder / "given.npz")
    calls = [[given[f"x{call}_{at}"] for at in range(int(given["inputs"]))] for call in range(int(given["calls"]))]
    core = open_cpu()

    def plain(result: Any) -> Any:
        """As float32: of bfloat16, by its bits."""
        value = next(iter(result.values())) if isinstance(result, dict) else result
        if isinstance(value, numpy.ndarray):
            return value.astype(numpy.float32)
        bits = numpy.asarray(memoryview(core.strided(value, value.shape, value.strides, 0, "uint16")))
        return (bits.astype(numpy.uint32) << 16).view(numpy.float32)

    results = [plain(model(*inputs)) for inputs in calls]
    numpy.savez(folder / "results.npz", **{f"y{at}": each for at, each in enumerate(results)})
    told: dict[str, Any] = {"calls": model.stats().calls, "graphs": model.stats().graph_launches}
    if kind == "many":
        before = model.stats().gpu_bytes
        for _ in range(1000):
            model(*calls[0])
        told["grown"] = model.stats().gpu_bytes - before
        wrong: list[int] = []

        def call_often() -> None:
            wrong.extend(at for at in range(50) if not numpy.array_equal(plain(model(*calls[0])), results[0]))

        threads = [threading.Thread(target=call_often) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told["wrong"] = len(wrong)
        [there] = core.to_gpu([core.view(calls[0][0])], 0)
        told["on_gpu"] = model(there).__dlpack_device__()[0]
        kept = []
        try:
            while True:
                kept.append(core.to_gpu([core.view(numpy.zeros(1 << 30, numpy.uint8))], 0))
        except (MemoryLimitError, core.GpuError) as error:
            told["out_of_memory"] = str(error)
        kept.clear()
        told["after"] = bool(numpy.array_equal(plain(model(*calls[0])), results[0]))
    told["torch"] = [name for name in sys.modules if name.partition(".")[0] == "torch"]
    mapped = {Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines()}
    told["mapped"] = sorted(name for name in mapped if name.startswith(OF_TORCH))
    model.close()
    return told


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
