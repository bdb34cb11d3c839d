"""Find out which patches this torch needs: run each reproducer with its patch and without, in its own process.

python -m aotc.compiler.patches.machinery.check [NAME ...]                  # this torch
python -m aotc.compiler.patches.machinery.check --table PYTHON PYTHON ...   # of several interpreters, into README.md
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from aotc.compiler.patches.machinery.patch import Patch

SECONDS = 300
"""The time limit of a reproducer."""

OTHER_OPERATORS = 3
"""The exit status of a reproducer whose graph has none of the patch's `operators`, at none of its `dtypes`."""


class ReproducerRun(NamedTuple):
    """A patch's reproducer, without that patch or with it. `of_operators`: its graph is compared with the patch's
    `operators`, which a run without the patch says unless it ends its process."""

    name: str
    off: bool
    of_operators: bool = False


def outcomes(runs: Sequence[ReproducerRun], side_by_side: int = 2) -> dict[ReproducerRun, int]:
    """The exit status of each run, 0 where it passes. Runs are forked, since they may kill their process, after the
    compiler is imported."""

    from aotc.compiler.patches.machinery.apply import usable
    from aotc.compiler.patches.machinery.registry import PATCHES
    from aotc.compiler.toolchain.pattern_warmup import make_patterns

    usable([patch for patch in PATCHES if patch.is_for("cpu")], ())  # imports their targets
    make_patterns()
    _compile_something()
    found: dict[ReproducerRun, int] = {}
    waiting, running = list(runs), dict[int, tuple[ReproducerRun, float]]()
    while waiting or running:
        while waiting and len(running) < side_by_side:
            run = waiting.pop(0)
            if (child := os.fork()) == 0:
                _end_with(run)
            running[child] = run, time.monotonic() + SECONDS
        for child, (run, deadline) in list(running.items()):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                found[run] = status = os.waitstatus_to_exitcode(status)
                sys.stderr.write(f"{run.name} {'without' if run.off else 'with'} its patch: exit status {status}\n")
                del running[child]
        time.sleep(0.02)
    return found


def _compile_something() -> None:
    """Precompile the headers and probe the CPU's vector instructions before processes are forked.

    Nothing is run: OpenMP's threads do not survive a fork."""
    import torch
    from torch._inductor import config

    settings: Any = config
    settings.force_disable_caches, settings.compile_threads, settings.cpp.vec_isa_ok = True, 1, True
    graph = torch.fx.symbolic_trace(lambda x: x.sin() + 1)
    with torch.no_grad():
        torch._inductor.compile(graph, [torch.zeros(64)])


def _end_with(run: ReproducerRun) -> None:
    """Do a run in this process, and exit."""
    from aotc.compiler.patches.machinery.registry import PATCHES
    from aotc.compiler.patches.machinery.reproducing import Torch

    status = 1
    (patch,) = (patch for patch in PATCHES if patch.name == run.name)
    torch = Torch({run.name} if run.off else ())
    try:
        patch.reproduce(torch)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(OTHER_OPERATORS if run.of_operators and _has_others(patch, torch.operators) else status)


def _has_others(patch: Patch, operators: Mapping[str, set[str]]) -> bool:
    """Whether the patch's advisory is not of a unit with the operators of its own reproducer, where these are known."""
    from aotc.advisories import names_concerned
    from aotc.compiler.patches.machinery.pages import concern_of

    if not patch.advisory or not operators:
        return False
    found = {name: tuple(dtypes) for name, dtypes in operators.items()}
    return not any(names_concerned(concern_of(patch), found))


def verdicts(names: Sequence[str], without_only: bool = False) -> dict[str, str]:
    """The verdict on each patch, as in the README; with `without_only`, "fails" cannot be found."""
    from aotc.compiler.patches.machinery.registry import PATCHES

    applied = {patch.name for patch in PATCHES if patch.is_for("cpu")}
    runs = [ReproducerRun(name, True, True) for name in names]
    runs += [] if without_only else [ReproducerRun(name, False) for name in names if name in applied]
    found = outcomes(runs)
    found |= outcomes(
        [
            ReproducerRun(name, False, True)
            for name in names
            if found[ReproducerRun(name, True, True)] < 0 and name in applied
        ]
    )
    in_order = sorted(found, key=lambda run: not run.off)  # they end in any order
    statuses = {name: [found[run] for run in in_order if run.name == name] for name in names}
    return {name: _verdict(statuses[name], name in applied) for name in names}


def _verdict(statuses: Sequence[int], applied: bool) -> str:
    """By the exit statuses of the run without the patch, and of those with it."""
    without, *with_it = statuses
    if OTHER_OPERATORS in statuses:
        return "other operators"
    if not applied:
        return "right" if without == 0 else "wrong"
    if any(with_it):
        return "fails"
    return "not needed" if without == 0 else "needed"


def reproducible() -> list[str]:
    from aotc.compiler.patches.machinery.registry import PATCHES

    return [patch.name for patch in PATCHES if patch.reproduce]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="patches; all that have a reproducer")
    parser.add_argument("--without-only", action="store_true", help="run each reproducer only without its patch")
    parser.add_argument("--strict", action="store_true", help='exit with 1 unless all are "needed" or "right"')
    parser.add_argument("--table", nargs="+", metavar="PYTHON", help="interpreters with different versions of torch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aotc-patches-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        if options.table:
            _write_table(options.table)
            return
        import torch

        found = verdicts(options.names or reproducible(), options.without_only)
    sys.stdout.write(json.dumps({str(torch.__version__).partition("+")[0]: found}, indent=2) + "\n")
    if options.strict and (odd := {name: how for name, how in found.items() if how not in ("needed", "right")}):
        sys.exit(f'see "What each failure means" in NEW_TORCH.md: {odd}')


def _write_table(interpreters: Sequence[str]) -> None:
    from aotc.compiler.patches.machinery import pages

    found: dict[str, Mapping[str, str]] = {}
    for python in interpreters:
        ran = subprocess.run([python, "-m", __spec__.name], stdout=subprocess.PIPE, check=True)
        found |= json.loads(ran.stdout)
    pages.write(found)


if __name__ == "__main__":
    main()
