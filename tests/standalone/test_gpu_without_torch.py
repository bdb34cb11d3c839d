"""Code for a GPU without torch, over a stand-in for the driver that keeps the GPU's memory on the host: what is copied,
launched, captured and given back, and what is refused. `tests/cuda/test_cuda_standalone.py` runs real code on a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from processes import finish, start
from small_artifact import small_artifact

from aotc.provenance import BuiltVariant
from aotc.records import (
    Argument,
    Environment,
    LaunchPick,
    Output,
    PadRule,
    Parameter,
    ResultContainer,
    Signature,
    SizeRange,
    StateSpec,
    TensorLeaf,
)
from aotc.standalone.gpu_environment import gpu_mismatches
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store

HERE = Path(__file__).parent / "gpu"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in(tmp_path_factory.mktemp("driver"))


def stand_in(folder: Path, compiler: str = "g++") -> Path:
    """A folder with libcuda.so.1, and a library whose name compiled code links with."""
    compile_library(compiler, folder / "libcuda.so.1", HERE / "driver.cpp", "-Wl,-soname,libcuda.so.1")
    (folder / "empty.cpp").write_text("")
    compile_library(compiler, folder / "libtorch_cuda.so", folder / "empty.cpp", "-Wl,-soname,libtorch_cuda.so")
    return folder


def compile_library(compiler: str, library: Path, source: Path, *options: str) -> None:
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-O1", "-Wall", source, *options, "-o", library]
    subprocess.run([*map(str, command)], check=True)


@pytest.fixture(scope="module")
def store(driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models_for(driver, tmp_path_factory.mktemp("gpu-store"))


def models_for(driver: Path, folder: Path, machine: str = "x86_64", compiler: str = "g++") -> Path:
    """The models of `library.cpp`: `small` of one size, launched as a graph, `ranged`, whose length is padded,
    `needy`, which calls an operator of torch, `copying`, which a graph cannot hold, and `shares`, whose outputs do."""
    names = ["-Wl,--no-as-needed", f"-L{driver}", "-ltorch_cuda", "-l:libcuda.so.1"]
    for name, options in (
        ("model", []),
        ("needy", ["-DNEEDS_TORCH"]),
        ("copying", ["-DCOPIES"]),
        ("shares", ["-DSHARES"]),
    ):
        compile_library(compiler, folder / f"{name}.so", HERE / "library.cpp", *options, *names)
    made = Store.create(folder / "store")
    fixed = {"batch": 2, "length": 4}
    ranged = {"batch": 2, "length": SizeRange(4, 8, multiple_of=4, tune_at=8)}
    graph_of_8 = LaunchPick(graph=True, sizes=({"batch": 2, "length": 8},))
    for name, library, bucket, launch in (
        ("small", "model.so", fixed, LaunchPick(graph=True)),
        ("ranged", "model.so", ranged, graph_of_8),
        ("needy", "needy.so", fixed, None),
        ("copying", "copying.so", fixed, LaunchPick(graph=True)),
        ("direct", "copying.so", fixed, None),
        ("shares", "shares.so", fixed, LaunchPick(graph=True)),
        ("shares-direct", "shares.so", fixed, None),
        ("shares-ranged", "shares.so", ranged, graph_of_8),
    ):
        publish(made, name, "latest", [artifact_of(made, name, folder / library, bucket, launch, machine)])
    return folder / "store"


def artifact_of(
    store: Store, name: str, library: Path, bucket: Any, launch: LaunchPick | None, machine: str = "x86_64"
) -> Any:
    shape, ranged = ("batch", "length", 4), isinstance(bucket["length"], SizeRange)
    pads = {"length": PadRule()} if ranged else {}
    count = 4 if name.startswith("shares") else 1
    outputs = [Output(index=at, dims=("", "length", "") if ranged and at != 2 else ()) for at in range(count)]
    variant = BuiltVariant(
        bucket=bucket,
        key="",
        library=library.name,
        files=(store.blobs.put_file_zstd(library),),
        arguments=(Argument(leaf=0), Argument(leaf=1), Argument(state="count"), Argument(state="weight")),
        outputs=(*outputs, Output(leaf=1)),
        output_tree=ResultContainer("tuple", tuple(range(len(outputs) + 1))),
        padded=("length",) if ranged else (),
        mutated_leaves=(1,),
        mutated_state=("count",),
        launch=launch,
    )
    return small_artifact(
        model=name,
        target="cuda:sm_90" if machine == "x86_64" else f"cuda:sm_90@{machine}",
        environment=Environment(
            os="linux", machine=machine, torch="2.13.0", cuda_capability="9.0", cuda="13.0", gpu="a GPU"
        ),
        signature=Signature(
            (Parameter("x", 0), Parameter("total", 1)),
            (TensorLeaf("x", "float32", shape, pad=pads), TensorLeaf("total", "float32", ("batch", 4))),
            make_contiguous=True,
        ),
        state=(StateSpec("count", "float32", (1,), (1,)), StateSpec("weight", "float32", (4,), (1,))),
        variants=(variant,),
    )


BEGIN = """
import ctypes, gc, sys, threading
import numpy
import aotc.standalone
from aotc.errors import *
from aotc.standalone.cpu_environment import open_cpu

