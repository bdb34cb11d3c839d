"""Families of models of transformers: recorded, built, verified, loaded without their library, and equal to eager.

    python tests/benchmarks/families.py --capture --part 1/4 --work FOLDER # record, and compile nothing: some minutes
    python tests/benchmarks/families.py --record --part 1/8 --work FOLDER  # on a CPU, ten minutes on two quiet cores
    python tests/benchmarks/families.py --device cuda --jobs 8             # on a GPU, all of them
    python tests/benchmarks/families.py --model bert --model t5

The families of tests/zoo/families.yaml have random weights and sizes that compile in seconds. Of each:

- recorded: with `--record`, calls at the ends of the buckets become a manifest, by `aotc.record`, which checks it:
  `buckets` where it had to change them, `regions` where it compiles parts of the model, else `yes`. That one is built
- built: by `aotc build`; the seconds are the unit's own
- verified: by `aotc verify --seeds 1`, as passed of all sizes, with other weights too
- loaded: from a checkpoint of other weights, in a process that imports neither transformers nor a compiler
- equal: what the loaded code returns for new inputs is what eager returns but for rounding (`aotc.tensors.rounding`)

The table of the device in RESULTS.md is replaced, unless `--model` is given. `--work FOLDER` keeps the store there, and
what was found: with `--part I/N`, every N-th family from the I-th, the table has those of earlier parts, too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from own_caches import ROOT, environment

MANIFEST = ROOT / "tests" / "zoo" / "families.yaml"
RESULTS = Path(__file__).with_name("RESULTS.md")
Found = dict[str, dict[str, Any]]
"""By family."""
CHECKING = 720.0
"""Seconds for the check of what was recorded; regions are tried in the end of them."""


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        {"record": run_record, "eager": run_eager, "loaded": run_loaded}[sys.argv[2]](json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", action="append", default=[], help="only this family (may be given several times)")
    parser.add_argument("--jobs", type=int, default=2, help="families side by side")
    parser.add_argument("--record", action="store_true", help="build what aotc.record writes from calls")
    parser.add_argument("--capture", action="store_true", help="record, and compile nothing")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th family from the I-th")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep the store there, and use what it has")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aotc-families-") as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        kept = work / "found.json"
        found: Found = json.loads(kept.read_text()) if kept.exists() and options.part != "1/1" else {}
        for more in measure(work, options):
            found |= more
            kept.write_text(json.dumps(found))
    table = captured_table(found) if options.capture else table_of(found)
    print(table)
    if not options.model:
        write_down(table, "captured" if options.capture else options.device)


def measure(work: Path, options: argparse.Namespace) -> Iterator[Found]:
    """What is found of the part, after every step. What fails is in the family's `error`."""
    import yaml

    document = yaml.safe_load(MANIFEST.read_text())
    first, count = map(int, options.part.split("/"))
    names = list(options.model or document["models"])[first - 1 :: count]
    chosen = {name: document["models"][name] for name in names}
    found: Found = {name: {"class": own["factory"].rpartition(":")[2]} for name, own in chosen.items()}
    manifest = work / "families.json"  # JSON is YAML
    if options.record or options.capture:
        manifest.write_text(json.dumps({**document, "models": chosen}))
        task = {"manifest": str(manifest), "names": names, "work": str(work)}
        run(work, __file__, "--child", "record", json.dumps(task))
        for name, one in json.loads((work / "record.json").read_text()).items():
            found[name] |= one
        recorded = yaml.safe_load((work / "recorded.yaml").read_text())["models"]
        chosen = {name: recorded[name] for name in names if name in recorded}
    yield found
    if options.capture:
        return
    if options.device == "cuda":
        chosen = {name: {**own, "targets": ["cuda"]} for name, own in chosen.items()}
    manifest.write_text(json.dumps({**document, "models": chosen}))
    built = aotc(work, "build", manifest, "--store", work / "store", "--jobs", options.jobs, "--yes", "--json")
    for unit in built["units"]:
        error = unit["error"] and f"{unit['error']} ({unit['source']})"
        seconds = found[unit["model"]].get("seconds", 0.0) + unit["seconds"]
        found[unit["model"]] |= {"error": error} if error else {"seconds": seconds}
    yield found
    names = list(built["bundles"])

    def verify(name: str) -> None:
        reports = aotc(work, "verify", f"{work / 'store'}#{name}", "--seeds", 1, "--json")
        found[name]["verified"] = [report["status"] for report in reports]
        failed = [report["detail"] for report in reports if report["status"] != "ok"]
        found[name] |= {"error": failed[0]} if failed else {}

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(verify, names))
    yield found
    task = {"manifest": str(manifest), "names": names, "work": str(work), "device": options.device}
    for step in ("eager", "loaded"):
        run(work, __file__, "--child", step, json.dumps(task))
        for name, more in json.loads((work / f"{step}.json").read_text()).items():
            found[name] |= more
        yield found


