"""Scripts as their users write them: each prints what eager prints, and its second run takes compiled code."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forked_python import run_forked
from processes import ROOT, finish, start

from aotc.verify.rank_processes import variables_of_ranks

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
RUNNER = HERE / "script_runner.py"

TIMES = re.compile(r"'\w*(?:runtime|per_second)': '?[\d.e-]+'?")
"""How long transformers' Trainer says that it took."""
NEEDS = re.compile(r"^(?:from|import) (transformers|diffusers|accelerate)\b", re.MULTILINE)


class Script(NamedTuple):
    """`eager`: what the reasons say of the forms that no code can run. `tolerance`: of a printed number, absolute."""

    name: str
    eager: tuple[str, ...] = ()
    tolerance: float = 1e-3
    ranks: int = 1
    variables: dict[str, str] = {}  # noqa: RUF012


ALWAYS = (
    Script("nanogpt.py"),
    Script("accumulation.py"),
    Script("checkpoints.py"),
    Script("ema_copies.py"),
    Script("schedulers.py"),
    Script("fused_steps.py"),
    Script("timm_training.py"),
    Script("web_handler.py"),
)
"""The first six train the same model, which is built once."""

WITH_ANOTHER_TORCH = (Script("counter.py"),)
"""A small model, in training and in evaluation: the whole way, with the second torch of CI."""

NIGHTLY = (
    Script("trainer.py", tolerance=2e-2, variables={"AOTC_TEST_BF16": "1"}),
    Script("accelerated.py", tolerance=2e-2),
    Script("ranks.py", ranks=2),
    Script("training.ipynb"),
    Script("sliding_windows.py", eager=("SlidingWindowLayer counts its tokens in a Python number",)),
    Script("mixed_precision.py", tolerance=2e-2),
    Script("graph_of_nodes.py"),
    Script("embeddings.py"),
    Script("trainer.py"),
    Script("generation.py"),
    Script("two_adapters.py", eager=("`generator` is Generator",)),
    Script("varying_float.py", eager=("no code takes it",)),
    Script("nightly_job.py"),
)
"""Those with large or several models or forms to build, or which import libraries."""


def named(script: Script) -> str:
    return "-".join((script.name.partition(".")[0], *script.variables))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all scripts: those that train the same model load what the first of them has built."""
    return tmp_path_factory.mktemp("scripts") / "store"


def run(script: Script, build: str, store: Path, folder: Path) -> dict[str, Any]:
    """What the script printed, as numbers, and which code ran, as `script_runner.py` tells it; of the first rank."""
    report = folder / f"{build}.json"
    path = SCRIPTS / script.name
    changes = {"AOTC_STORE": str(store), "AOTC_LOG": "info", **script.variables}
    if script.ranks > 1:
        with variables_of_ranks(script.ranks) as ranks:
            paths = [report.with_suffix(f".{number}") for number, _ in enumerate(ranks)]
            started = [
                start(RUNNER, path, build, to, cwd=folder, OMP_NUM_THREADS="1", **changes, **rank)
                for to, rank in zip(paths, ranks, strict=True)
            ]
            ran, *others = [finish(process) for process in started]
        assert not any(other.returncode for other in others), others[0].stderr
        report = paths[0]
    else:
        paths_of_python = os.pathsep.join((str(ROOT), str(HERE)))
        code = f"from script_runner import run\nrun({str(path)!r}, {build!r}, {str(report)!r})"
        ran = run_forked(code, cwd=folder, PYTHONPATH=paths_of_python, **changes)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = TIMES.sub("", ran.stdout)
    numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", said)]
    return json.loads(report.read_text()) | {"numbers": numbers, "log": ran.stderr}


def in_eager(script: Script, forms: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The forms with calls in eager: those that no code can run, and the others."""
    ran = [form for form in forms if form["eager"]]
    known = [form for form in ran if any(reason in form["reason"] for reason in script.eager)]
    return known, [form for form in ran if form not in known]


@pytest.mark.compile
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=named(script), marks=marks)
        for scripts, marks in (
            (ALWAYS, ()),
            (WITH_ANOTHER_TORCH, pytest.mark.every_torch(alone=True)),
            (NIGHTLY, pytest.mark.nightly),
        )
        for script in scripts
    ],
)
def test_a_script_s_second_run_is_compiled(script: Script, store: Path, tmp_path: Path) -> None:
    for library in NEEDS.findall((SCRIPTS / script.name).read_text()):
        pytest.importorskip(library)
    eager, first, second = (run(script, build, store, tmp_path) for build in ("off", "exit", "never"))
    assert eager["numbers"] and eager["forms"] == []
    for ran in (first, second):
        assert ran["numbers"] == pytest.approx(eager["numbers"], abs=script.tolerance)
    known, other = in_eager(script, second["forms"])
    assert all(any(reason in form["reason"] for form in known) for reason in script.eager)
    assert all(form["reason"] for form in [*known, *other])
    compiled = sum(form["compiled"] for form in second["forms"])
    could_be = sum(form["eager"] for form in other)
    assert compiled >= 0.95 * (compiled + could_be), (other, second["log"])
    assert compiled or script.eager
