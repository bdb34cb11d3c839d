"""What can go wrong in a build: every failure names its place and what to change, and loses no other unit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import pytest
import torch
import yaml
from doctoring import artifact_of, copy_store, library_bytes
from in_process import run_here
from processes import ZOO, run_aotc

from aotc.compiler.executors import host
from aotc.compiler.explain_failure import explain_failure, hint_for
from aotc.compiler.pipeline import UnitBuild
from aotc.compiler.planning.cache_lookup import PlannedUnit
from aotc.compiler.workers.process_failure import begin_log, statically_linked_libstdcxx
from aotc.compiler.workers.process_group import Processes
from aotc.compiler.workers.unit_process import check_compilable
from aotc.errors import BuildError, StoreError
from aotc.store.layout.store import Store
from aotc.store.layout.units import each_unit, units_folder

LINEAR = {
    "factory": "models.py:Linear",
    "inputs": {"x": {"shape": ["batch", 8]}},
    "buckets": [{"batch": 2}, {"batch": 4}],
}
X: dict[str, Any] = {"inputs": {"x": {"shape": [2, 8]}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    shutil.copy(ZOO / "models.py", path)
    return path


def write_manifest(folder: Path, **models: Any) -> Path:
    path = folder / "manifest.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "models": models}, sort_keys=False))
    return path


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


# -- a unit fails: many of them in one build --------------------------------------------------------------------------

KEEPS = """
import torch
from torch import nn


class Held:
    def __init__(self):
        self.keys = torch.zeros(4, 8)


class Keeps(nn.Module):
    def __init__(self, attribute):
        super().__init__()
        self.attribute, self.held = attribute, Held()
        self.sums, self.offset = torch.zeros(8), torch.ones(8)

    def forward(self, x):
        total = self.offset.clone()
        total += torch.tensor(1.0).add_(2)
        if self.attribute == "tensor":
            self.sums += x.sum(0)
        elif self.attribute == "object":
            self.held.keys[1:].select(0, 0).copy_(x[0])
        return x + self.sums + self.held.keys.sum(0) + total
"""


UNCOMPILED = """
import torch
from torch import nn

class Rows(nn.Module):
    def forward(self, x):
        return x.to_sparse_csr()

class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.eye(2).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.edges, x)

class Ragged(nn.Module):
    def forward(self, x):
        return torch.nested.as_nested_tensor([x[0], x[1, :2]])

class Jagged(nn.Module):
    def forward(self, x):
        return torch.nested.as_nested_tensor([x[0], x[1, :2]], layout=torch.jagged)
"""


REMEMBERS = """
from torch import nn


class Cache:
    keys = None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.cache = nn.Linear(8, 8), Cache()

    def forward(self, x):
        y = self.linear(x if self.cache.keys is None else x + self.cache.keys)
        self.cache.keys = y
        return y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""


GROWS = """
import torch
from torch import nn


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 8))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x])
        return self.seen.sum(0)
"""


COUNTS = """
import torch
from torch import nn


class Counts(nn.Module):
    def __init__(self, attribute):
        super().__init__()
        self.register_buffer("steps", torch.zeros(8))
        self.attribute = attribute

    def forward(self, x):
        if self.attribute == "assigned":
            self.steps = self.steps + 1
        else:
            self.steps.add_(1)
        return x + self.steps
"""


FACTORED = """
import torch

class Factored(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.cholesky(x) + 1
"""


LOOPS = """
import torch
from torch._higher_order_ops.while_loop import while_loop_stack_output_op

class Loops(torch.nn.Module):
    def forward(self, x):
        n = x.argmax()
        return while_loop_stack_output_op(lambda n, x: n > 0, lambda n, x: (n - 1, x * 2), (n, x), ())
"""


KILLED = """
import os, signal, sys, __main__
import torch

def process():
    return getattr(__main__.__spec__, "name", "")

def killed():
    if process() == "aotc.compiler.workers.compile_worker":
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.ReLU()

def left():
    if process() == "aotc.compiler.workers.compile_worker":
        print("a last word", flush=True)
        os._exit(3)
    return torch.nn.ReLU()

def refused():
    if process() == "aotc.compiler.workers.compile_worker":
        raise OSError(28, "No space left on device")
    return torch.nn.ReLU()
"""

