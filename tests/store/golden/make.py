"""Make the golden store of this format version, once for each: v1 by the last commit that wrote it, of 0.1.

python tests/store/golden/make.py tests/store/golden/v2
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MANIFEST = """
version: 1
models:
  linear:
    factory: torch.nn:Linear
    kwargs: {in_features: 4, out_features: 3}
    mode: default
    targets: ["cpu:x86-64-v3"]
    inputs: {input: {shape: [batch, 4]}}
    buckets: [{batch: 2}]
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (manifest := Path(folder) / "golden.yaml").write_text(MANIFEST)
        store = Path(folder) / "store"
        subprocess.run(["aotc", "build", str(manifest), "--store", str(store)], check=True)
        shutil.copytree(store, sys.argv[1], ignore=shutil.ignore_patterns(".aotc"))