driver = ctypes.CDLL("libcuda.so.1")
driver.stand_in_count.restype = driver.stand_in_memory.restype = ctypes.c_longlong
count = lambda name: driver.stand_in_count(name.encode())
weight = numpy.array([1, 2, 3, 4], numpy.float32)
store = sys.argv[1]

def load(name="small", **options):
    weights = {"count": numpy.zeros(1, numpy.float32), "weight": weight}
    return aotc.standalone.load(f"{store}#{name}", weights=weights, **{"device": "cuda", **options})

def inputs(length=4):
    return numpy.arange(2 * length * 4, dtype=numpy.float32).reshape(2, length, 4), numpy.zeros((2, 4), numpy.float32)

def refused(error, run):
    try:
        run()
    except error as raised:
        return str(raised)
    raise AssertionError("nothing was raised")
"""


def run(driver: Path, store: Path, code: str, *arguments: str, **changes: str) -> str:
    """What the code prints, in a process without torch over the stand-in for the driver."""
    ran = finish(start("-c", BEGIN + code, store, *arguments, LD_LIBRARY_PATH=str(driver), **changes))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


# -- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_gives_what_the_kernels_compute_and_writes_what_they_write(driver: Path, store: Path) -> None:
    """As a graph, which was captured at the load: a call launches nothing by itself."""
    run(
        driver,
        store,
        """
model = load()
captured = count("launches")
x, total = inputs()
for calls in (1, 2, 3):
    y = model(x, total)[0]
    assert type(y) is numpy.ndarray and (y == x * weight).all()
    assert (total == calls).all()
assert count("launches") == captured == 8 and count("runs") == 4 + 3 * 4
stats = model.stats()
assert stats.calls == stats.graph_launches == 3 and stats.gpu_bytes > stats.free_gpu_bytes >= 0
assert "torch" not in sys.modules
""",
    )


def test_outputs_that_share_memory_share_it_in_each_call_s_results(driver: Path, store: Path) -> None:
    """As in eager, where a later write to one shows in the other."""
    run(
        driver,
        store,
        """
model = load("shares")
core = open_cpu()
x, total = inputs()
there = core.to_gpu([core.view(x), core.view(total)], 0)
calls = [model(*there) for _ in range(2)]
assert model.stats().graph_launches == 2
for result, turned, but_one, other, _ in calls:
    assert turned.address == result.address and but_one.address == result.address + 4
    assert not 0 <= other.address - result.address < 128
    read = lambda tensor: numpy.asarray(memoryview(core.to_host([tensor])[0]))
    assert (read(result) == x * weight).all() and (read(turned) == (x * weight).T).all()
    assert (read(but_one) == (x * weight).ravel()[1:]).all() and (read(other) == x * weight).all()
assert calls[0][0].address != calls[1][0].address
for model in (model, load("shares-direct")):
    result, turned, but_one, other, _ = model(x, total)  # in the CPU's memory
    assert (result == x * weight).all() and (other == x * weight).all() and not numpy.shares_memory(result, other)
    result[:] = numpy.arange(32).reshape(result.shape)
    assert (turned == result.T).all() and (but_one == result.ravel()[1:]).all() and (other == x * weight).all()