NUMBERED = """
import itertools
from torch import nn

class Numbered(nn.Module):
    def __init__(self):
        super().__init__()
        self.numbers = itertools.count()

    def forward(self, x):
        return x + next(self.numbers)
"""

LONG = "batch" * 60
INPUT = {"inputs": {"input": {"shape": [2, 8]}}}
REMEMBERING = {"factory": "remembers.py:Model", **X}
SPARSE = "hint: Inductor does not support sparse parameters and buffers"
NESTED = "hint: nested tensors cannot be captured: pad the sequences"
HINTS = {"rows": SPARSE, "graph": SPARSE, "ragged": NESTED, "jagged": NESTED}
MODELS: dict[str, Any] = {
    "branching": {"factory": "models.py:Branching", **X},
    **{name: {"factory": f"uncompiled:{name.title()}", "mode": "default", **X} for name in HINTS},
    **{
        f"keeps-{name}": {"factory": "keeps.py:Keeps", "kwargs": {"attribute": name}, **X}
        for name in ("tensor", "object")
    },
    "keeps-nothing": {"factory": "keeps.py:Keeps", "kwargs": {"attribute": ""}, **X},
    "whole": REMEMBERING,
    "parts": {**REMEMBERING, "regions": ["blocks.*"]},
    "numbered": {"factory": "numbered.py:Numbered", **X},
    "grows": {"factory": "grows.py:Grows", "inputs": {"x": {"shape": [1, 8]}}},
    **{
        name: {"factory": "counts.py:Counts", "kwargs": {"attribute": name}, "weights": "frozen", **X}
        for name in ("assigned", "added")
    },
    "factored": {"factory": "factored.py:Factored", "inputs": {"x": {"shape": [4, 4]}}},
    "loops": {"factory": "loops.py:Loops", "mode": "default", **X},
    **{name: {"factory": f"dying.py:{name}", **INPUT} for name in ("killed", "left", "refused")},
    "long": {
        "factory": "dying.py:left",
        "inputs": {"input": {"shape": [LONG, 8]}},
        "buckets": [{LONG: 2}, {LONG: 4}],
    },
}
CODE = {
    "keeps": KEEPS,
    "uncompiled": UNCOMPILED,
    "remembers": REMEMBERS,
    "numbered": NUMBERED,
    "grows": GROWS,
    "counts": COUNTS,
    "factored": FACTORED,
    "loops": LOOPS,
    "dying": KILLED,
}


class Failures(NamedTuple):
    """The folder of one build of all these models, and what it printed."""

    folder: Path
    stdout: str
    stderr: str

    def of(self, model: str) -> list[str]:
        """What is said of each of the model's failed units."""
        return [said for said in self.stderr.split("\nfailed: ")[1:] if said.startswith(f"{model} ")]

    def said_of(self, model: str) -> str:
        (said,) = self.of(model)
        return said

    def line(self, module: str, text: str) -> str:
        return f"at {module}.py:{line_of(self.folder / f'{module}.py', text)} in forward"


def log_in(said: str) -> Path:
    return Path(said.partition("  log: ")[2].splitlines()[0])


@pytest.fixture(scope="module")
def failures(shared_folder: Path) -> Failures:
    folder = shared_folder / "failures"
    with filelock.FileLock(shared_folder / "failures.lock"):
        if not (folder / "said.json").exists():
            folder.mkdir()
            shutil.copy(ZOO / "models.py", folder)
            for name, text in CODE.items():
                (folder / f"{name}.py").write_text(text)
            more = ("--store", folder / "store", "--trace", folder / "trace.json")
            ran = run_here("build", write_manifest(folder, **MODELS), *more, cwd=folder)
            assert ran.returncode == 1, ran.stderr
            (folder / "said.json").write_text(json.dumps([ran.stdout, ran.stderr]))
    return Failures(folder, *json.loads((folder / "said.json").read_text()))


