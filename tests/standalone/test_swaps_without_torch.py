"""`update_weights` in a process without torch: all or nothing, for every later call, while calls go on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from processes import finish, start
from safetensors.torch import save_file
from sanitized_runtime import preloaded, sanitized_copy

import aotc
import aotc.standalone
from aotc.errors import BindError, Issue

PRELUDE = """
import json, sys, threading
sys.path.insert(0, sys.argv[1])
from without_torch import NoTorch
sys.meta_path.insert(0, NoTorch())
import numpy, aotc.standalone
from aotc.errors import AotcError
store = sys.argv[2]
def weights_of(value):
    return {"linear.weight": numpy.full((8, 8), value, "f4"), "linear.bias": numpy.full(8, value, "f4")}
def linear(value=1, **options):
    return aotc.standalone.load(f"{store}#linear", weights=weights_of(value), **options)
x = numpy.ones((2, 8), "f4")
def served(model):
    return sorted(set(model(x).ravel().tolist()))
"""


def told(code: str, store: Path, *arguments: object) -> Any:
    """What `code` prints as JSON, in a process without torch."""
    ran = finish(start("-c", PRELUDE + code, Path(__file__).parent, store, *arguments))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def test_the_next_call_uses_the_new_weights_of_a_mapping_a_file_or_some_names(zoo_store: Path, tmp_path: Path) -> None:
    save_file(
        {"linear.weight": torch.full((8, 8), 3.0), "linear.bias": torch.full((8,), 3.0)}, tmp_path / "w.safetensors"
    )
    code = """
model, new = linear(), weights_of(2)
found = [served(model)]
model.update_weights(new)
new["linear.weight"][:] = 9  # it was copied
found.append(served(model))
model.update_weights(sys.argv[3])
found.append(served(model))
model.update_weights({"linear.bias": numpy.zeros(8, "f4")})
print(json.dumps([*found, served(model), model.stats().calls]))
"""
    assert told(code, zoo_store, tmp_path / "w.safetensors") == [[9], [18], [27], [24], 4]


def test_no_call_sees_a_mixture_and_the_old_weights_are_let_go(zoo_store: Path) -> None:
    """Of four threads, while weights are swapped a thousand times."""
    code = """
import resource
model = linear(concurrency=2)
seen, stop = set(), threading.Event()
def serve():
    while not stop.is_set():
        seen.update(served(model))
threads = [threading.Thread(target=serve) for _ in range(4)]
[thread.start() for thread in threads]
sizes = []
for turn in range(1000):
    model.update_weights(weights_of(turn % 3 + 1))
    if turn % 500 == 499:
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
stop.set()
[thread.join() for thread in threads]
print(json.dumps([sorted(seen | {9.0}), sizes[1] / sizes[0]]))
"""
    seen, growth = told(code, zoo_store)
    assert set(seen) <= {9, 18, 27} and growth < 1.05


RACING = 'long count; extern "C" void bump() { for (int turn = 0; turn < 5000000; ++turn) ++count; }'


def test_a_detector_of_races_has_nothing_to_report(zoo_store: Path, tmp_path: Path) -> None:
    """ThreadSanitizer's build of the runtime, of calls, padded ones and weights that are swapped; and it is on: it
    reports a library whose threads race. OpenMP has one thread, since libgomp is not built for it."""
    settings = {"LD_PRELOAD": preloaded("tsan"), "OMP_NUM_THREADS": "1", "TSAN_OPTIONS": "exitcode=66"}
    sanitized_copy(tmp_path, "thread")
    (tmp_path / "racing.cpp").write_text(RACING)
    library = tmp_path / "racing.so"
    subprocess.run(
        ["g++", "-fsanitize=thread", "-g1", "-shared", "-fPIC", "-o", library, f"{library.stem}.cpp"],
        cwd=tmp_path,
        check=True,
    )
    code = """
