"""examples/service under load over loopback, while it switches to another release.

    python tests/benchmarks/reload.py --seconds 30 --connections 16

Builds the example's encoder of 4 layers as `v1` and one of 3 layers as `v2`, starts the service on `v1`, and switches
to `v2` in the middle of the load. The service and the load share this machine's cores.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "service"
sys.path[:] = [str(EXAMPLE), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

LAYERS = {"v1": 4, "v2": 3}


def prepare(folder: Path) -> None:
    """A store with both releases, and their checkpoints."""
    import torch
    from encoder import encoder
    from safetensors.torch import save_file

    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "encoder.py").write_text((EXAMPLE / "encoder.py").read_text())
    manifest = (EXAMPLE / "manifest.yaml").read_text()
    for tag, layers in LAYERS.items():
        own = folder / f"{tag}.yaml"
        own.write_text(
            manifest.replace("encoder.py:encoder\n", f"encoder.py:encoder\n    kwargs: {{layers: {layers}}}\n")
        )
        command = [sys.executable, "-m", "aotc", "build", own, "--tag", tag, "--store", folder / "store", "--quiet"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        torch.manual_seed(layers)
        save_file(encoder(layers).state_dict(), folder / "checkpoints" / f"{tag}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep what is built in this folder, and use it again")
    parser.add_argument("--seconds", default="30")
    parser.add_argument("--connections", default="16")
    parser.add_argument("--switches", type=int, default=1, help="repeat the load, and switch to and fro")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if not (folder / "checkpoints" / "v2.safetensors").exists():
            prepare(folder)
        places = ["--store", folder / "store", "--weights", folder / "checkpoints", "--tag", "v1", "--port", "0"]
        command = [sys.executable, EXAMPLE / "app.py", *places]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PATH": ""}) as service:
            try:
                assert service.stderr is not None
                lines = iter(service.stderr)
                url = next(found[1] for line in lines if (found := re.search(r"running on (http://\S+)", line)))
                wait_for(f"{url}/readyz")
                for number in range(options.switches):
                    load = ["--seconds", options.seconds, "--connections", options.connections, "--url", url]
                    switch = ["--release", ("v2", "v1")[number % 2]]
                    subprocess.run([sys.executable, EXAMPLE / "load.py", *load, *switch], check=True)
            finally:
                service.terminate()


def wait_for(url: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(url)


if __name__ == "__main__":
    main()