""",
    )


def test_views_among_the_results_of_a_padded_call_are_views_of_what_is_left(driver: Path, store: Path) -> None:
    """As a graph and directly, on a GPU and in the CPU's memory; the third result needs the pad of the first."""
    run(
        driver,
        store,
        """
model = load("shares-ranged")
core = open_cpu()
for length in (3, 5):
    x, total = inputs(length)
    there = core.to_gpu([core.view(x), core.view(total)], 0)
    result, turned, but_one, other, _ = model(*there)
    assert turned.address == result.address and not 0 <= other.address - result.address < x.nbytes
    assert result.strides == (length * 4, 4, 1) and turned.strides == (1, 4, length * 4)
    result, turned, but_one, other, _ = model(x, total)
    assert (turned == (x * weight).T).all() and (other == x * weight).all()
    result[:] = numpy.arange(x.size).reshape(x.shape)
    assert (turned == result.T).all() and (other == x * weight).all()
    assert not numpy.shares_memory(result, but_one)
assert model.stats().graph_launches == 2 and model.stats().padded_calls == 4
""",
    )


def test_a_call_of_other_sizes_is_launched_directly_and_padded(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
model = load("ranged")
before = count("launches")
for length, launches, graphs in ((4, 4, 0), (5, 4, 1), (8, 4, 2)):
    x, total = inputs(length)
    y = model(x, total)[0]
    assert y.shape == x.shape and (y == x * weight).all() and (total == 1).all()
    assert (count("launches") - before, model.stats().graph_launches) == (launches, graphs)
assert model.stats().padded_calls == 1
""",
    )


def test_a_layout_is_made_contiguous_on_its_way_and_counted(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
model = load()
x, total = inputs()
turned = numpy.asfortranarray(x)
assert (model(turned, total)[0] == x * weight).all() and model.stats().contiguous_copies == 1
""",
    )


def test_weights_are_swapped_and_a_graph_is_captured_anew(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
model = load()
x, total = inputs()
model(x, total)
graphs = count("graphs")
held = model.stats().gpu_bytes - model.stats().free_gpu_bytes
older = model._state
model.update_weights({"weight": weight * 2})
assert (model(x, total)[0] == x * weight * 2).all()
assert model.stats().graph_launches == 2 and count("graphs") == graphs
kept, model._state = model._state, older  # as a call that has begun before the swap
assert (model(x, total)[0] == x * weight).all() and model.stats().graph_launches == 2
model._state = kept
assert (model(x, total)[0] == x * weight * 2).all() and model.stats().graph_launches == 3
del older
assert model.stats().gpu_bytes - model.stats().free_gpu_bytes == held
""",
    )


def test_a_load_and_a_capture_leave_the_module_s_buffers_as_they_were(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
model = load()
counted = lambda: float(numpy.asarray(memoryview(open_cpu().to_host([model._state[0]])[0]))[0])
assert counted() == 0
model(*inputs())
assert counted() == 1
""",
    )


# -- arrays -----------------------------------------------------------------------------------------------------------


def test_arrays_on_the_gpu_are_read_there_and_results_lie_there(driver: Path, store: Path) -> None:
    """A tensor of ours stands for another library's array: it speaks DLPack, and is asked with our stream."""
    run(
        driver,
        store,
        """
core = open_cpu()

class Array:
    def __init__(self, tensor):
        self.tensor, self.streams = tensor, []
    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()
    def __dlpack__(self, *, stream=None, max_version=None):
        self.streams.append(stream)
        return self.tensor.__dlpack__(stream=stream, max_version=max_version)

model = load()
x, total = inputs()
there, into = map(Array, core.to_gpu([core.view(x), core.view(total)], 0))
y = model(there, into)[0]
assert y.__dlpack_device__() == (2, 0) and there.streams and all(there.streams)
assert (numpy.asarray(memoryview(core.to_host([y])[0])) == x * weight).all()
assert (numpy.asarray(memoryview(core.to_host([into.tensor])[0])) == 1).all() and not total.any()
assert (numpy.from_dlpack(y, device="cpu") == x * weight).all()
refused(BufferError, lambda: memoryview(y))
other = Array(there.tensor)
other.__dlpack_device__ = None
class Elsewhere(Array):
    def __dlpack_device__(self):
        return 2, 1
assert "device 2:1 of DLPack, and not on GPU 0" in refused(MissError, lambda: model(Elsewhere(there.tensor), into))
""",
        STAND_IN_GPUS="2",
    )


