"""How many artifacts fit the standalone runtime, whether they are right there, and what keeps the others from it.

    python tests/benchmarks/standalone_fits.py --store FOLDER --store FOLDER   # of all bundles in these stores
    python tests/benchmarks/standalone_fits.py --model vit --model t5          # builds these families, both ways
    python tests/benchmarks/standalone_fits.py --part 1/16 --work FOLDER       # every 16th family, from the first on
    python tests/benchmarks/standalone_fits.py --part 1/16 --target cpu:neon --python COMMAND   # for another machine
    python tests/benchmarks/standalone_fits.py --part 1/4 --target cuda --dtype float16 --jobs 12   # for this GPU

Families are those of tests/zoo/families.yaml: built once as they are, which says what fits by itself, and those that
do not, once more with `runtime: standalone`. What fits is compared with eager, by `aotc verify --standalone`. `--work`
keeps what was found, so that the table, in Markdown, is that of all parts so far. For another machine and for a GPU,
families are built with `runtime: standalone` alone; COMMAND is as of `aotc verify --python`. Nothing is tuned.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from own_caches import ROOT, environment

WAYS = ("any", "standalone")
CALLS, NOT_BUILT = "it calls ", "not built"
FAMILIES = ROOT / "tests" / "zoo" / "families.yaml"
Found = dict[str, dict[str, list[str]]]
"""By family: reasons under `any` and `standalone`, where it was built so, and `verified`, what verify said of each
size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, action="append", default=[], help="a store (may be given several times)")
    parser.add_argument("--model", action="append", default=[], help="a family (may be given several times)")
    parser.add_argument("--part", metavar="I/N", help="every N-th family from the I-th")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep what was found there, and add to it")
    parser.add_argument("--target", default="native", help="what to build the families for")
    parser.add_argument("--dtype", help="of the models and their inputs")
    parser.add_argument("--jobs", type=int, default=1, help="builds and comparisons side by side")
    parser.add_argument("--python", metavar="COMMAND", help="the Python that runs what was built")
    options = parser.parse_args()
    for store in options.store:
        show(str(store), dict(fits_of(store)))
    if options.model or options.part:
        with tempfile.TemporaryDirectory(prefix="aotc-fits-") as temporary:
            kept = (options.work or Path(temporary)) / "found.json"
            found: Found = json.loads(kept.read_text()) if kept.exists() else {}
            names = options.model or part_of(options.part)
            found |= measured(Path(temporary), names, options)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found, indent=1))
            print(table_of(found))


def part_of(part: str) -> list[str]:
    first, count = map(int, part.split("/"))
    return list(families()["models"])[first - 1 :: count]


def families() -> dict[str, Any]:
    import yaml

    document: dict[str, Any] = yaml.safe_load(FAMILIES.read_text())
    return document


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


def show(title: str, found: dict[str, list[str] | None]) -> None:
    fits = sum(reasons == [] for reasons in found.values())
    unknown = sum(reasons is None for reasons in found.values())
    print(f"{title}: {fits} of {len(found)} fit" + (f", {unknown} unknown" if unknown else ""))
    for name, reasons in found.items():
        print(f"  {name:32} {'unknown' if reasons is None else ', '.join(reasons) or 'fits'}", flush=True)


# -- families ---------------------------------------------------------------------------------------------------------


def measured(work: Path, names: Sequence[str], options: argparse.Namespace) -> Found:
    found: Found = {name: {} for name in names}
    for runtime in WAYS[-1:] if options.python or options.target.startswith("cuda") else WAYS:
        left = [name for name in names if all(map(calls_of, found[name].values()))]
        if not left:
            break
        failed, store = build(work, left, runtime, options)
        of_store = {name.split()[0]: reasons or [] for name, reasons in fits_of(store)}
        for name in left:
            found[name][runtime] = of_store[name] if name in of_store else failed.get(name, [NOT_BUILT])
        fitting = [name for name in left if not found[name][runtime]]
        with ThreadPoolExecutor(options.jobs) as side_by_side:
            said = side_by_side.map(lambda name: verified(work, store, name, options.python), fitting)  # noqa: B023
            for name, of_sizes in zip(fitting, said, strict=True):
                found[name]["verified"] = of_sizes
    return found


