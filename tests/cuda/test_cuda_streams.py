"""Streams, threads and devices: the caller's stream is honoured, and callers do not disturb one another."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gpu_runs import Gpu, all_close, close, inputs, run_python

import aotc

pytestmark = pytest.mark.cuda

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SLEEP = 100_000_000
"""Cycles that a stream is kept busy: about 50 ms, far longer than a call."""


@pytest.mark.parametrize("launch", ["never", "always"])
def test_the_current_stream_is_honoured(gpu: Gpu, graphs: Any, launch: str) -> None:
    """The input is written late on a side stream, and only that stream knows."""
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use=launch))
    (late,) = inputs(1, 4, 64)
    expected = eager(late)
    x, stream = torch.zeros(4, 64, device="cuda:0"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            x.zero_()
            torch.cuda._sleep(SLEEP)
            x.copy_(late)
            output = compiled(x)
            x.zero_()  # behind the call in the stream, so it must not be seen
    stream.synchronize()
    assert close(output, expected)
    if launch == "always":
        assert graphs.streams == [stream] * 3


def test_calls_on_alternating_streams_use_the_shared_memory_in_turn(gpu: Gpu) -> None:
    """The second stream's call may not overwrite static buffers before the first, which waits, has used them."""
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="always"))
    streams = [torch.cuda.Stream() for _ in range(2)]
    xs = inputs(8, 4, 64)
    expected = [eager(x) for x in xs]
    torch.cuda.synchronize()
    outputs = []
    for index, x in enumerate(xs):
        with torch.cuda.stream(streams[index % 2]):
            if index % 2 == 0:
                torch.cuda._sleep(SLEEP // 4)
            outputs.append(compiled(x))
    torch.cuda.synchronize()
    assert all(close(output, y) for output, y in zip(outputs, expected, strict=True))


CAPTURE_STREAMS = """
import ctypes, gc, sys, torch
from pathlib import Path

from aotc.runtime.cuda import driver
import aotc
from gpu_runs import Gpu, close, inputs

ask, made = driver.ask, []

def recorded(function, *arguments):
    ask(function, *arguments)
    if function == "cuStreamCreate":
        made.append(arguments[0]._obj)

driver.ask = recorded
gpu = Gpu(Path(sys.argv[1]))
(x,) = inputs(1, 4, 64)
compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="always"))
print(close(compiled(x), eager(x)))
flags = ctypes.c_uint()
ask("cuStreamGetFlags", made[0], ctypes.byref(flags))
print(flags.value)
other, _ = gpu.loaded("mlp", graphs=aotc.Graphs(use="always"))
print(len({stream.value for stream in made}))
del compiled
gc.collect()
compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="always"))
print(close(compiled(x), eager(x)), close(other(x), eager(x)), len(made))
"""


def test_each_callable_captures_on_a_stream_of_its_own_and_the_next_one_takes_it_over(gpu: Gpu) -> None:
    """Not on one of torch's, of which making the first makes them all. 1: it does not wait for the default stream."""
    assert run_python(CAPTURE_STREAMS, gpu.store).split() == ["True", "1", "2", "True", "True", "2"]


@pytest.mark.parametrize("capture", ["eager", "lazy"])
@pytest.mark.parametrize("launch", ["never", "always"])
def test_two_threads_on_two_streams_get_right_answers(gpu: Gpu, launch: str, capture: str) -> None:
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use=launch, capture=capture))
    # Both buckets, and padded calls among them.
    xs = [x for batch in (4, 16, 3, 9) for x in inputs(8, batch, 64)]
    expected = [eager(x) for x in xs]
    torch.cuda.synchronize()
    wrong: list[str] = []
    together = threading.Barrier(2)

    def call(thread: int) -> None:
        stream = torch.cuda.Stream()
        together.wait()
        with torch.cuda.stream(stream):
            for iteration in range(400):
                index = (iteration * (5 if thread else 7) + thread) % len(xs)
                output = compiled(xs[index])
                stream.synchronize()
                if not close(output, expected[index]):
                    wrong.append(f"thread {thread}, call {iteration}")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(call, range(2)))
    assert not wrong, f"{len(wrong)} of 800, first {wrong[:3]}"
    assert compiled.stats().calls == 800