def test_an_array_whose_buffer_fails_is_read_by_dlpack(driver: Path, store: Path) -> None:
    """As one of JAX that lies on a GPU."""
    run(
        driver,
        store,
        """
core = open_cpu()
core.open_gpu(0)
[there] = core.to_gpu([core.view(weight)], 0)

class Array(numpy.ndarray):
    def __dlpack_device__(self):
        return there.__dlpack_device__()
    def __dlpack__(self, **options):
        return there.__dlpack__(**options)

array = numpy.zeros(1, "M8[s]").view(Array)
assert "buffer" in refused(ValueError, lambda: memoryview(array))
assert core.view(array, 0).address == there.address
assert "device 2:0 of DLPack, and not in the CPU's memory" in refused(BufferError, lambda: core.view(array))
""",
    )


def test_memory_that_another_library_was_given_is_used_again_once_the_device_has_done_its_work(
    driver: Path, store: Path
) -> None:
    run(
        driver,
        store,
        """
core = open_cpu()
model = load()
x, total = core.to_gpu([core.view(each) for each in inputs()], 0)
kept = model(x, total)[0]
capsule = kept.__dlpack__(max_version=(1, 0))
del kept
waited, held = count("cuCtxSynchronize"), model.stats().gpu_bytes
del capsule
for _ in range(5):
    model(x, total)
assert count("cuCtxSynchronize") <= waited + 1 and model.stats().gpu_bytes == held
""",
    )


def test_memory_is_handed_out_once_its_work_is_done(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
core = open_cpu()
core.open_gpu(0)
x = core.copied(*core.to_gpu([core.view(inputs()[0])], 0))  # a copy that was enqueued, and no more
waited = count("cuStreamSynchronize")
x.__dlpack__(max_version=(1, 0))
assert count("cuStreamSynchronize") == waited + 1
""",
    )


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_calls_and_is_given_back(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
model = load()
x, total = inputs()
model(x, total)
held = driver.stand_in_memory()
for _ in range(1000):
    model(x, total)
assert driver.stand_in_memory() == held
model.close()
assert driver.stand_in_memory() == 0 and count("graphs") == 0
assert "was closed" in refused(LibraryError, lambda: model(x, total))
assert (load()(x, total)[0] == x * weight).all()
""",
    )


def test_freed_blocks_are_given_to_the_driver_where_there_is_no_more(driver: Path, store: Path) -> None:
    """A load that needs them gets them; one that needs more says how much there is."""
    run(
        driver,
        store,
        """
core = open_cpu()
load().close()
place = lambda bytes: core.to_gpu([core.view(numpy.zeros(bytes, numpy.uint8))], 0)
large = place(600_000)
del large
other = place(900_000)
assert "CUDA_ERROR_OUT_OF_MEMORY" in refused(core.GpuError, lambda: place(500_000))
del other
assert load()(*inputs())[0].shape == (2, 4, 4)
""",
        STAND_IN_MEMORY="1000000",
    )


def test_large_weights_go_through_pinned_buffers(driver: Path, store: Path) -> None:
    """By several threads, also where no memory can be pinned. A copy that fails in one of them fails the whole."""
    run(
        driver,
        store,
        """
core = open_cpu()
core.open_gpu(0)
values = numpy.arange(65 << 20, dtype=numpy.uint32)  # of 260 MiB
small, transposed = numpy.arange(5, dtype=numpy.int16), numpy.arange(12.0).reshape(3, 4).T
tensors = [core.view(each) for each in (small, values, transposed)]

def same(there):
    came = [numpy.asarray(memoryview(core.to_host([each])[0])) for each in there]
    assert all((one == other).all() for one, other in zip(came, (small, values, transposed), strict=True))

same(core.to_gpu(tensors, 0))
assert count("cuMemHostAlloc") == 2
driver.stand_in_fail(b"cuMemHostAlloc", 2)
there = core.to_gpu(tensors, 0)
same(there)
again = core.to_gpu(there, 0)
assert [each.address for each in again] == [each.address for each in there]
del there, again
driver.stand_in_fail(b"cuEventRecord", 999)
assert "cuEventRecord" in refused(core.GpuError, lambda: core.to_gpu(tensors, 0))
same(core.to_gpu(tensors, 0))
""",
        STAND_IN_MEMORY=str(2 << 30),
    )