def test_what_did_not_fail_is_published(failures: Failures) -> None:
    rows = [line.split() for line in failures.stdout.splitlines()[1 : 1 + len(MODELS)]]  # notes on units follow
    assert {row[0]: row[-1] for row in rows} == {**dict.fromkeys(MODELS, "failed"), "keeps-nothing": "built"}
    assert [str(entry) for entry in Store.open(failures.folder / "store").tags()] == ["keeps-nothing:latest"]


def test_a_branch_on_data_fails_with_its_line(failures: Failures) -> None:
    said = failures.said_of("branching")
    assert f"{failures.line('models', 'if x.sum() > 0:')}: if x.sum() > 0:" in said
    assert "hint: a branch or a size depends on a tensor's value: use torch.where" in said
    log = log_in(said)
    assert log.is_relative_to(failures.folder / "store")
    assert "GuardOnDataDependentSymNode" in log.read_text()


@pytest.mark.parametrize("model", HINTS)
def test_what_is_sparse_or_nested_and_not_compiled_fails_with_what_to_do(failures: Failures, model: str) -> None:
    assert HINTS[model] in failures.said_of(model)


@pytest.mark.parametrize(
    ("model", "line", "what"),
    [
        ("keeps-tensor", "self.sums +=", "`sums`, a tensor of shape [8]"),
        ("keeps-object", "self.held.keys[1:]", "a tensor of shape [8]"),
    ],
)
def test_a_tensor_that_is_kept_but_no_buffer_is_not_written_to_in_silence(
    failures: Failures, model: str, line: str, what: str
) -> None:
    """What forward writes to its own temporaries, and to copies of what is kept, is not a matter: `keeps-nothing`."""
    _, where, message, hint, *_ = failures.said_of(model).splitlines()
    assert failures.line("keeps", line) in where
    assert message.startswith(f"  forward writes to {what} that is kept from call to call")
    assert hint.startswith("  hint: make it a buffer, also where another object holds it")


@pytest.mark.parametrize("model", ["whole", "parts"])
def test_what_forward_keeps_in_an_object_is_not_forgotten_in_silence(failures: Failures, model: str) -> None:
    """Of a region, too, which is captured when the whole model has been run."""
    said = failures.said_of(model)
    assert f"{failures.line('remembers', 'self.cache.keys = y')}: self.cache.keys = y" in said
    assert "  forward keeps a value for its next call in `" in said and "cache.keys`, which is not a buffer" in said


def test_an_iterator_s_items_are_not_compiled_in_in_silence(failures: Failures) -> None:
    _, where, message, hint, *_ = failures.said_of("numbered").splitlines()
    assert f"{failures.line('numbered', 'next(self.numbers)')}: return x + next(self.numbers)" in where
    assert message.startswith("  forward reads what changes from call to call outside of its inputs")
    assert "let forward take a time, a counter, or what an iterator or a file gives as an input" in hint


def test_a_buffer_that_grows_is_not_compiled_as_one_that_does_not(failures: Failures) -> None:
    """One row can be written to a buffer of no rows: then nothing is."""
    said = failures.said_of("grows")
    assert failures.line("grows", "torch.cat") in said
    assert "assigns a tensor of float32 [1, 8] to the buffer `seen` of float32 [0, 8]" in said


@pytest.mark.parametrize(
    ("model", "line"), [("assigned", "self.steps = self.steps + 1"), ("added", "self.steps.add_(1)")]
)
def test_frozen_weights_that_forward_writes_to_are_refused_with_its_line(
    failures: Failures, model: str, line: str
) -> None:
    _, where, message, hint, *_ = failures.said_of(model).splitlines()
    assert failures.line("counts", line) in where
    assert message == "  the model writes to its own buffer `steps`; frozen weights cannot"
    assert hint == "  hint: use `weights: live` for this model"