def calls_of(reasons: Sequence[str]) -> list[str]:
    """What the code calls and the runtime lacks."""
    calls = (reason.removeprefix(CALLS) for reason in reasons if reason.startswith(CALLS))
    return [re.sub(r"^\S+:\d+ in \w+: ", "", call) for call in calls]


def code_fits(reasons: Sequence[str]) -> bool:
    return not any(reason.startswith((CALLS, NOT_BUILT)) for reason in reasons)


def build(
    work: Path, names: Sequence[str], runtime: str, options: argparse.Namespace
) -> tuple[dict[str, list[str]], Path]:
    """The errors, by family, and the store."""
    document = families()
    document["models"] = {name: document["models"][name] for name in names}
    document["defaults"] |= {"runtime": runtime, "targets": [options.target]}
    document["defaults"] |= {"dtype": options.dtype} if options.dtype else {}
    manifest, store = work / f"{runtime}.json", work / runtime
    manifest.write_text(json.dumps(document))
    report = aotc(work, "build", manifest, "--store", store, "--untuned", "--jobs", options.jobs, "--json")
    return {unit["model"]: reasons_of(unit) for unit in report["units"] if unit["error"]}, store


def verified(work: Path, store: Path, name: str, python: str | None) -> list[str]:
    """What verify says of each size: its status, and of one that is not `ok` the reason."""
    there = ("--python", python) if python else ()
    reports = aotc(work, "verify", f"{store}#{name}", "--standalone", *there, "--seeds", 1, "--json")
    if not isinstance(reports, list):
        return [f"could not run: {reports['error']['message']}"]
    return [one["status"] if one["status"] == "ok" else f"{one['status']}: {one['detail']}" for one in reports]


def aotc(work: Path, *arguments: object) -> Any:
    """The JSON that a command of aotc prints, after what imported libraries may have printed."""
    command = [sys.executable, "-m", "aotc", *map(str, arguments)]
    printed = subprocess.run(
        command, cwd=ROOT, env=environment(work / "caches"), stdout=subprocess.PIPE, text=True, check=False
    ).stdout
    return json.loads(printed[min(printed.index(bracket) for bracket in "[{" if bracket in printed) :])


def reasons_of(unit: dict[str, Any]) -> list[str]:
    """What is lacking, in the words of `misfits`; else the first line of the error."""
    first, *others = unit["error"].splitlines()
    lines = [line.removeprefix("  - ") for line in others if line.startswith("  - ")]
    if "lacks" in first:
        return [CALLS + re.sub(r" \(and \d+ more lines?\)$", "", line) for line in lines]
    return lines if "does not do" in first else [f"{NOT_BUILT}: {first}"]


def table_of(found: Found) -> str:
    """Counts, and in Markdown the families that do not run without torch, with the reasons."""
    fits = {way: [name for name, one in found.items() if way in one and code_fits(one[way])] for way in WAYS}
    run = [name for name, one in found.items() if "verified" in one]
    right = [name for name in run if set(found[name]["verified"]) == {"ok"}]
    lines = [
        f"Of {len(found)} families, the code of {len(fits['any'])} calls nothing that the runtime lacks as it is, and "
        f"of {len(fits['standalone'])} more with `runtime: standalone`. {len(run)} of them run without torch, and "
        f"{len(right)} of these give eager's results, at all sizes.",
        "",
        "| family | calls, as it is | calls, with `runtime: standalone` | else |",
        "|---|---|---|---|",
    ]
    refused: Counter[str] = Counter()
    for name, one in found.items():
        if name in right:
            continue
        last = one["standalone"] if "standalone" in one else one["any"]
        refused.update(set(calls_of(last)))
        others = [reason for reason in last if not reason.startswith(CALLS)]
        others += [state for state in one.get("verified", []) if state != "ok"]
        cells = [", ".join(calls_of(one[way])) if way in one else "" for way in WAYS]
        lines.append(f"| {name} | {' | '.join(map(short, (*cells, '; '.join(others))))} |")
    lines += ["", *(f"- {reason} is called by {count}" for reason, count in refused.most_common())]
    return "\n".join(lines).rstrip()


def short(text: str) -> str:
    """Within a cell of a table."""
    plain = text.replace("aoti_torch_cpu_", "").replace("|", "\\|").replace("\n", " ")
    return plain if len(plain) < 200 else f"{plain[:200]}…"


if __name__ == "__main__":
    main()