def test_a_fetch_without_torch_takes_the_code_for_this_gpu(driver: Path, store: Path, tmp_path: Path) -> None:
    code = """
sys.modules["torch"] = None  # as where it is not installed
import aotc
from pathlib import Path
fetch = lambda: aotc.fetch(f"{Path(store).as_uri()}#small", store=sys.argv[2])
"""
    fetched = """
weights = {"count": numpy.zeros(1, numpy.float32), "weight": weight}
model = aotc.standalone.load(fetch(), weights=weights, device="cuda")
x, total = inputs()
assert (model(x, total)[0] == x * weight).all()
"""
    forked = """
import os
ref = fetch()
if not (child := os.fork()):  # which a GPU that was opened here could not be used in
    weights = {"count": numpy.zeros(1, numpy.float32), "weight": weight}
    os._exit(0 if aotc.standalone.load(ref, weights=weights, device="cuda")(*inputs()) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    run(driver, store, code + forked + fetched, str(tmp_path / "fetched"))
    told = "print(refused(EnvironmentMismatchError, fetch))"
    out = run(driver, store, code + told, str(tmp_path / "none"), STAND_IN_GPUS="0")
    assert "GPU 0 cannot be used" in out
    out = run(driver, store, code + told, str(tmp_path / "none"), STAND_IN_CAPABILITY="80")
    assert "built for cuda:sm_90, this GPU (Stand-in GPU) is cuda:sm_80" in out


def test_a_load_without_room_says_both_values(driver: Path, store: Path) -> None:
    out = run(
        driver,
        store,
        """
try:
    load()
except MemoryLimitError as error:
    print(error, error.fields["asked"], error.fields["limit"])
""",
        STAND_IN_MEMORY="1000",
    )
    assert "the GPU has too little memory: 0.0 MiB were asked for at once" in out and out.split()[-2:] == [
        "512",
        "1000",
    ]


def test_a_capture_needs_no_temporaries_beside_those_of_its_graph(driver: Path, store: Path) -> None:
    """Of 512 bytes each: 2 tensors of the module and a copy of one, 2 inputs and the graph's 2, its result and what it
    computes on its way. The run before the capture needs the last two as well."""
    run(driver, store, "assert load()(*inputs())[0].shape == (2, 4, 4)", STAND_IN_MEMORY=str(9 * 512))


def test_threads_call_in_turn(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
model = load()
wrong = []
def calls(factor):
    x, total = inputs()
    x *= factor
    for _ in range(100):
        wrong.extend([] if (model(x, total)[0] == x * weight).all() else [factor])
threads = [threading.Thread(target=calls, args=[factor]) for factor in range(1, 5)]
[each.start() for each in threads], [each.join() for each in threads]
assert not wrong and model.stats().graph_launches == 400
""",
    )


def test_a_capture_and_the_work_of_other_threads_leave_one_another_alone(driver: Path, store: Path) -> None:
    """Another thread copies, waits for the GPU, and uses memory again that another library has given back."""
    run(
        driver,
        store,
        """
core = open_cpu()
model = load()
x, total = inputs()
failed, done = [], threading.Event()
large = numpy.arange(10_000, dtype=numpy.float32)  # of which no other block is free

def others():
    try:
        while not done.wait(0.0003):  # so that it comes at any point of a capture
            there = None
            [there] = core.to_gpu([core.view(large)], 0)
            there.__dlpack__(max_version=(1, 0))
            assert (numpy.asarray(memoryview(core.to_host([there])[0])) == large).all()
    except Exception as error:
        failed.append(error)

thread = threading.Thread(target=others)
thread.start()
for factor in range(1, 301):
    model.update_weights({"weight": weight * factor})
    assert (model(x, total)[0] == x * weight * factor).all()
done.set()
thread.join()
assert not failed, failed
assert model.stats().graph_launches == 300 and count("cuCtxSynchronize") > 0
""",
    )


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_of_the_driver_is_that_of_its_call_and_has_its_name(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
model = load()
x, total = inputs()
driver.stand_in_fail(b"cuGraphLaunch", 2)
assert "cuGraphLaunch: CUDA_ERROR_OUT_OF_MEMORY (2)" in refused(LibraryError, lambda: model(x, total))
assert (model(x, total)[0] == x * weight).all()
driver.stand_in_fail(b"cuStreamSynchronize", 700)
said = refused(LibraryError, lambda: model(x, total))
assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in said and "start another" in said
assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in refused(LibraryError, lambda: model(x, total))
del model
gc.collect()
""",
    )


def test_an_error_is_told_once_the_work_before_it_is_done(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
model = load("ranged")
x, total = inputs(4)
for function in (b"cuLaunchKernel", b"cuMemcpyAsync"):
    waited = count("cuStreamSynchronize")
    driver.stand_in_fail(function, 1)
    refused(LibraryError, lambda: model(x, total))
    assert count("cuStreamSynchronize") > waited
driver.stand_in_fail(b"cuLaunchKernel", 700)
said = refused(LibraryError, lambda: model(x, total))
assert "cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in said and "start another" in said
""",
    )