def run(work: Path, *arguments: object) -> str:
    """What Python prints with these arguments, with caches of its own."""
    command = [sys.executable, *map(str, arguments)]
    caches = environment(work / "caches")
    return subprocess.run(command, cwd=ROOT, env=caches, stdout=subprocess.PIPE, text=True, check=False).stdout


def aotc(work: Path, *arguments: object) -> Any:
    """The JSON that a command of aotc prints, after what imported libraries may have printed."""
    printed = run(work, "-m", "aotc", *arguments)
    return json.loads(printed[min(printed.index(bracket) for bracket in "[{" if bracket in printed) :])


# -- the processes ----------------------------------------------------------------------------------------------------


def run_record(task: dict[str, Any]) -> None:
    """Call each family at the ends of its buckets; `aotc.record` writes one manifest of all, and checks it."""
    import torch

    import aotc
    from aotc.manifest import read_manifest
    from aotc.manifest.sizes import extreme_dims
    from aotc.models.auto_inputs import with_inputs
    from aotc.models.calls import arguments_of, signature_leaves
    from aotc.models.factory import build_module
    from aotc.models.signature import make_signature
    from aotc.tools.recording.check_written import check_written

    manifest, path = read_manifest(task["manifest"], task["names"]), Path(task["work"], "recorded.yaml")
    path.unlink(missing_ok=True)
    modules = {name: build_module(spec, manifest.folder) for name, spec in manifest.models.items()}
    found: Found = {name: {} for name in modules}
    with torch.no_grad(), aotc.record(path, modules, check=False):
        for name, module in modules.items():
            spec = with_inputs(manifest, manifest.models[name], module)
            signature = make_signature(spec, module)
            try:
                for bucket in spec.buckets:
                    for dims in extreme_dims(bucket, bucket):
                        leaves = signature_leaves(spec, signature, dims, "cpu", 0, manifest.folder)
                        args, kwargs = arguments_of(signature, leaves)
                        module(*args, **kwargs)
            except Exception as error:
                found[name]["error"] = f"eager: {type(error).__name__}: {error}"
    before, refused = read_manifest(path).models, Refused()
    logging.getLogger("aotc").addHandler(refused)
    known = [name for name, spec in before.items() if not spec.factory.startswith("my_models:")]
    check_written(path, {name: [] for name in known}, CHECKING)
    for name, spec in read_manifest(path).models.items():
        changed = "regions" if spec.regions else "buckets" if spec.buckets != before[name].buckets else "yes"
        if name in refused.problems:
            found[name] = {"error": f"capture: {refused.problems[name]}"}
        elif name in known and name in found:
            found[name]["recorded"] = changed
    Path(task["work"], "record.json").write_text(json.dumps(found))


class Refused(logging.Handler):
    """The problems of models that cannot be captured, from the warnings of `check_written`."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if match := re.search(r": (\S+) cannot be captured: (.+)", record.getMessage()):
            self.problems[match[1]] = match[2]


def run_eager(task: dict[str, Any]) -> None:
    """Write a checkpoint of other weights than the build's, the inputs of a call, and what eager returns for it."""
    import torch
    from safetensors.torch import save_model

    from aotc.manifest import read_manifest
    from aotc.models.auto_inputs import with_inputs
    from aotc.models.calls import arguments_of, signature_leaves
    from aotc.models.factory import build_module
    from aotc.models.signature import make_signature
    from aotc.records import tuned_dims
    from aotc.tensors.contents import contents

    manifest = read_manifest(task["manifest"], task["names"])
    found: Found = {}
    for name in task["names"]:
        try:
            module = build_module(manifest.models[name], manifest.folder).to(task["device"])
            spec = with_inputs(manifest, manifest.models[name], module)
            signature = make_signature(spec, module)
            dims = tuned_dims(spec.buckets[0])
            call = arguments_of(signature, signature_leaves(spec, signature, dims, task["device"], 7, manifest.folder))
            generator = torch.Generator(task["device"]).manual_seed(1)
            with torch.no_grad():
                for weight in module.parameters():
                    noise = torch.randn(weight.shape, generator=generator, device=weight.device)
                    weight.add_(noise.to(weight.dtype), alpha=0.02)
                result = contents(module(*call[0], **call[1]))
            save_model(module, str(Path(task["work"], f"{name}.safetensors")))
            tensors = [value for value in result.values() if isinstance(value, torch.Tensor)]
            torch.save((call, tensors), Path(task["work"], f"{name}.pt"))
        except Exception as error:
            found[name] = {"error": f"eager: {type(error).__name__}: {error}"}
    Path(task["work"], "eager.json").write_text(json.dumps(found))


