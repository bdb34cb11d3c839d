"""Models of libraries: built, verified and measured by `aotc bench`, a row each. A script: timings fail nothing.

    python tests/benchmarks/models.py                                     # on a CPU: bert, llm, t5 and vit
    python tests/benchmarks/models.py --device cuda                       # on a GPU: llm-2gb, and two of timm's, too
    python tests/benchmarks/models.py --model bert -- --contenders eager,aotc,aotc-file --starts 2
    python tests/benchmarks/models.py --manifest tests/models/tiny.yaml   # a quick try

`--regions MODEL=PATTERN` adds a row for the model with `regions: [PATTERN]`. A row's build seconds and megabytes are of
all buckets, its latency is of the first.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from bench_models import ROOT, measure, parser, print_report, temporary_store, write_json

MANIFESTS = {
    "cpu": {"bert": ["bert"], "llm": ["llm"], "t5": ["t5"], "vit": ["vit"]},
    "cuda": {
        "bert": ["bert"],
        "llm": ["llm-2gb"],
        "t5": ["t5"],
        "vit": ["vit"],
        "timm": ["convnext", "timm-vit"],
    },
}
"""For each device the files of manifests/, and the models of them that are measured if none are named."""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--manifest", type=Path, action="append", default=[], help="instead of those of manifests/")
    made.add_argument("--regions", action="append", default=[], metavar="MODEL=PATTERN")
    options = made.parse_args()
    regions = dict(text.partition("=")[::2] for text in options.regions or ["bert=encoder.layer.*"])
    with temporary_store(options) as folder:
        manifest = Path(folder) / "manifest.yaml"
        models = chosen_models(options.device, options.manifest, options.model, regions)
        manifest.write_text(json.dumps({"version": 1, "models": models}))  # JSON is YAML
        found = list(measure(manifest, models, options.store, options.jobs, options.bench))
    print_report(found)
    write_json(options, found)


def chosen_models(device: str, files: list[Path], wanted: list[str], regions: dict[str, str]) -> dict[str, object]:
    """The models to measure, each with its manifest's defaults applied, for this device."""
    import yaml

    default = {} if files else MANIFESTS[device]
    found: dict[str, object] = {}
    for file in files or [ROOT / "manifests" / f"{name}.yaml" for name in default]:
        if file.stem == "timm" and importlib.util.find_spec("timm") is None:
            continue
        document = yaml.safe_load(file.read_text())
        for name, own in document["models"].items():
            model = {**document.get("defaults", {}), **own, "targets": ["native" if device == "cpu" else device]}
            rows = {name: model}
            if pattern := regions.get(name):
                rows[f"{name}-by-regions"] = {**model, "regions": [pattern]}
            of_default = not wanted and name in default.get(file.stem, [name])
            found |= {row: each for row, each in rows.items() if of_default or row in wanted or name in wanted}
    return found


if __name__ == "__main__":
    main()