def test_a_capture_of_copies_from_the_cpu_is_refused_and_a_direct_launch_is_not(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
said = refused(LibraryError, lambda: load("copying"))
assert "the model cannot be captured as a CUDA graph: it copies from the CPU within it" in said, said
assert "cuda_graphs: never" in said and "driver failed" not in said
x, total = inputs()
assert (load("direct")(x, total)[0] == x * weight).all()
""",
    )


def test_a_lost_gpu_is_not_told_as_too_little_memory(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
driver.stand_in_fail(b"cuMemAlloc_v2", 700)
said = refused(LibraryError, load)
assert "cuMemAlloc: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in said and "start another" in said
""",
    )


def test_functions_of_cuda_s_runtime_give_the_driver_s_code_and_follow_our_stream(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
core = open_cpu()
core.open_gpu(0)
runtime, made, value, four = ctypes.CDLL(core.__file__), ctypes.c_void_p(), (ctypes.c_int * 2)(7, 0), ctypes.c_size_t(4)
assert runtime.cudaMalloc(ctypes.byref(made), four) == 201  # no device is this thread's
assert runtime.cudaSetDevice(0) == runtime.cudaMalloc(ctypes.byref(made), four) == 0
into = ctypes.c_void_p(ctypes.addressof(value) + 4)
waited = count("cuStreamSynchronize")
assert runtime.cudaMemcpy(made, value, four, 1) == runtime.cudaMemcpy(into, made, four, 2) == 0
assert value[1] == 7 and count("cuStreamSynchronize") == waited + 2
driver.stand_in_fail(b"cuMemAlloc_v2", 2)
assert runtime.cudaMalloc(ctypes.byref(made), four) == 0  # once freed memory is given back
driver.stand_in_fail(b"cuMemAlloc_v2", 700)
assert runtime.cudaMalloc(ctypes.byref(made), four) == 700
""",
    )


def test_an_error_within_the_library_has_the_library_s_words(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
model = load("ranged")
x, total = inputs(4)
driver.stand_in_fail(b"cuLaunchKernel", 1)
said = refused(LibraryError, lambda: model(x, total))
assert "bucket batch=2,length=4..8 step 4 failed: CUDA driver error: CUDA: CUDA_ERROR (1)" in said, said
driver.stand_in_fail(b"cuMemAlloc_v2", 2)
assert (model(x, total)[0] == x * weight).all()
""",
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"STAND_IN_GPUS": "0"}, "GPU 0 cannot be used: the GPU's driver failed: cuInit: CUDA_ERROR_NO_DEVICE (100)"),
        ({"STAND_IN_CAPABILITY": "80"}, "built for cuda:sm_90, this GPU (Stand-in GPU) is cuda:sm_80"),
        ({"STAND_IN_CUDA": "12080"}, "built with CUDA 13.0, this machine's driver runs code of up to CUDA 12.8"),
    ],
)
def test_another_gpu_or_driver_is_refused_with_both_values(
    driver: Path, store: Path, changes: dict[str, str], said: str
) -> None:
    assert said in run(driver, store, "print(refused(EnvironmentMismatchError, load))", **changes)


def test_without_a_driver_a_gpu_is_refused_and_a_cpu_is_not_asked_for(tmp_path: Path, store: Path) -> None:
    code = "\n".join(line for line in BEGIN.splitlines() if "driver" not in line)
    ran = finish(start("-c", code + "\nprint(refused(EnvironmentMismatchError, load))", store))
    assert "there is no driver of NVIDIA here: libcuda.so.1" in ran.stdout, ran.stderr
    ran = finish(start("-c", code + "\nprint(refused(EnvironmentMismatchError, lambda: load(device=None)))", store))
    assert "it is to run on cpu" in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    ("function", "code", "hint"),
    [
        ("cuInit", 100, "install NVIDIA's driver"),
        ("cuInit", 3, "as `aotc.early` does"),
        ("cuDevicePrimaryCtxRetain", 700, "start another"),
    ],
)
def test_a_gpu_that_cannot_be_opened_has_the_hint_of_its_error(
    driver: Path, store: Path, function: str, code: int, hint: str
) -> None:
    out = run(
        driver,
        store,
        f"""
driver.stand_in_fail(b"{function}", {code})
print(refused(EnvironmentMismatchError, load))
""",
    )
    assert f"{function}: CUDA_ERROR" in out and out.count("hint:") == 1 and hint in out


