"""What became of many small models that aotc was asked to build and to serve: machinery of op_db.py and
pytorch_tests.py.

    right      the compiled code gives what eager gives
    refused    an error of aotc with a hint: the way out
    nameless   another error
    wrong      another result than eager's, or the process died
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.benchmarks.own_caches import ROOT

Said = dict[str, list[str]]
"""By name, the outcome and why."""
COLUMNS = ("right", "refused", "nameless", "wrong", "unknown")
SECONDS = 600.0
"""For one name in a process of its own."""


def build(models: Mapping[str, Mapping[str, Any]], folder: Path, jobs: int) -> dict[str, str]:
    """Builds these models of a manifest into the folder's store. Returns the errors of those that were not built."""
    manifest = folder / "models.json"  # JSON is YAML
    manifest.write_text(json.dumps({"version": 1, "models": models}))
    command = [sys.executable, "-m", "aotc", "build", str(manifest), "--store", str(folder / "store"), "--yes"]
    ran = subprocess.run(
        [*command, "--jobs", str(jobs), "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_environment()
    )
    units = json.loads(ran.stdout[ran.stdout.index("{") :])["units"]
    return {unit["model"]: unit["error"] for unit in units if unit["status"] == "failed"}


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def kind_of(error: str) -> str:
    return "refused" if "hint: " in error else "nameless"


def in_processes(script: str, task: str, names: Sequence[Any], jobs: int, *given: str) -> Iterator[tuple[Any, Any]]:
    """What `script --child TASK GIVEN… NAMES` says of each name, by `say`.

    Another process goes on after the name at which one died, or stayed silent for `SECONDS`: of that name a text says
    so, in the place of what was to be said.
    """
    command = [sys.executable, script, "--child", task, *given]
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda part: list(_in_one(command, part)), [names[at::jobs] for at in range(jobs)]):
            yield from found


def _in_one(command: Sequence[str], names: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    left = collections.deque(names)
    while left:
        given = [*command, json.dumps(list(left))]
        with tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(
                given, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=_environment()
            ) as process:
                assert process.stdout is not None
                while (line := _next_line(process)) is not None:
                    yield left.popleft(), json.loads(line)
            if not left:
                return
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [""])[-1]
        yield left.popleft(), f"the process failed with status {process.returncode}: {last}"


_MARK = "outcome: "


def say(found: Any) -> None:
    """In a child: what is said of the next name."""
    print(f"\n{_MARK}{json.dumps(found)}", flush=True)


def _next_line(process: subprocess.Popen[str]) -> str | None:
    """The next thing that the child says; None where it ended, or had to be."""
    killer = threading.Timer(SECONDS, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith(_MARK))
        return next((line[len(_MARK) :] for line in lines), None)
    finally:
        killer.cancel()


def shown_table(said: Said) -> str:
    counts = collections.Counter(outcome for outcome, _ in said.values())
    tried = len(said) - counts["not tried"]
    lines = [f"| tried | {' | '.join(COLUMNS)} | not tried |", f"|{'---:|' * (len(COLUMNS) + 2)}"]
    lines.append(f"| {tried} | {' | '.join(str(counts[each]) for each in COLUMNS)} | {counts['not tried']} |")
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, (outcome, why) in sorted(said.items()):
        if outcome in COLUMNS[1:]:
            first = why.strip().splitlines()[0][:200] if why else ""
            reasons.setdefault((outcome, first), []).append(name)
    return "\n".join(
        [*lines, "", *(f"{outcome}: {', '.join(names)}: {why}" for (outcome, why), names in reasons.items())]
    )


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that `run` reads."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--jobs", type=int, default=2)
    made.add_argument("--folder", type=Path, help="where the models are built; by default it is removed")
    made.add_argument("--out", type=Path, help="where the outcomes are written")
    made.add_argument("--resume", type=Path, help="outcomes of another run, to which those that it lacks are added")
    made.add_argument("--table", type=Path, nargs="*", help="show the outcomes of other runs")
    return made


def run(asked: argparse.Namespace, outcomes: Callable[[Path, Said], Iterator[Said]]) -> int:
    """Shows and writes what `outcomes` finds in a folder, beside what is known: as far as it is known, whenever it
    yields. The exit status is 1 where something is wrong."""
    said: Said = {}
    if asked.table:
        said = {name: each for path in asked.table for name, each in json.loads(path.read_text()).items()}
    else:
        with ExitStack() as during:
            folder = asked.folder or Path(during.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(exist_ok=True)
            known = json.loads(asked.resume.read_text()) if asked.resume else {}
            known = {name: each for name, each in known.items() if each[0] not in ("unknown", "wrong")}
            for said in outcomes(folder.absolute(), known):
                if asked.out:
                    asked.out.write_text(json.dumps(said, indent=1))
    print(shown_table(said))
    return int(any(outcome == "wrong" for outcome, _ in said.values()))
