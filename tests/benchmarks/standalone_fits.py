"""How many artifacts fit the standalone runtime, and what keeps the others from it.

    python tests/benchmarks/standalone_fits.py --store FOLDER --store FOLDER   # of all bundles in these stores
    python tests/benchmarks/standalone_fits.py --model vit --model t5          # builds these families, both ways
    python tests/benchmarks/standalone_fits.py --part 1/16                     # every 16th family, from the first on

Families are those of tests/zoo/families.yaml: built once as they are, which says what fits by itself, and those that
do not, once more with `runtime: standalone`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from own_caches import ROOT, environment

FAMILIES = ROOT / "tests" / "zoo" / "families.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, action="append", default=[], help="a store (may be given several times)")
    parser.add_argument("--model", action="append", default=[], help="a family (may be given several times)")
    parser.add_argument("--part", metavar="I/N", help="every N-th family from the I-th")
    options = parser.parse_args()
    for store in options.store:
        show(str(store), dict(fits_of(store)))
    if options.model or options.part:
        with tempfile.TemporaryDirectory(prefix="aotc-fits-") as work:
            built(Path(work), options.model or part_of(options.part))


def part_of(part: str) -> list[str]:
    import yaml

    first, count = map(int, part.split("/"))
    return list(yaml.safe_load(FAMILIES.read_text())["models"])[first - 1 :: count]


def fits_of(store: Path) -> Iterator[tuple[str, list[str] | None]]:
    """Of each artifact, what keeps it from fitting; None where its record does not say."""
    from aotc.standalone.misfits import misfits
    from aotc.store.layout.bundle import read_artifact, read_bundle
    from aotc.store.layout.store import Store

    opened = Store.open(store)
    for tag in opened.tags():
        for entry in read_bundle(opened, tag.reference).artifacts:
            if not entry.is_cache:
                reasons = misfits(read_artifact(opened, entry))
                yield f"{tag.model} {entry.target}", None if reasons is None else list(reasons)


def built(work: Path, names: Sequence[str]) -> None:
    as_is, store = build(work, names, "any")
    found = {name.split()[0]: reasons for name, reasons in fits_of(store)}
    show("families as they are", {name: found.get(name, [as_is.get(name, "not built")]) for name in names})
    others = [name for name in names if found.get(name)]
    if others:
        failed, _ = build(work, others, "standalone")
        show(
            "of the others, with `runtime: standalone`",
            {name: [failed[name]] if name in failed else [] for name in others},
        )


def build(work: Path, names: Sequence[str], runtime: str) -> tuple[dict[str, str], Path]:
    """The errors, by family, and the store."""
    import yaml

    document = yaml.safe_load(FAMILIES.read_text())
    document["models"] = {name: document["models"][name] for name in names}
    document["defaults"]["runtime"] = runtime
    manifest, store = work / f"{runtime}.json", work / runtime
    manifest.write_text(json.dumps(document))
    arguments = ["build", manifest, "--store", store, "--jobs", 1, "--json"]
    command = [sys.executable, "-m", "aotc", *map(str, arguments)]
    printed = subprocess.run(
        command, cwd=ROOT, env=environment(work / "caches"), stdout=subprocess.PIPE, text=True, check=False
    ).stdout
    report: dict[str, Any] = json.loads(printed[printed.index("{") :])
    return {unit["model"]: reason_of(unit) for unit in report["units"] if unit["error"]}, store


def reason_of(unit: dict[str, Any]) -> str:
    """What is lacking; else the first line of the error."""
    lines = [line.removeprefix("  - ") for line in unit["error"].splitlines() if line.startswith("  - ")]
    return "; ".join(lines) or unit["error"].partition("\n")[0]


def show(title: str, found: dict[str, list[str] | None]) -> None:
    fits = sum(reasons == [] for reasons in found.values())
    unknown = sum(reasons is None for reasons in found.values())
    print(f"{title}: {fits} of {len(found)} fit" + (f", {unknown} unknown" if unknown else ""))
    for name, reasons in found.items():
        print(f"  {name:32} {'unknown' if reasons is None else ', '.join(reasons) or 'fits'}", flush=True)


if __name__ == "__main__":
    main()