def test_what_only_values_tell_fails_before_anything_is_compiled_with_eager_s_words(failures: Failures) -> None:
    said = failures.said_of("factored")
    assert "the model itself fails when it is called with its inputs (x): _LinAlgError: linalg.cholesky: " in said
    assert "factored.py:6 in forward" in said
    events = json.loads((failures.folder / "trace.json").read_text())["traceEvents"]
    stages = {event["name"] for event in events if event.get("args", {}).get("unit", "").startswith("factored ")}
    assert "export" in stages and "compile" not in stages
    assert "wait for a turn: --jobs" in {event["name"] for event in events}  # of more units than run at a time


def test_an_operator_that_aotinductor_lacks_fails_with_its_line_and_a_way_out(failures: Failures) -> None:
    _, where, message, hint, *_ = failures.said_of("loops").splitlines()
    assert failures.line("loops", "return while_loop_stack_output_op") in where
    assert message == "  compile: AOTInductor has no code for the operator `while_loop_stack_output`"
    assert "--suggest-regions" in hint


def test_an_assertion_of_torch_s_compiler_is_told_with_its_line_and_a_way_out() -> None:
    from torch._inductor.utils import sympy_dot

    with pytest.raises(AssertionError) as raised:
        sympy_dot([], [1])
    failure = explain_failure(raised.value, "compile")
    assert re.fullmatch(
        r"compile: AssertionError: `assert len\(seq1\) == len\(seq2\)` of torch/_inductor/utils\.py:\d+",
        failure.message,
    )
    assert "--suggest-regions" in failure.hint
    assert explain_failure(AssertionError(), "compile").hint == ""


def test_a_worker_that_dies_is_a_failed_unit(failures: Failures) -> None:
    killed, left, refused = map(failures.said_of, ("killed", "left", "refused"))
    assert "was killed by SIGKILL during: model" in killed
    assert "out-of-memory killer" in killed
    assert "ended with status 3 during: model" in left
    assert "a last word" in log_in(left).read_text()
    assert "No space left on device" in refused
    assert "hint: free the disk, or set TMPDIR" in refused


def test_units_with_names_longer_than_a_file_s_have_logs_of_their_own(failures: Failures) -> None:
    logs = list(map(log_in, failures.of("long")))
    assert len({*logs}) == 2 and all("a last word" in log.read_text() for log in logs)
    assert all(log.name.startswith("long_batchbatch") for log in logs)


# -- other ways to fail -----------------------------------------------------------------------------------------------


def test_a_trace_that_cannot_be_written_is_said_before_anything_is_compiled(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    manifest = write_manifest(folder, linear=LINEAR)
    ran = run_here("build", manifest, "--store", tmp_path / "store", "--trace", tmp_path / "file" / "trace.json")
    assert ran.returncode == 2
    assert str(tmp_path / "file") in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not list((tmp_path / "store").glob("blobs/sha256/*"))


EDITED = """
from pathlib import Path
import torch
import helper

class Edited(torch.nn.Module):
    def forward(self, x):
        Path(helper.__file__).write_text("SCALE = 3.0")
        return x * helper.SCALE
"""


def test_a_file_that_changes_while_its_unit_compiles_is_a_failed_unit_and_the_next_build_has_it(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "helper.py").write_text("SCALE = 2.0")
    (folder / "edited.py").write_text(EDITED)
    manifest = write_manifest(folder, edited={"factory": "edited.py:Edited", "mode": "default", **X})
    build = ("build", manifest, "--store", tmp_path / "store")
    ran = run_here(*build)
    assert ran.returncode == 1
    assert "the source of `helper` changed while the build ran" in ran.stderr and "hint: build again" in ran.stderr
    ran = run_here(*build)
    assert ran.returncode == 0 and ran.stdout.splitlines()[1].split()[-1] == "built"


@pytest.mark.parametrize("name", ["with'quote", "with,comma", 'with"quotes', "with\\backslash"])
def test_a_folder_that_compilers_cannot_be_told_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="its path has"):
        check_compilable(tmp_path / name)


