"""The scripts of `tests/remembering/scripts`, each run twice: which code ran, and what recording costs a call.

    python tests/benchmarks/user_scripts.py [--unbuilt] [nanogpt trainer …]

Of each: the calls of its second run, those of them that ran compiled code, and those that no code can run, as the test
of these scripts says; and of its first run the median, over its calls in eager, of a call's CPU time by that of the
module's own within it. With `--unbuilt` there is nothing but the last. One thread, in processes of their own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "remembering")]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    from test_scripts_of_users import ALWAYS, NIGHTLY, WITH_ANOTHER_TORCH, in_eager, named, run

    parser = argparse.ArgumentParser()
    parser.add_argument("--unbuilt", action="store_true")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    print("| script | calls | compiled | not compilable | a call of the first run, by eager's |")
    print("| --- | --- | --- | --- | --- |")
    for script in (*ALWAYS, *WITH_ANOTHER_TORCH, *NIGHTLY):
        if asked.names and named(script) not in asked.names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder, "store")
            first = run(script, "unbuilt" if asked.unbuilt else "exit", store, Path(folder))
            cost = f"{statistics.median(first['costs']):.2f}"
            shown = [""] * 3
            if not asked.unbuilt:
                forms = run(script, "never", store, Path(folder))["forms"]
                compiled = sum(form["compiled"] for form in forms)
                could_not = sum(form["eager"] for form in in_eager(script, forms)[0])
                calls = compiled + sum(form["eager"] for form in forms)
                shown = [str(calls), str(compiled), str(could_not)]
            print("|", " | ".join([named(script), *shown, cost]), "|", flush=True)


if __name__ == "__main__":
    main()
