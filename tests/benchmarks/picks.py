"""What pinned picks give: builds without measuring, and equal bytes from other folders.

    python tests/benchmarks/picks.py manifests/gpt.yaml                          # on a CPU
    python tests/benchmarks/picks.py manifests/cuda.yaml --model gpt-bf16        # on a GPU

Each model is built three times: as it is, then twice with the exported picks and `--locked`, each time under another
HOME, in another temporary folder, into another store. Printed: the seconds of each unit, its picks and whether the
files of the three builds are equal by digest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def aotc(*arguments: Any, home: Path) -> str:
    """Run aotc with a HOME and a temporary folder of its own."""
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(home / "tmp"), "PYTHONPATH": paths}
    ran = subprocess.run(
        [sys.executable, "-m", "aotc", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.exit(f"{arguments}: {ran.stdout}\n{ran.stderr}")
    return ran.stdout


def build(manifest: Path, models: list[str], home: Path, *more: Any) -> tuple[dict[str, Any], float]:
    chosen = [word for model in models for word in ("--model", model)]
    began = time.monotonic()
    report = json.loads(aotc("build", manifest, *chosen, "--store", home / "store", "--json", *more, home=home))
    return report, time.monotonic() - began


def digests(home: Path, model: str) -> dict[str, str]:
    """The digest of each file of the model, and of its record, by a readable name."""
    shown = json.loads(aotc("inspect", model, "--store", home / "store", "--json", home=home))
    found = {}
    for artifact in shown["artifacts"]:
        for variant in artifact["variants"]:
            bucket = " ".join(f"{dim}={size}" for dim, size in variant["bucket"].items())
            files = [*variant["files"], *(variant[name] for name in ("report", "picks") if variant.get(name))]
            found |= {f"{artifact['target']} {bucket} {file['name']}": file["digest"] for file in files}
        found[f"{artifact['target']} record"] = artifact["digest"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="aotc-picks-"))
    homes = [work / name for name in ("measured", "pinned-1", "elsewhere/pinned-2")]
    measured, seconds = build(options.manifest, options.model, homes[0])
    pins = work / "picks.json"
    aotc("picks", *measured["bundles"], "--store", homes[0] / "store", "--export", pins, home=homes[0])
    pinned = json.loads(pins.read_text())["units"]
    print(f"{len(pinned)} units, {sum(len(unit['picks']) for unit in pinned)} picks; measured: {seconds:.1f} s")
    reports = [measured]
    for home in homes[1:]:
        report, seconds = build(options.manifest, options.model, home, "--picks", pins, "--locked")
        reports.append(report)
        print(f"pinned and locked: {seconds:.1f} s")
    for units in zip(*(report["units"] for report in reports), strict=True):
        times = ", ".join(f"{unit['seconds']:.1f} s" for unit in units)
        print(f"{units[0]['model']} {units[0]['bucket']} {units[0]['target']}: {times}; {'; '.join(units[1]['notes'])}")
    for model in measured["bundles"]:
        first, one, two = (digests(home, model) for home in homes)
        same = {name for name in one if one[name] == two.get(name)}
        code = {name for name in same if first.get(name) == one[name]}
        print(f"{model}: {len(same)} of {len(one)} digests equal in both pinned builds; {len(code)} also when measured")
        for name in sorted(one.keys() - same):
            print(f"    differs: {name}")


if __name__ == "__main__":
    main()
