"""A forked child, as of multiprocessing or a server that preloads: its parent's threads were anywhere at the fork."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_python import CHILDREN, forked_python

PRELUDE = (
    CHILDREN
    + """
import gc, sys, time
import torch, aotc, models
from aotc.runtime.libraries import library
from aotc.runtime.state import weights

torch.set_num_threads(1)
store = sys.argv[1]
stop, stays = threading.Event(), []

def hold(lock):
    held = threading.Event()
    def stay():
        with lock:
            held.set()
            stop.wait()
    stays.append(beside(stay))
    held.wait()

def libraries():
    return [each for each in gc.get_objects() if isinstance(each, library.CLibrary)]

module = models.Linear().eval()
compiled = aotc.load(f"{store}#linear", module, on_miss="eager")
x, wrong = torch.randn(2, 8), torch.randn(3, 8)
new = {name: torch.full_like(each, 2.0) for name, each in module.state_dict().items()}
with torch.no_grad():
    expected, after = module(x), torch.relu(torch.nn.functional.linear(x, new["linear.weight"], new["linear.bias"]))

def right(expected):
    return torch.allclose(compiled(x), expected, atol=1e-5)
"""
)


def run(store: Path, folder: Path, code: str) -> list[str]:
    after = "\nstop.set()\nfor thread in stays: thread.join()\n"
    return forked_python(PRELUDE + code + after, store, AOTC_CACHE_DIR=str(folder)).split()


def test_threads_that_were_inside_a_library_are_not_waited_for(zoo_store: Path, tmp_path: Path) -> None:
    """One that multiplies no matrices: MKL's own locks are held by whoever does."""
    code = """
compiled = aotc.load(f"{store}#leaky", models.Leaky().eval())
x = torch.randn(2, 16)
expected = compiled(x)
def serve():
    while not stop.is_set():
        compiled(x)
stays += [beside(serve), beside(serve)]
def both():
    results = []
    threads = [beside(lambda: results.append(right(expected))) for _ in range(2)]
    for thread in threads:
        thread.join()
    return results == [True, True] and child(lambda: right(expected)) == 0
for _ in range(10):
    time.sleep(0.01)
    print(child(both))
"""
    assert run(zoo_store, tmp_path, code) == ["0"] * 10


def test_a_container_that_cannot_be_made_is_a_library_error_at_each_call(zoo_store: Path, tmp_path: Path) -> None:
    code = """
def refused():
    for each in libraries():
        each._concurrency.value = 0
    for _ in range(2):
        try:
            compiled(x)
        except aotc.LibraryError:
            continue
        return False
    return True
stays.append(beside(stop.wait))
print(child(refused), right(expected))
"""
    assert run(zoo_store, tmp_path, code) == ["0", "True"]


@pytest.mark.parametrize(("threads", "same"), [(0, "True"), (1, "False")])
def test_the_containers_of_a_process_of_one_thread_are_shared(
    threads: int, same: str, zoo_store: Path, tmp_path: Path
) -> None:
    """Frozen weights lie in them."""
    code = f"""
stays += [beside(stop.wait) for _ in range({threads})]
before = [each._container.value for each in libraries()]
print(child(lambda: right(expected) and ([each._container.value for each in libraries()] == before) is {same}))
"""
    assert run(zoo_store, tmp_path, code) == ["0"]


@pytest.mark.parametrize(
    "lock",
    ["compiled.forward._counters.lock", "compiled.forward._state._gate.replacing", "compiled.forward._updating"],
)
def test_a_lock_that_a_thread_held_is_free(lock: str, zoo_store: Path, tmp_path: Path) -> None:
    code = f"""
hold({lock})
def update():
    compiled.update_weights(new)
    return right(after)
print(child(update))
"""
    assert run(zoo_store, tmp_path, code) == ["0"]


def test_eager_calls_and_updates_that_were_under_way_are_not_waited_for(zoo_store: Path, tmp_path: Path) -> None:
    code = """
inside = threading.Event()
stays.append(beside(lambda: compiled.forward._state.run_eagerly(lambda: (inside.set(), stop.wait()))))
inside.wait()
stays.append(beside(lambda: compiled.update_weights(new)))
while compiled.forward._state._gate._entry.acquire(blocking=False):
    compiled.forward._state._gate._entry.release()
    time.sleep(0.01)
def update():
    compiled(wrong)
    compiled.update_weights(new)
    return right(after)
print(child(update))
"""
    assert run(zoo_store, tmp_path, code) == ["0"]


def test_an_eager_call_that_forks_goes_on_in_both(zoo_store: Path, tmp_path: Path) -> None:
    code = """
stays.append(beside(stop.wait))
def update():
    compiled.update_weights(new)
    return right(after)
pid = compiled.forward._state.run_eagerly(os.fork)
if pid == 0:
    signal.alarm(20)
    os._exit(0 if update() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), update())
"""
    assert run(zoo_store, tmp_path, code) == ["0", "True"]


@pytest.mark.parametrize("thread", ["main", "other", "ended"])
def test_the_threads_of_openmp_that_a_parent_has_used_are_not_waited_for(
    thread: str, zoo_store: Path, tmp_path: Path
) -> None:
    code = f"""
torch.set_num_threads(2)
compiled = aotc.load(f"{{store}}#repeated", models.Repeated().eval())
x, called, results = torch.randn(128, 256), threading.Event(), []
expected = compiled(x)
def serve():
    results.append(right(expected))
    called.set()
    if "{thread}" == "other":
        stop.wait()
tasks = len(os.listdir("/proc/self/task"))
if "{thread}" != "main":
    stays.append(beside(serve))
    called.wait()
    if "{thread}" == "ended":
        stays.pop().join()
        while len(os.listdir("/proc/self/task")) > tasks:  # join returns before the thread's pool has ended
            time.sleep(0.01)
print(*[child(lambda: right(expected) and child(lambda: right(expected)) == 0) for _ in range(2)], right(expected))
"""
    assert run(zoo_store, tmp_path, code) == ["0", "0", "True"]


def test_a_thread_other_than_the_main_one_forks(zoo_store: Path, tmp_path: Path) -> None:
    code = """
torch.set_num_threads(2)
compiled = aotc.load(f"{store}#repeated", models.Repeated().eval())
x, results = torch.randn(128, 256), []
expected = compiled(x)
def serve():
    results.extend([right(expected), child(lambda: right(expected))])
beside(serve).join()
print(*results, right(expected))
"""
    assert run(zoo_store, tmp_path, code) == ["True", "0", "True"]


def test_a_fork_waits_for_a_decoder_that_a_thread_is_making() -> None:
    code = """
import os, signal, threading, time
from types import SimpleNamespace
import msgspec
from aotc import records

class Record(msgspec.Struct):
    size: int

begun, forking = threading.Event(), threading.Event()

def make(record):
    begun.set()
    forking.wait()
    time.sleep(0.2)  # slow, so that a fork that does not wait is sure to come before the end
    return msgspec.json.Decoder(record)

records.msgspec = SimpleNamespace(json=SimpleNamespace(Decoder=make))
thread = threading.Thread(target=records.decode, args=(b'{"size": 1}', Record))
thread.start()
begun.wait()
os.register_at_fork(before=forking.set)  # runs before aotc's own
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    os._exit(0 if records.decode(b'{"size": 2}', Record).size == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
thread.join()
"""
    assert forked_python(code).split() == ["0"]
