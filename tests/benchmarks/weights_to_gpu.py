"""How fast a checkpoint gets from the page cache to a GPU: plain copies against small pinned buffers. A script.

    python tests/benchmarks/weights_to_gpu.py [--gigabytes 2.1] [--device cuda:0] [--lanes 8] [--chunk-mib 4]

A safetensors file of bfloat16 tensors of 32 MiB, like an LLM's layers, is written once and read into the page cache.
Each figure is of a fresh process that has a context, and begins with the mapped file: the first copy, with the page
faults of the mapping and the making of the buffers, and a second one. Values are compared on the GPU. Further rows are
of small files, below and above the size from which buffers are used.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import json, sys, time
import torch
from aotc.runtime.checkpoints import checkpoint_files, staged
path, device, way, lanes, chunk = sys.argv[1:]
staged.LANES, staged.CHUNK = int(lanes), int(chunk) << 20
device = torch.device(device)
torch.zeros(1, device=device)
torch.cuda.synchronize(device)
checkpoint = checkpoint_files.open_weights(path)
def once():
    sources = {name: checkpoint.read(name) for name in checkpoint.forms}
    copies = [(torch.empty_like(each, device=device), each) for each in sources.values()]
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    if way == "plain":
        checkpoint_files.copy_plainly(copies, device)
    else:
        checkpoint_files._copy_all(copies, device)
    torch.cuda.synchronize(device)
    return time.perf_counter() - began, copies
first, copies = once()
assert all(torch.equal(placed, source.to(device)) for placed, source in copies[:: max(1, len(copies) // 8)])
del copies
print(json.dumps([first, once()[0]]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.1)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--chunk-mib", type=int, default=4)
    options = parser.parse_args()
    import torch
    from safetensors.torch import save_file

    print(f"{'MB':>8}{'way':>9}{'first ms':>10}{'GB/s':>7}{'again ms':>10}{'GB/s':>7}")
    for size in (int(options.gigabytes * 1e9), 48 << 20, 96 << 20):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "weights.safetensors")
            each = min(16 << 20, size // 4)
            save_file({f"{n}": torch.randn(each).bfloat16() for n in range(max(1, size // (2 * each)))}, path)
            path.read_bytes()
            for way in ("plain", "staged", "plain", "staged"):
                command = [sys.executable, "-c", CHILD, str(path), options.device, way]
                command += [str(options.lanes), str(options.chunk_mib)]
                ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                first, again = json.loads(ran.stdout)
                row = "".join(f"{1000 * took:10.1f}{size / took / 1e9:7.1f}" for took in (first, again))
                print(f"{size / 1e6:8.0f}{way:>9}{row}")


if __name__ == "__main__":
    main()
