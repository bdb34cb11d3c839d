"""Push, fetch and load of an artifact of many buckets through a registry on loopback: seconds, bytes, requests.

    python tests/benchmarks/transfer.py [--buckets 64] [--ready STORE] [--repeat 3]

Needs docker-registry and, for the comparison, skopeo. Medians of the repetitions, each with a registry, stores and
caches of its own; times of aotc's commands are without the start of Python.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from many_buckets import MODEL, built_store, publish_many  # noqa: E402
from processes import run_python  # noqa: E402
from registry_server import running_registry  # noqa: E402

from aotc.store.layout.bundle import read_bundle  # noqa: E402
from aotc.store.layout.store import Store  # noqa: E402
from aotc.store.reference import Reference, parse_reference  # noqa: E402
from aotc.store.remote.copied import Copied  # noqa: E402
from aotc.store.remote.fetching import fetch, of_targets  # noqa: E402
from aotc.store.remote.push import push  # noqa: E402

LOAD = """
import json, logging, sys, time
import torch, aotc
from examples.models import transformer_block
aotc.load
answers = []
class Counter(logging.Handler):
    def emit(self, record):
        if "HTTP/" in record.getMessage():
            answers.append(record.args)
logging.getLogger("urllib3").setLevel(logging.DEBUG)
logging.getLogger("urllib3").addHandler(Counter())
module = transformer_block(width=256, heads=4).eval()
began = time.perf_counter()
compiled = aotc.load(sys.argv[1], module)
seconds = time.perf_counter() - began
x = torch.randn(4, 128, 256)
with torch.no_grad():
    assert torch.allclose(compiled(x), module(x), atol=1e-4)
received = sum(int(args[-1] or 0) for args in answers)
print(json.dumps({"seconds": seconds, "MB": received / 1e6, "requests": len(answers)}))
"""

Row = dict[str, float]


def of_copied(copied: Copied) -> Row:
    return {"seconds": copied.seconds, "MB": (copied.sent + copied.received) / 1e6, "requests": copied.requests}


def of_command(run: Callable[[], object]) -> Row:
    began = time.perf_counter()
    run()
    return {"seconds": time.perf_counter() - began}


def of_load(where: str, cache: Path) -> Row:
    """`aotc.load` in a fresh process, `import torch, aotc` not counted."""
    row: Row = json.loads(run_python(LOAD, where, AOTC_CACHE_DIR=str(cache)))
    return row


def measure(source: Store, folder: Path) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    with running_registry(folder / "registry") as server:
        where = f"oci://{server.host}/team/{MODEL}"
        for tag in ("v1", "v2"):
            name = f"{tag}, {'all new' if tag == 'v1' else '4 buckets changed'}"
            to = parse_reference(f"{where}:{tag}")
            rows[f"push {name}"] = of_copied(push(source, Reference(None, MODEL, tag=tag), to))
            rows[f"fetch {name}"] = of_copied(fetch(to, folder / "fetched", of_targets()))
        cache = folder / "cache"
        digest = read_bundle(source, Reference(None, MODEL, tag="v1")).digest
        rows["load from the registry, nothing here"] = of_load(f"{where}:v1", cache)
        rows["load from the registry by tag, all fetched"] = of_load(f"{where}:v1", cache)
        rows["load from the registry by digest, all fetched"] = of_load(f"{where}@{digest}", cache)
        rows["load of v2 on that host"] = of_load(f"{where}:v2", cache)
        rows["load from a folder"] = of_load(f"{source.path}#{MODEL}:v1", cache)
        if shutil.which("skopeo"):
            rows |= with_skopeo(source, folder, f"docker://{server.host}/team/skopeo:v1")
    return rows


def with_skopeo(source: Store, folder: Path, remote: str) -> dict[str, Row]:
    copy = ["skopeo", "copy", "--quiet", "--all", "--preserve-digests"]
    there = [*copy, "--dest-tls-verify=false", f"oci:{source.path}:{MODEL}:v1", remote]
    back = [*copy, "--src-tls-verify=false", remote, f"oci:{folder / 'skopeo'}:{MODEL}:v1"]
    return {
        "skopeo copy to the registry": of_command(lambda: subprocess.run(there, check=True)),
        "skopeo copy from the registry": of_command(lambda: subprocess.run(back, check=True)),
    }


def options_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ready", type=Path, help="a store with the quickstart model, instead of building one")
    return parser


def repeat(options: argparse.Namespace, measure: Callable[[Store, Path], Mapping[str, Row]]) -> None:
    """Measure a store that holds v1, and v2 with four buckets changed, `--repeat` times, and show the medians."""
    runs: dict[str, list[Row]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="aotc-transfer-") as work:
        source = built_store(Path(work), options.ready)
        publish_many(source, "v1", options.buckets)
        publish_many(source, "v2", options.buckets, changed=4)
        for number in range(options.repeat):
            for name, row in measure(source, Path(work) / str(number)).items():
                runs[name].append(row)
    print(f"{options.buckets} buckets; medians of {options.repeat}\n")
    show(runs)


def show(runs: Mapping[str, Sequence[Row]]) -> None:
    print(f"{'':46} {'seconds':>8} {'MB':>8} {'requests':>9}")
    for name, rows in runs.items():
        cells = [
            format(statistics.median(row[key] for row in rows), form) if key in rows[0] else "-"
            for key, form in (("seconds", ".3f"), ("MB", ".2f"), ("requests", ".0f"))
        ]
        print(f"{name:46} {cells[0]:>8} {cells[1]:>8} {cells[2]:>9}")


if __name__ == "__main__":
    repeat(options_of(__doc__).parse_args(), measure)
