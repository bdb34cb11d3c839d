"""The garbage collector rests while modules are imported, artifacts are loaded and processes end."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest
from processes import run_python

from aotc.garbage import no_collection


def test_no_garbage_is_looked_for_within() -> None:
    with no_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_fails_within_leaves_it_on() -> None:
    with pytest.raises(ModuleNotFoundError), no_collection():
        __import__("no_such_module")
    assert gc.isenabled()


def test_who_had_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_within_sets_off_nothing_afterwards() -> None:
    looked: list[int] = []

    def count(phase: str, details: dict[str, int]) -> None:
        if phase == "start":
            looked.append(details["generation"])

    with no_collection():
        kept: list[list[int]] = [[] for _ in range(10 * gc.get_threshold()[0])]
        gc.callbacks.append(count)
    within = len(looked)
    kept.append([])
    afterwards = len(looked)
    gc.callbacks.remove(count)
    assert (looked, within, afterwards) == ([0], 1, 1)


def test_while_one_thread_is_within_it_stays_off_and_the_last_turns_it_on() -> None:
    entered, left = threading.Event(), threading.Event()

    def stay() -> None:
        with no_collection():
            entered.set()
            assert left.wait(60)

    thread = threading.Thread(target=stay)
    with no_collection(), no_collection():
        thread.start()
        assert entered.wait(60)
    assert not gc.isenabled()
    left.set()
    thread.join()
    assert gc.isenabled()


def test_threads_that_come_and_go_leave_it_on() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def come_and_go() -> None:
        for _ in range(3000):
            with no_collection():
                pass

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert gc.isenabled()
    finally:
        sys.setswitchinterval(before)
        gc.enable()


def test_a_fork_in_which_nobody_is_within_collects() -> None:
    code = """
import gc, os, threading
from aotc.garbage import no_collection
entered, left = threading.Event(), threading.Event()
def stay():
    with no_collection():
        entered.set()
        left.wait()
thread = threading.Thread(target=stay)
thread.start()
entered.wait()
def child(expected):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if gc.isenabled() == expected else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(gc.isenabled(), child(True))
with no_collection():
    print(child(False))
left.set()
thread.join()
print(gc.isenabled())
"""
    assert run_python(code).split() == ["False", "0", "0", "True"]


def test_a_load_sets_off_no_full_collection(quickstart_store: Path) -> None:
    """Where one is due."""
    code = f"""
import gc
import aotc
from examples.models import transformer_block
module = transformer_block().eval()
load = aotc.load
full = []
gc.callbacks.append(lambda phase, details: full.append(phase) if details["generation"] == 2 else None)
gc.freeze()
gc.collect()  # of nothing, so that a full one is due as soon as there is something
full.clear()
gc.set_threshold(200, 0, 0)
compiled = load("{quickstart_store}#quickstart", module)
print(len(full))
"""
    assert run_python(code).strip() == "0"


def test_weights_are_read_with_collection_on(quickstart_store: Path) -> None:
    """A checkpoint may take long, and other threads work meanwhile."""
    code = f"""
import gc
from collections.abc import Mapping
import aotc
from examples.models import transformer_block
class Watched(Mapping):
    seen = set()
    def __init__(self, tensors): self.tensors = tensors
    def __iter__(self): return iter(self.tensors)
    def __len__(self): return len(self.tensors)
    def __getitem__(self, name):
        self.seen.add(gc.isenabled())
        return self.tensors[name]
aotc.load("{quickstart_store}#quickstart", weights=Watched(transformer_block().eval().state_dict()))
print(Watched.seen)
"""
    assert run_python(code).strip() == "{True}"


@pytest.mark.parametrize(("imported", "frozen"), [("torch", "True"), ("triton", "False")])
def test_a_command_ends_without_looking_for_garbage(imported: str, frozen: str) -> None:
    """With torch imported, the search at a process's end takes half a second. Triton reports what it does not find."""
    code = f"""
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > 1000))  # what was registered first, runs last
from aotc.cli import main
main(["ls", "--help"], standalone_mode=False)
sys.modules["{imported}"] = sys
print(gc.get_freeze_count() > 1000)
"""
    *_, before, after = run_python(code).splitlines()
    assert (before, after) == ("False", frozen)