def test_two_threads_may_queue_without_waiting(gpu: Gpu) -> None:
    """No synchronisation between a thread's calls: both streams' queues fill, and every copy is still right."""
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="always"))
    xs = inputs(50, 4, 64)
    expected = [eager(x) for x in xs]
    torch.cuda.synchronize()

    def call(_: int) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return [compiled(x) for x in xs]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(call, range(2)))
    torch.cuda.synchronize()
    for outputs in found:
        assert all(close(output, y) for output, y in zip(outputs, expected, strict=True))


# -- devices ----------------------------------------------------------------------------------------------------------


@two_gpus
@pytest.mark.parametrize("launch", ["never", "always"])
def test_an_artifact_built_on_one_gpu_runs_on_another(gpu: Gpu, launch: str) -> None:
    module = gpu.module("mlp", "cuda:1")
    compiled = gpu.load("mlp", module, graphs=aotc.Graphs(use=launch))
    assert torch.cuda.current_device() == 0
    for batch in (4, 16, 9):
        assert all_close(compiled, copy.deepcopy(module), inputs(2, batch, 64, device="cuda:1"))
    with torch.cuda.device(1), torch.cuda.stream(torch.cuda.Stream(1)):
        assert all_close(compiled, copy.deepcopy(module), inputs(2, 4, 64, device="cuda:1"))


@two_gpus
def test_what_an_operator_makes_lies_on_the_gpu_that_runs(gpu: Gpu) -> None:
    """Not on the one of the build's number, whose memory kernels on this one cannot read."""
    module = gpu.module("windowed", "cuda:1")
    assert all_close(gpu.load("windowed", module), copy.deepcopy(module), inputs(2, 4, 64, device="cuda:1"))


VISIBLE = """
import sys, torch
from pathlib import Path
import aotc
from gpu_runs import Gpu, all_close, inputs

gpu = Gpu(Path(sys.argv[1]))
with torch.no_grad():
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="always"))
    print(torch.cuda.device_count(), compiled.device, all_close(compiled, eager, inputs(3, 4, 64)))
"""


def test_an_artifact_runs_under_cuda_visible_devices(gpu: Gpu) -> None:
    """The last GPU of the machine, seen as the only one."""
    last = str(torch.cuda.device_count() - 1)
    assert run_python(VISIBLE, gpu.store, CUDA_VISIBLE_DEVICES=last).split() == ["1", "cuda:0", "True"]


NO_GPU = """
import sys, torch, aotc
from pathlib import Path
from gpu_runs import Gpu

gpu = Gpu(Path(sys.argv[1]))
try:
    gpu.load("mlp", gpu.module("mlp", "cpu"))
except aotc.EnvironmentMismatchError as error:
    print(error)
"""


def test_a_process_without_a_gpu_is_told_so(gpu: Gpu) -> None:
    told = run_python(NO_GPU, gpu.store, CUDA_VISIBLE_DEVICES="")
    assert "cuda:sm_" in told and "cpu" in told and "hint:" in told


DESTROYED = """
import ctypes, sys, torch
from pathlib import Path

from aotc.runtime.cuda import driver
import aotc
from gpu_runs import Gpu, close, inputs

gpu = Gpu(Path(sys.argv[1]))
compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="never"))
(x,) = inputs(1, 4, 64)
expected = eager(x)
torch.cuda.synchronize()
for _ in range(50):
    handle = ctypes.c_void_p()
    driver.ask("cuStreamCreate", ctypes.byref(handle), 1)
    with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
        output = compiled(x)
    torch.cuda.synchronize()
    del output
    driver.ask("cuStreamDestroy_v2", handle)
with torch.cuda.stream(torch.cuda.Stream()):
    compiled(x)
print(len(compiled.forward._streams._seen), compiled.forward._streams._others)
compiled.update_weights({name: tensor.clone() for name, tensor in eager.state_dict().items()})
print(close(compiled(x), expected))
del compiled
torch.cuda.synchronize()
print(close(eager(x), expected))
"""


def test_streams_that_others_made_and_destroyed_are_not_used_again(gpu: Gpu) -> None:
    """The default stream is not among those seen: no call ran on it before."""
    assert run_python(DESTROYED, gpu.store).split() == ["1", "True", "True", "True"]
