"""`aotc audit` of a store whose artifacts were built without some of four patches: hits, false alarms, and misses.

    python tests/benchmarks/audit.py --count 50 --seed 0 --store STORE

Builds the models of `audit_models` into STORE, audits it, and calls each artifact with inputs for which the bugs show:
`audit_counts` says what the columns are. `others` are advisories of other patches, and of artifacts that have the
patch. The exit status is 1 where there are any, or an artifact is wrong of which the audit says nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # and not this folder, whose cuda.py torch takes for a package

from tests.benchmarks.audit_counts import COLUMNS, measured  # noqa: E402
from tests.benchmarks.audit_models import manifest  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", type=Path, required=True)
    options = parser.parse_args()
    options.store.mkdir(parents=True, exist_ok=True)
    written = options.store.parent / f"{options.store.name}.yaml"
    written.write_text(json.dumps(manifest(options.count, options.seed)))
    command = [sys.executable, "-m", "aotc", "build", written, "--store", options.store, "--jobs", "1", "--yes"]
    subprocess.run(command, cwd=ROOT, check=False)
    counts, others, unbuilt = measured(options.store, options.count, options.seed)
    lines = [f"| patch | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    lines += [f"| `{patch}` | {' | '.join(str(count[each]) for each in COLUMNS)} |" for patch, count in counts.items()]
    total: Counter[str] = sum(counts.values(), Counter())
    lines += [f"| all | {' | '.join(str(total[each]) for each in COLUMNS)} |"]
    sys.stdout.write("\n".join([*lines, f"others: {others}; not built: {' '.join(unbuilt) or 'none'}"]) + "\n")
    sys.exit(1 if total["missed"] or others else 0)


if __name__ == "__main__":
    main()