def test_temporary_files_in_a_folder_that_compilers_cannot_be_told_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "with space").mkdir()
    manifest = write_manifest(folder, linear={**LINEAR, "buckets": [{"batch": 2}]})
    ran = run_aotc("build", manifest, "--store", tmp_path / "store", TMPDIR=str(tmp_path / "with space"))
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert f"nothing can be compiled in the folder for temporary files, {tmp_path / 'with space'}" in ran.stderr
    assert "hint: set TMPDIR to a folder whose path has no spaces" in ran.stderr


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("compiler_version", lambda: "g++: cannot be run", "cannot be run, and every unit needs it"),
        ("_free", lambda place: 1 << 20, "has 1.0 MiB free, and the build needs about 32.0 MiB there"),
    ],
)
def test_what_every_unit_needs_is_looked_at_once_before_the_first_is_compiled(
    name: str, value: Any, told: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, name, value)
    ran = run_here("build", write_manifest(folder, linear=LINEAR), "--store", tmp_path / "store")
    assert ran.returncode == 2 and ran.stderr.count(told) == 1, ran.stderr
    assert "failed: " not in ran.stderr and "batch=2" not in ran.stdout


def test_a_log_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(StoreError, match=r"cannot write .*unit\.log"):
        begin_log(tmp_path / "logs" / "unit.log")
    with (
        pytest.raises(StoreError, match=r"cannot write .*unit\.log"),
        Processes({}).start("aotc.nothing", "", {}, tmp_path / "logs" / "unit.log"),
    ):
        pass


CRASH = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
__attribute__((constructor)) static void crash_where_it_is_tried(void) {
    char command[4096] = {0};
    FILE *file = fopen("/proc/self/cmdline", "r");
    size_t count = fread(command, 1, sizeof command - 1, file);
    fclose(file);
    for (size_t i = 0; i < count; i++)
        if (!command[i]) command[i] = ' ';
    if (strstr(command, "aotc.compiler.smoke.smoke_run")) abort();
}
"""
COMPILER = """#!/bin/sh
for argument in "$@"; do
    case "$argument" in
        -shared) exec {compiler} "$@" -x none {crash} ;;
    esac