@pytest.mark.parametrize(
    ("capability", "cuda", "runs"), [("9.0", "13.0", True), ("10.0", "13.0", False), ("10.0", "13.1", True)]
)
def test_ptx_needs_a_driver_of_its_minor_version(tmp_path: Path, capability: str, cuda: str, runs: bool) -> None:
    """CUDA's minor versions run one another's code of a GPU (9.0 here), and compile no later PTX."""
    fixed = {"batch": 2, "length": 4}
    (tmp_path / "model.so").touch()
    artifact = artifact_of(Store.create(tmp_path / "store"), "small", tmp_path / "model.so", fixed, None)
    needed = msgspec.structs.replace(artifact.environment, ptx=True, cuda="13.1")
    here = msgspec.structs.replace(needed, cuda_capability=capability, cuda=cuda)
    issues = gpu_mismatches(msgspec.structs.replace(artifact, environment=needed), here)
    said = f"built with CUDA 13.1, this machine's driver runs code of up to CUDA {cuda}"
    assert (said in [issue.message for issue in issues]) is not runs


def test_what_the_runtime_lacks_and_a_number_that_there_is_none_of_are_refused(driver: Path, store: Path) -> None:
    out = run(
        driver,
        store,
        """
print(refused(LibraryError, lambda: load("needy")))
print(refused(EnvironmentMismatchError, lambda: load(device="cuda:3")))
print(refused(BindError, lambda: load(device="gpu")))
""",
    )
    assert "calls torch's operator `mm_out`" in out
    assert "there is no GPU 3, the driver sees 1" in out and "device is 'gpu'" in out


def test_the_second_gpu_is_used_by_its_number(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
first, second = load(), load(device="cuda:1")
x, total = inputs()
assert (first(x, total)[0] == x * weight).all() and (second(x, total)[0] == x * weight).all()
assert (second.stats().calls, second.stats().graph_launches) == (1, 1)
assert second._state[0].__dlpack_device__() == (2, 1)
""",
        STAND_IN_GPUS="2",
    )


def test_a_context_that_was_begun_early_is_that_of_the_load(driver: Path, store: Path) -> None:
    early = """
import sys
import aotc.early
aotc.early.start(sys.argv[1] + "#small", cuda=True)
assert not {"msgspec", "numpy", "torch"} & sys.modules.keys()
"""
    code = """
aotc.early.wait()
assert count("cuInit") == count("cuDevicePrimaryCtxRetain") == 1
assert aotc.early.report()["ms"].keys() == {"context", "store"} and not aotc.early.report()["failed"]
x, total = inputs()
model = load(trust=aotc.Trust(allow_untested=True))
assert (model(x, total)[0] == x * weight).all()
assert count("cuDevicePrimaryCtxRetain") == 2
assert not {"torch", "aotc.store.signing.trust"} & sys.modules.keys()  # signatures are not looked at
"""
    ran = finish(start("-c", early + BEGIN + code, store, LD_LIBRARY_PATH=str(driver)))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_child_of_a_process_that_found_no_such_gpu_is_told_of_the_fork(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
import os
refused(EnvironmentMismatchError, lambda: load(device="cuda:1"))
if (child := os.fork()) == 0:
    said = refused(EnvironmentMismatchError, load)
    os._exit(0 if "load in the child alone" in said and "hint" not in said else 1)
assert os.waitpid(child, 0)[1] == 0
""",
    )


def test_a_forked_child_is_told_to_load_by_itself(driver: Path, store: Path) -> None:
    run(
        driver,
        store,
        """
import os
model = load()
x, total = inputs()
if (child := os.fork()) == 0:
    said = refused(LibraryError, lambda: model(x, total))
    os._exit(0 if "load in the child alone" in said else 1)
assert os.waitpid(child, 0)[1] == 0
assert (model(x, total)[0] == x * weight).all()
""",
    )
