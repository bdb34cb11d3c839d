"""`aotc.compile`: what a program's first run builds, and what its later runs do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from processes import TIMEOUT, finish, processes_that_name, run_aotc, run_python, start

from aotc.manifest import read_manifest
from aotc.records import SizeRange

EXIT = "model = aotc.compile(Net().eval(), build='exit')\n"
USED = "model = aotc.compile(Net().eval())\n"
OTHERS = """
import numpy, enum
loop = []; loop.append(loop)
class Number(enum.IntEnum): ONE = 1
values = [numpy.ones(3), numpy.bool_(True), Number.ONE, '\\ud800', loop, float('nan'), 2**70, [1], {1: 2}]
values += [torch.ones(2, dtype=torch.uint16), torch.eye(2).to_sparse()]
before, ids, others = model.stats(), torch.ones(2, 16, dtype=torch.int64), 0
for value in values:
    for _ in range(4):
        try: want = model.module(ids, value)
        except Exception as error: want = type(error)
        try:
            with torch.no_grad(): got = model(ids, value)
        except Exception as error: got = type(error)
        others += got is not want if isinstance(want, type) else not torch.equal(got, want)
same = same and called(model, (2, 16))
ran = [now - then for now, then in zip(model.stats()[:2], before[:2])]
strict = aotc.compile(model.module, on_miss='error')
same = same and called(strict, (2, 16))
"""
"""Calls of a model that is compiled with any value: they are eager's, and counted."""

LEFT = "os._exit(0)"
"""The end of a process in which nothing runs any more, as after kill -9."""


@pytest.mark.compile
def test_a_second_run_is_compiled_and_imports_no_compiler(program: Any) -> None:
    first = program.run(f"{USED}same = called(model, (2, 16), (2, 16))\ntell(model, same=same)")
    assert (first["same"], first["models"], first["forms"], first["built"]) == (True, [], 1, 0)
    deadline = time.monotonic() + TIMEOUT
    while not program.memory(first["name"])["builds"] and time.monotonic() < deadline:  # it outlives its program
        time.sleep(0.1)
    second = program.run(f"{USED}same = called(model, (2, 16))\ntell(model, same=same)")
    assert (second["same"], second["models"], second["forms"]) == (True, [first["name"]], 1)
    assert first["compilers"] == second["compilers"] == []
    assert "1 of 1 form from" in second["log"]

    # a length that is new runs in eager, and after the next build a range takes both, and others
    third = program.run(f"{EXIT}same = called(model, (2, 16), (2, 24), (2, 24), (2, 24))\ntell(model, same=same)")
    assert (third["same"], third["forms"], third["built"], third["notes"]) == (True, 2, 1, [])
    fourth = program.run(f"{USED}same = called(model, (2, 24), (2, 16), (2, 19))\ntell(model, same=same)\n{LEFT}")
    assert (fourth["same"], fourth["forms"], fourth["built"], fourth["compilers"]) == (True, 2, 2, [])
    assert program.memory(fourth["name"])["builds"] == 2

    # what was removed from the store is not there, whatever the memory says
    assert run_aotc("rm", f"{fourth['name']}:latest", "--store", program.store).returncode == 0
    fifth = program.run(f"{USED}same = called(model, (2, 24))\ntell(model, same=same)\n{LEFT}")
    assert (fifth["same"], fifth["models"], fifth["forms"], fifth["built"]) == (True, [], 2, 0)


@pytest.mark.compile
def test_calls_switch_to_compiled_code_while_the_program_runs(program: Any) -> None:
    told = program.run(
        f"{USED}same = called(model, (2, 16)) and called(model, (2, 16), double=True)\n"
        "import threading, time\n"
        "ended, right = threading.Event(), []\n"
        "def calls():\n"
        "    while not ended.is_set():\n"
        "        right.append(called(model, (2, 16)) and called(model, (2, 16), double=True)); time.sleep(0.005)\n"
        "threads = [threading.Thread(target=calls) for _ in range(4)]\n"
        "[each.start() for each in threads]\n"
        "ready = model.wait()\n"
        "time.sleep(0.5); ended.set(); [each.join() for each in threads]\n"
        "same = same and all(right) and len(right) > 8\n"
        "same = same and called(model, (2, 16)) and called(model, (2, 16), double=True)\n"
        "misses = [each.stats().misses for each in model._remembering.known.compiled]\n"
        f"{OTHERS}"
        "tell(model, same=same, ready=ready, misses=misses, others=others, ran=ran, strict=strict.stats()[:2])\n"
        f"{LEFT}"
    )
    name = told["name"]
    assert (told["ready"], told["same"], told["models"]) == (True, True, [name, f"{name}-2"])
    assert (told["misses"], told["compilers"]) == ([0, 0], [])
    assert (told["others"], told["ran"], told["strict"]) == (0, [1, 11 * 4], [1, 0])