done
exec {compiler} "$@"
"""


def compiled_by(script: str, folder: Path) -> dict[str, str]:
    """The environment in which this is g++."""
    compiler = folder / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(script)
    compiler.chmod(0o755)
    return {"PATH": f"{compiler.parent}:{os.environ['PATH']}", **({"CXX": "g++"} if "CXX" in os.environ else {})}


def test_a_library_that_crashes_on_load_is_a_build_error_and_is_not_published(folder: Path, tmp_path: Path) -> None:
    source, crash = tmp_path / "crash.c", tmp_path / "crash.o"
    source.write_text(CRASH)
    assert os.spawnlp(os.P_WAIT, "gcc", "gcc", "-fPIC", "-c", str(source), "-o", str(crash)) == 0
    script = COMPILER.format(compiler=shutil.which("g++"), crash=crash)
    manifest = write_manifest(folder, linear={**LINEAR, "buckets": [{"batch": 2}], "mode": "default"})
    ran = run_here("build", manifest, "--store", tmp_path / "store", "--json", **compiled_by(script, tmp_path))
    assert ran.returncode == 1, ran.stdout + ran.stderr
    (unit,) = json.loads(ran.stdout)["units"]
    assert unit["status"] == "failed"
    assert f"runs the result once was killed by {signal.Signals.SIGABRT.name}" in unit["error"]
    assert "hint: a library of one operator crashes, too: set CXX to another compiler" in unit["error"]
    assert "the library crashes when it is loaded or run; it was not published" in unit["error"]
    store = Store.open(tmp_path / "store")
    assert store.tags() == []
    assert list((store.path / ".aotc" / "units").glob("*.json")) == []


def test_a_compiler_that_links_libstdcxx_statically_does_no_harm(folder: Path, tmp_path: Path) -> None:
    """The library keeps its copy to itself: exported, it would take the place of torch's, and crash."""
    script = f'#!/bin/sh\nexec {shutil.which("g++")} -static-libstdc++ "$@"\n'
    manifest = write_manifest(folder, linear={**LINEAR, "buckets": [{"batch": 2}], "mode": "default"})
    ran = run_here("build", manifest, "--store", tmp_path / "store", **compiled_by(script, tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    store = Store.open(tmp_path / "store")
    (variant,) = artifact_of(store, "linear").variants
    assert b"libstdc++.so" not in library_bytes(store, variant)


def test_a_library_with_its_own_libstdcxx_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.so").write_bytes(b"\x7fELF libstdc++.so.6 libc.so.6")
    assert statically_linked_libstdcxx(tmp_path) == ""
    monkeypatch.setenv("CXX", "odd-c++")
    (tmp_path / "model.so").write_bytes(b"\x7fELF libc.so.6")
    hint = statically_linked_libstdcxx(tmp_path)
    assert "(odd-c++) linked libstdc++ statically" in hint and "CXX=g++" in hint


def test_a_missing_compiler_is_named(folder: Path, tmp_path: Path) -> None:
    manifest = write_manifest(folder, linear={**LINEAR, "buckets": [{"batch": 2}]})
    ran = run_aotc("build", manifest, "--store", tmp_path / "store", CXX="no-such-compiler")
    assert ran.returncode == 2
    assert "no-such-compiler" in ran.stderr and "install g++, or name another compiler by CXX" in ran.stderr


# -- nothing can be built ---------------------------------------------------------------------------------------------


def test_all_that_factories_do_wrong_is_said_at_once_before_anything_is_compiled(folder: Path, tmp_path: Path) -> None:
    (folder / "broken.py").write_text("def raises():\n    raise RuntimeError('no weights here')\n")
    manifest = write_manifest(
        folder,
        raises={"factory": "broken.py:raises", **X},
        missing={"factory": "broken.py:rasies", **X},
        nowhere={"factory": "nowhere.models:Model", **X},
        linear=LINEAR,
        other={"factory": "models.py:Linear", "inputs": {"y": {"shape": [2, 8]}}},
    )
    ran = run_here("build", manifest, "--store", tmp_path / "store")
    assert ran.returncode == 2
    where = {name: f"{manifest}:{line_of(manifest, name)}" for name in ("broken.py:raises", "broken.py:rasies")}
    assert f"{where['broken.py:raises']}: `broken.py:raises` raised RuntimeError: no weights here" in ran.stderr
    assert "broken.py:2)" in ran.stderr
    assert f"{where['broken.py:rasies']}: `broken` has no `rasies`" in ran.stderr
    assert "did you mean `raises`?" in ran.stderr
    assert f"{manifest}:{line_of(manifest, 'nowhere.models')}: `nowhere.models:Model` cannot be imported" in ran.stderr
    assert f"{manifest}:{line_of(manifest, '      y:')}: Linear.forward takes no input `y`" in ran.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "command", [["build", "manifest.yaml"], ["fetch", "s3://bucket/store#m"], ["merge", "one", "--into", "two"]]
)
def test_a_tag_that_cannot_be_published_is_refused_before_anything_is_done(tmp_path: Path, command: list[str]) -> None:
    ran = run_here(*command, "--tag", "model:v2", cwd=tmp_path)
    assert ran.returncode == 2
    assert "'model:v2' is not a tag name: it contains ':'" in ran.stderr


def test_a_check_of_what_was_not_built_says_so_and_force_does_not_hide_what_was(
    zoo_store: Path, folder: Path, tmp_path: Path
) -> None:
    store = copy_store(zoo_store, tmp_path)
    manifest = write_manifest(folder, linear={**LINEAR, "buckets": [{"batch": 2}, {"batch": 7}]})
    ran = run_here("build", manifest, "--store", store.path, "--check", "--force")
    assert ran.returncode == 1, ran.stderr
    assert "linear batch=2 " in ran.stdout and ": the same, byte for byte" in ran.stdout
    assert "    the store does not hold this unit; build it first, or check it with the --picks " in ran.stdout


def test_an_unknown_inductor_option_is_refused_with_the_nearest_one(folder: Path, tmp_path: Path) -> None:
    options = {
        "options": {"max_fusion_sise": 8, "simdlen": 256, "freezing": True},
        "patches": {"serial_small_loop": False},
    }
    manifest = write_manifest(folder, linear={**LINEAR, **options})
    ran = run_here("build", manifest, "--store", tmp_path / "store")
    assert ran.returncode == 2
    where = f"{manifest}:{line_of(manifest, 'max_fusion_sise')}"
    assert f"{where}: Inductor has no option `max_fusion_sise`\n    hint: did you mean `max_fusion_size`?" in ran.stderr
    assert "`simdlen`\n    hint: did you mean `cpp.simdlen`?" in ran.stderr
    assert "the option `freezing` is set by aotc\n    hint: write `weights: frozen`" in ran.stderr
    assert "no patch `serial_small_loop` of torch\n    hint: did you mean `serial_small_loops`?" in ran.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.skipif(bool(torch.version.cuda), reason="torch's CUDA build builds for a GPU that is not here")
def test_a_target_that_this_machine_cannot_build_is_refused(folder: Path, tmp_path: Path) -> None:
    manifest = write_manifest(folder, linear={**LINEAR, "targets": ["native", "cuda:sm_90"]})
    ran = run_here("build", manifest, "--store", tmp_path / "store")
    assert ran.returncode == 2
    assert "error: linear: a target cannot be built on this machine" in ran.stderr
    where = f"{manifest}:{line_of(manifest, 'cuda:sm_90')}"
    built_without = f"the target is cuda:sm_90, and torch here ({torch.__version__}) is built without CUDA"
    assert f"{where}: `cuda:sm_90`: {built_without}\n    hint: install torch's CUDA build" in ran.stderr
    assert f"run `aotc build {manifest} --target native`" in ran.stderr
    assert not (tmp_path / "store").exists()


def test_frozen_weights_are_built_on_the_cpu_that_they_are_for(folder: Path, tmp_path: Path) -> None:
    manifest = write_manifest(
        folder,
        linear={**LINEAR, "weights": "frozen", "targets": ["cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:amx"]},
    )
    ran = run_here("build", manifest, "--store", tmp_path / "store", "--dry-run")
    assert ran.returncode == 2
    assert "oneDNN packs frozen weights for this machine's" in ran.stderr
    assert "use `weights: live`" in ran.stderr


def test_a_manifest_that_is_not_there_is_no_traceback(tmp_path: Path) -> None:
    ran = run_here("build", tmp_path / "none.yaml", "--store", tmp_path / "store")
    assert ran.returncode == 2
    assert "there is no such file" in ran.stderr and "Traceback" not in ran.stderr


def test_a_store_that_cannot_be_looked_at_is_no_traceback(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / ("n" * 300)
    ran = run_here("build", write_manifest(folder, linear=LINEAR), "--store", store)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"error: cannot look at {store / 'oci-layout'}: File name too long")


def test_a_store_that_is_a_file_is_refused(zoo_store: Path, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a store")
    ran = run_here("build", ZOO / "manifest.yaml", "--store", tmp_path / "store", "--model", "linear")
    assert ran.returncode == 2
    assert "store" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize("there", ["nothing", "a file", "a link", "a link to nothing", "a pipe"])
def test_a_log_is_written_to_no_file_but_its_own(tmp_path: Path, there: str) -> None:
    log, victim = tmp_path / "unit.log", tmp_path / "victim"
    victim.write_text("his own")
    if there == "a file":
        log.write_text("of an earlier build")
    elif there == "a pipe":
        os.mkfifo(log)
    elif there != "nothing":
        log.symlink_to(victim if there == "a link" else tmp_path / "made")
    begin_log(log)
    assert log.read_bytes() == b"" and not log.is_symlink()
    assert victim.read_text() == "his own" and not (tmp_path / "made").exists()


def test_a_folder_where_a_log_should_be_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "unit.log").mkdir()
    with pytest.raises(StoreError, match=r"unit\.log: Is a directory"):
        begin_log(tmp_path / "unit.log")


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("RuntimeError: dims is not a valid permutation", ""),
        ("an unspecialized NN module", ""),
        ("the buffer `cache` was mutated", "write the change as a new tensor"),
        ("a view of a leaf is used in an in-place operation", "write the change as a new tensor"),
        ("OSError: /tmp/cache/abc.main.so: failed to map segment from shared object", "TMPDIR is mounted noexec"),
        ("you marked rows as dynamic but your code specialized it to be a constant (4)", "narrow the range"),
        ("InductorError: CantSplit: 4*(((s0 + 127)//128)) not divisible by 8", "list fixed buckets"),
    ],
)
def test_a_hint_is_of_the_words_in_a_message_not_of_letters_within_them(said: str, hint: str) -> None:
    assert hint in hint_for(said) and bool(hint) == bool(hint_for(said))


