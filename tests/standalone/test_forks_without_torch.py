"""A model is loaded once, and forked children call it, as of a server that preloads: in processes without torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_python import CHILDREN
from test_swaps_without_torch import told

PRELUDE = (
    CHILDREN
    + """
import time
stop = threading.Event()
def serve(action):
    def run():
        while not stop.is_set():
            action()
    return beside(run)
def wide(**options):
    weight = numpy.eye(256, dtype="f4")
    return aotc.standalone.load(f"{store}#repeated", weights={"weight": weight}, **options)
aotc.standalone.set_num_threads(2)
big = numpy.full((128, 256), 0.5, "f4")
def containers(model):
    return model._table.containers()
"""
)


def test_children_call_what_the_parent_has_called_with_openmp_s_threads(zoo_store: Path) -> None:
    """And the parent goes on; so does a child of a child. The weights are the parent's own memory."""
    code = """
model = wide()
expected = model(big)
def right():
    return numpy.array_equal(model(big), expected)
before = containers(model)
def both():
    return right() and containers(model) == before and child(right) == 0 and right()
threads = len(os.listdir("/proc/self/task"))
print(json.dumps([child(both), right(), child(both), threads > 1]))
"""
    assert told(PRELUDE + code, zoo_store) == [0, True, 0, True]


def test_children_of_a_parent_whose_threads_are_inside_a_library(zoo_store: Path) -> None:
    """More threads than the library lets in: a child would wait for those that it does not have."""
    code = """
model, frozen = wide(), aotc.standalone.load(f"{store}#frozen")
x = numpy.ones((2, 64), "f4")
expected, of_frozen = model(big), frozen(x)
before = containers(model)
threads = [serve(lambda: model(big)), serve(lambda: model(big)), serve(lambda: frozen(x))]
def right():
    results = []
    def call():
        results.append(numpy.array_equal(model(big), expected) and numpy.array_equal(frozen(x), of_frozen))
    inside = [beside(call) for _ in range(2)]
    [thread.join() for thread in inside]
    return results == [True, True] and containers(model) != before
statuses = []
for _ in range(10):
    time.sleep(0.01)
    statuses.append(child(right))
stop.set()
[thread.join() for thread in threads]
print(json.dumps([statuses, numpy.array_equal(model(big), expected)]))
"""
    assert told(PRELUDE + code, zoo_store) == [[0] * 10, True]


@pytest.mark.parametrize("lock", ["model._counting", "model._updating"])
def test_a_lock_that_a_thread_held_is_free_in_a_child(zoo_store: Path, lock: str) -> None:
    code = f"""
model = linear()
held = threading.Event()
def hold():
    with {lock}:
        held.set()
        stop.wait()
thread = beside(hold)
held.wait()
def update():
    model.update_weights(weights_of(2))
    return served(model) == [18]
status = child(update)
stop.set()
thread.join()
print(json.dumps([status, served(model)]))
"""
    assert told(PRELUDE + code, zoo_store) == [0, [9]]


def test_what_a_child_writes_to_a_buffer_is_its_own(zoo_store: Path) -> None:
    code = """
weights = {"project.weight": numpy.eye(4, dtype="f4"), "project.bias": numpy.zeros(4, "f4"), "steps": numpy.array(0)}
model = aotc.standalone.load(f"{store}#cache", weights=weights)
def total(at, value):
    return model(numpy.full((1, 4), value, "f4"), numpy.array(at))[0].tolist()
total(0, 1)
print(json.dumps([child(lambda: total(1, 5) == [6] * 4), total(1, 2)]))
"""
    assert told(PRELUDE + code, zoo_store) == [0, [3] * 4]