import ctypes
from aotc.core import _cpu
model, padded = linear(concurrency=2), aotc.standalone.load(f"{store}#accumulating", weights={})
seen, counts, stop = set(), [], threading.Event()
def serve():
    aotc.standalone.set_num_threads(1)
    count, total = 0, numpy.zeros((3, 6), "f4")
    while not stop.is_set() or not count:
        seen.update(served(model))
        padded(total, numpy.ones((3, 6), "f4"))
        count += 1
    counts.append(count)
def together(action, turns):
    threads = [threading.Thread(target=action) for _ in range(4)]
    [thread.start() for thread in threads]
    [model.update_weights(weights_of(turn % 3 + 1)) for turn in range(turns)]
    stop.set()
    [thread.join() for thread in threads]
if len(sys.argv) > 4:
    together(ctypes.CDLL(sys.argv[4]).bump, 0)
else:
    together(serve, 300)
print(json.dumps([sorted(seen), min(counts, default=0), _cpu.__file__]))
"""
    first = "import sys; sys.path.insert(0, sys.argv[3])\n"
    ran, racing = (
        finish(start("-c", first + PRELUDE + code, Path(__file__).parent, zoo_store, tmp_path, *more, **settings))
        for more in ([], [library])
    )
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    seen, calls, runtime = json.loads(ran.stdout)
    assert set(seen) <= {9, 18, 27} and calls > 0 and runtime.startswith(str(tmp_path))
    assert racing.returncode == 66 and "data race" in racing.stderr and "bump" in racing.stderr


def test_a_buffer_is_reset_by_its_name_and_others_stay(zoo_store: Path) -> None:
    code = """
weights = {"project.weight": numpy.eye(4, dtype="f4"), "project.bias": numpy.zeros(4, "f4"), "steps": numpy.array(5)}
model = aotc.standalone.load(f"{store}#cache", weights=weights)
def step(at):
    total, following, keys = model(numpy.full((1, 4), at + 1, "f4"), numpy.array(at))
    return total.tolist(), following.tolist(), keys
found = [step(0)[:2], step(1)[:2]]
kept = step(2)[2]
model.update_weights({"keys": numpy.zeros((16, 4), "f4")})
found.append(step(1)[:2])
print(json.dumps([found, kept.sum().item(), int(weights["steps"]), int(model._state[-1].shape == ())]))
"""
    found, kept, own, _ = told(code, zoo_store)
    assert found == [[[1] * 4, 1], [[3] * 4, 2], [[2] * 4, 2]]
    assert kept == 24 and own == 5, "what the caller was given, or gave, is not what later calls write to"


WRONG: list[dict[str, numpy.ndarray]] = [
    {"linear.weight": numpy.zeros((8, 4), numpy.float32), "other": numpy.zeros(1, numpy.float32)},
    {"linear.bais": numpy.zeros(8, numpy.float32)},
    {"linear.bias": numpy.zeros(8, numpy.float64)},
    {},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_as_with_torch_and_nothing_has_changed(zoo_store: Path, wrong: dict[str, Any]) -> None:
    weights = {"linear.weight": numpy.eye(8, dtype=numpy.float32), "linear.bias": numpy.zeros(8, numpy.float32)}
    model, x = aotc.standalone.load(f"{zoo_store}#linear", weights=weights), numpy.ones((2, 8), numpy.float32)
    compiled = aotc.load(
        f"{zoo_store}#linear", weights={name: torch.from_numpy(each) for name, each in weights.items()}
    )

    def refused(update: Any, given: Any) -> tuple[str, tuple[Issue, ...], str]:
        with pytest.raises(BindError) as caught:
            update(given)
        return caught.value.message, caught.value.issues, caught.value.hint

    in_torch = {name: torch.from_numpy(each) for name, each in wrong.items()}
    assert refused(model.update_weights, wrong) == refused(compiled.update_weights, in_torch)
    assert (model(x) == 1).all()


def test_frozen_weights_cannot_be_replaced(zoo_store: Path) -> None:
    model = aotc.standalone.load(f"{zoo_store}#frozen")
    with pytest.raises(BindError, match="holds frozen weights"):
        model.update_weights({"linear.bias": numpy.zeros(64, numpy.float32)})