def test_a_tag_stays_on_its_bundle_where_a_unit_of_the_new_one_fails(
    zoo_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What services load by the tag goes on having all its buckets; --partial publishes what there is."""

    def refused(build: UnitBuild, plan: PlannedUnit, log: Path) -> Any:
        raise BuildError(f"{plan.unit.name} is refused")

    store = copy_store(zoo_store, tmp_path)
    (before,) = [entry.digest for entry in store.tags() if entry.model == "linear"]
    one, *others = (unit for unit in each_unit(store) if unit.artifact.model == "linear")
    (units_folder(store) / f"{one.key.removeprefix('sha256:')}.json").unlink()
    monkeypatch.setattr(UnitBuild, "_compile", refused)
    command = ("build", ZOO / "manifest.yaml", "--model", "linear", "--store", store.path)
    ran = run_here(*command)
    assert ran.returncode == 1 and "is refused" in ran.stderr and "published " not in ran.stdout
    total = 1 + len(others)
    kept = f"not published: linear: 1 of {total} units failed; linear:latest still names {before}"
    assert kept in ran.stderr and "--partial publishes what there is" in ran.stderr
    assert [entry.digest for entry in store.tags() if entry.model == "linear"] == [before]
    ran = run_here(*command, "--partial")
    assert ran.returncode == 1
    (now,) = [entry.digest for entry in store.tags() if entry.model == "linear"]
    assert now != before
    assert f"#linear:latest  {now}  (only {len(others)} of {total} units)  (was {before})" in ran.stdout


class InductorError(RuntimeError):
    """As torch's of this name."""


DUMP = """

  target: aten.convolution.default
  args[0]: TensorBox(
    View(
      PermuteView(data=StorageBox(
  args[1]: TensorBox(StorageBox(
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "GuardOnDataDependentSymNode: Could not extract specialized integer from data-dependent expression "
            "4*Max(1, u0) (unhinted: 4*Max(1, u0)).  (Size-like symbols: u0)",
            "compile: `aten.convolution.default` needs a fixed size, and `4*Max(1, u0)` depends on a tensor's values",
        ),
        (
            "AssertionError: layouts",
            "compile: torch's compiler fails at the operator `aten.convolution.default`: AssertionError: layouts",
        ),
    ],
)
def test_an_operator_that_inductor_cannot_lower_is_named_and_its_arguments_are_not_dumped(what: str, said: str) -> None:
    failure = explain_failure(InductorError(f"LoweringException: {what}{DUMP}"), "compile")
    assert failure.message == said
    assert ("torch.searchsorted(counts.cumsum(0)" in failure.hint) is ("u0" in what)


def test_the_way_out_of_a_size_that_depends_on_counts_has_its_rows() -> None:
    x, counts = torch.arange(6.0).view(3, 2), torch.tensor([2, 0, 3])
    rows = torch.searchsorted(counts.cumsum(0), torch.arange(8), right=True)
    found = x[rows.clamp(max=len(x) - 1)][: counts.sum()]
    assert torch.equal(found, torch.repeat_interleave(x, counts, 0))