@pytest.mark.compile
def test_two_processes_build_once_and_a_killed_build_loses_nothing(program: Any) -> None:
    recorded = program.run(f"{USED}called(model, (2, 16))\ntell(model)\n{LEFT}")
    name = recorded["name"]
    assert (recorded["forms"], recorded["built"]) == (1, 0)

    waiting = program.start(f"{USED}model.wait()\ntell(model)\n{LEFT}")
    deadline = time.monotonic() + TIMEOUT
    while not program.memory(name)["attempts"] and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in _builders(program.store):
        os.kill(process, signal.SIGKILL)
    killed = program.result(finish(waiting))
    assert (killed["built"], killed["models"]) == (0, [])

    # two ranks start together: one that waits, and one that only calls, as in the default mode
    code = (
        "import time\n"
        f"{USED}ends = time.monotonic() + {TIMEOUT}\n"
        "same = called(model, (2, 16))\n"
        "if os.environ['RANK'] == '0':\n"
        "    same &= model.wait()\n"
        "while same and not model.explain().models and time.monotonic() < ends:\n"
        "    same = called(model, (2, 16))\n"
        "    time.sleep(0.1)\n"
        "tell(model, same=same)"
    )
    both = [program.start(code, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2") for rank in "01"]
    told = [program.result(finish(each)) for each in both]
    assert sum(each["log"].count("is built by process") for each in told) == 1
    assert [(each["same"], each["models"], each["compilers"]) for each in told] == [(True, [name], [])] * 2
    assert (program.memory(name)["builds"], program.memory(name)["attempts"]) == (1, 0)


def _builders(store: Path) -> list[int]:
    """The processes that build into a store."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"building.build_process" in command and f"AOTC_STORE={store}\0".encode() in environment:
            found.append(int(folder.name))
    return found


def test_what_changed_is_told_with_both_values(program: Any) -> None:
    first = program.run(f"{USED}called(model, (2, 16))\ntell(model)\n{LEFT}")
    wider = program.run(f"model = aotc.compile(Net(width=16).eval())\ncalled(model, (2, 16))\ntell(model)\n{LEFT}")
    assert wider["name"] != first["name"]
    assert "attribute width was 8 and is 16" in wider["log"]
    assert "attribute embed.embedding_dim was 8 and is 16" in wider["log"]

    source = program.folder / "remembered_nets.py"
    source.write_text(source.read_text().replace("y * 2", "y * 3"))
    changed = program.run(f"model = aotc.compile(Net(width=16).eval())\ncalled(model, (2, 16))\ntell(model)\n{LEFT}")
    assert changed["name"] not in (first["name"], wider["name"])
    assert "code of Net was sha256:" in changed["log"]
    assert "attribute" not in changed["log"].partition("is new: ")[2].partition("\n")[0]
    assert (changed["forms"], changed["built"]) == (1, 0)


def test_the_code_of_a_script_s_helper_is_a_fact(program: Any) -> None:
    helper, script = program.folder / "helper.py", program.folder / "own.py"
    script.write_text(
        "import os, torch, aotc, helper\n"
        "class Own(torch.nn.Module):\n    def forward(self, x): return helper.act(x)\n"
        "if __name__ == '__main__':\n"
        "    model = aotc.compile(Own().eval()); model(torch.ones(2)); print(model.explain().name, flush=True)\n"
        f"    {LEFT}\n"
    )
    names, logs = [], []
    for act in ("relu", "tanh"):
        helper.write_text(f"def act(x): return x.{act}()\n")
        ran = finish(start(script, cwd=program.folder, AOTC_STORE=str(program.store)))
        names.append(ran.stdout.strip())
        logs.append(ran.stderr)
    assert names[0] != names[1]
    assert f"{names[1]} is new: code of helper was sha256:" in logs[1]


@pytest.mark.compile
def test_a_failed_build_is_not_tried_again_until_it_is_asked_for(program: Any) -> None:
    used = "model = aotc.compile(secret().eval(), factory='remembered_nets:broken', build='{}'{})\n"
    call = "with torch.no_grad(): model(torch.ones(2, 3))\n"
    failed = program.run(used.format("now", "") + f"{call}tell(model)")
    name = failed["name"]
    assert "no weights here" in failed["failed"][name]
    assert f"remove {program.files / name}.failed" in failed["log"]
    assert program.memory(name)["builds"] == 1

    again = program.run(used.format("now", "") + f"{call}tell(model)")
    assert program.memory(name)["builds"] == 1
    assert "no weights here" in again["failed"][name]

    asked = program.run(used.format("now", ", retry=True") + f"{call}tell(model, ready=model.wait())")
    assert (asked["ready"], program.memory(name)["builds"]) == (False, 1)


@pytest.mark.compile
def test_a_model_that_reads_an_iterator_stays_in_eager_with_the_line(program: Any) -> None:
    told = program.run(
        "model = aotc.compile(Numbering().eval(), build='now')\n"
        "with torch.no_grad(): seen = [int(model(torch.zeros(2))[0]) for _ in range(4)]\ntell(model, seen=seen)"
    )
    assert (told["seen"], told["built"]) == ([0, 1, 2, 3], 0)
    reason = told["failed"][told["name"]]
    assert "in forward: return x + next(self.numbers): forward reads what changes from call to call" in reason


@pytest.mark.compile
def test_what_calls_of_a_module_change_is_no_fact_that_makes_another_name(program: Any) -> None:
    code = (
        "model = aotc.compile(Counting().eval(), build='exit')\n"
        "with torch.no_grad():\n"
        "    right = all(torch.allclose(model(x), model.linear(x), atol=1e-6) for x in map(torch.randn, sizes))\n"
        "tell(model, right=right)"
    )
    first = program.run(f"sizes = [(2, 8), (3, 8)]\n{code}")
    assert (first["right"], first["models"], first["failed"]) == (True, [], {})
    assert program.memory(first["name"])["kinds"][0]["counters"] == {"calls": 1}
    second = program.run(f"sizes = [(2, 8), (3, 8), (2, 8)]\n{code}")
    assert (second["right"], second["models"], second["calls"][:2]) == (True, [first["name"]], [3, 0])
    assert [path.stem for path in program.files.glob("*.json")] == [first["name"]]
    assert program.memory(first["name"])["builds"] == 1


@pytest.mark.compile
def test_code_of_another_module_than_the_factory_s_is_not_run(program: Any) -> None:
    told = program.run(
        "model = aotc.compile(Net().eval(), factory='remembered_nets:another', build='now')\n"
        "same = called(model, (2, 16), (2, 16))\ntell(model, same=same, ready=model.wait())"
    )
    assert (told["same"], told["models"], told["built"], told["ready"]) == (True, [], 0, False)
    assert "embed.weight was [50, 8] a" in told["failed"][told["name"]]

    later = program.run(
        "model = aotc.compile(Net().eval(), factory='remembered_nets:another')\ncalled(model, (2, 16))\ntell(model)"
    )
    assert "is built anew" not in later["log"]
    assert "does not make the module as the program has it" in later["log"]


def test_a_class_that_cannot_be_made_again_is_told(program: Any) -> None:
    told = program.run(
        "model = aotc.compile(secret().eval())\nwith torch.no_grad(): model(torch.ones(2, 3))\ntell(model)"
    )
    assert told["forms"] == 0
    assert "cannot be read from its attributes" in told["log"]
    assert 'factory="package.module:function"' in told["log"]


def test_a_class_of_a_prompt_has_a_way_out(program: Any) -> None:
    printed = run_python(
        "import torch, aotc\n"
        "class Cell(torch.nn.Module):\n    def forward(self, x): return x\n"
        "model = aotc.compile(Cell().eval()); model(torch.ones(2)); print(model.explain())",
        AOTC_STORE=str(program.store),
    )
    assert "Cell is defined in a notebook or at a prompt" in printed
    assert "%%writefile" in printed


def test_a_script_that_would_run_again_is_not_built(program: Any) -> None:
    script = program.folder / "plain.py"
    script.write_text(
        "import torch, aotc\n"
        "class Own(torch.nn.Module):\n    def forward(self, x): return x + 1\n"
        "model = aotc.compile(Own().eval()); model(torch.ones(2)); print(model.explain())"
    )
    ran = finish(start(script, cwd=program.folder, AOTC_STORE=str(program.store)))
    assert ran.returncode == 0, ran.stderr
    assert "all of which would run again in the build" in ran.stdout
    assert processes_that_name("building.build_process", f"AOTC_STORE={program.store}") == []


def test_what_was_remembered_is_a_manifest(program: Any, tmp_path: Path) -> None:
    called = "called(model, (2, 16), (2, 24)) and called(model, (2, 16), double=True)"
    name = program.run(f"{USED}{called}\ntell(model)\n{LEFT}")["name"]
    output = tmp_path / "manifest.yaml"
    ran = run_aotc("init", "--from-store", f"{program.store}#{name}", "--output", output, "--no-check", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    models = read_manifest(output).models
    assert [*models] == [name, f"{name}-2"]
    assert {model.factory for model in models.values()} == {"remembered_nets:Net"}
    assert models[name].buckets == ({"batch": 2, "seq": SizeRange(2, 32, tune_at=32)},)
    assert models[f"{name}-2"].inputs["double"] is True

    unknown = run_aotc("init", "--from-store", f"{program.store}#net", cwd=tmp_path)
    assert unknown.returncode == 2
    assert f"it remembers {name}" in unknown.stderr
    assert run_aotc("fsck", "--store", program.store).returncode == 0