def run_loaded(task: dict[str, Any]) -> None:
    """Load each family from the checkpoint, call it, and compare with what eager returned."""
    import torch

    from aotc import load
    from aotc.runtime.libraries.required_operators import COMPILERS
    from aotc.tensors.contents import contents
    from aotc.tensors.rounding import difference

    found: Found = {}
    for name in task["names"]:
        work = Path(task["work"])
        try:
            compiled = load(name, weights=work / f"{name}.safetensors", store=work / "store")
            (args, kwargs), expected = torch.load(work / f"{name}.pt", weights_only=True)
            with torch.no_grad():
                result = contents(compiled(*args, **kwargs))
            tensors = [value for value in result.values() if isinstance(value, torch.Tensor)]
            if imported := {*COMPILERS, "transformers"} & sys.modules.keys():
                raise ImportError(f"{', '.join(sorted(imported))} has been imported")
            same = len(tensors) == len(expected) and difference(expected, tensors) <= 1
            found[name] = {"loaded": True, "equal": same}
        except Exception as error:
            found[name] = {"error": f"load: {type(error).__name__}: {error}"}
    Path(task["work"], "loaded.json").write_text(json.dumps(found))


# -- the table --------------------------------------------------------------------------------------------------------


def table_of(found: Found) -> str:
    lines = ["| family | class | recorded | built | verified | loaded | equal |", "|---|---|---|---:|---|---|---|"]
    for name, one in found.items():
        statuses = one.get("verified", [])
        cells = [
            name,
            f"`{one['class']}`",
            one.get("recorded", "no" if "capture: " in one.get("error", "") else "–"),
            f"{one['seconds']:.0f} s" if "seconds" in one else "no",
            f"{statuses.count('ok')} of {len(statuses)}" if statuses else "–",
            "yes" if one.get("loaded") else "no",
            "yes" if one.get("equal") else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    whole = sum(bool(one.get("equal")) and set(one.get("verified", [])) == {"ok"} for one in found.values())
    failures = [f"- {name}: {one['error'].splitlines()[0][:300]}" for name, one in found.items() if one.get("error")]
    built = sum("seconds" in one for one in found.values())
    recorded = sum("recorded" in one for one in found.values())
    was = f"{recorded} were recorded, " if recorded else ""
    counts = f"Of {len(found)}, {was}{built} were built, and {whole} are right in all columns."
    return "\n".join([*lines, "", counts, "", *failures]).rstrip()


def captured_table(found: Found) -> str:
    """Those families that cannot be captured as they were called."""
    changed = {name: one for name, one in found.items() if one.get("recorded") in ("buckets", "regions")}
    lines = ["| family | class | written instead |", "|---|---|---|"]
    lines += [f"| {name} | `{one['class']}` | {one['recorded']} |" for name, one in changed.items()]
    whole = sum(one.get("recorded") == "yes" for one in found.values())
    failures = [f"- {name}: {one['error'].splitlines()[0][:300]}" for name, one in found.items() if one.get("error")]
    counts = (
        f"Of {len(found)} families, {whole} can be captured as they were called, {len(changed)} with what was written "
        f"instead, {len(failures)} not."
    )
    return "\n".join([counts, "", *lines, "", *failures]).rstrip()


def write_down(table: str, place: str) -> None:
    """Put the table between the marks of this place in RESULTS.md."""
    text = RESULTS.read_text()
    before, mark, rest = text.partition(f"<!-- families: {place} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not mark or not end:
        sys.exit(f"{RESULTS} has no place for the families of {place}")
    RESULTS.write_text(f"{before}{mark}\n{table}\n\n{end}{after}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.chdir(ROOT)
    main()
