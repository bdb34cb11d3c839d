"""CUDA graphs at run time: when they are captured, what their outputs are, and what they cost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gpu_runs import Gpu, all_close, close, inputs, run_python

import aotc
from aotc import LibraryError, MissError

pytestmark = pytest.mark.cuda


def test_graphs_are_captured_at_load(gpu: Gpu, graphs: Any) -> None:
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="always"))
    assert graphs.captured == 2  # one for each bucket
    assert all_close(compiled, eager, inputs(3, 4, 64))
    assert (graphs.captured, graphs.replayed) == (2, 3)


def test_lazy_graphs_are_captured_at_the_first_call_of_their_bucket(gpu: Gpu, graphs: Any) -> None:
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="always", capture="lazy"))
    assert graphs.captured == 0
    assert all_close(compiled, eager, inputs(2, 4, 64))
    assert graphs.captured == 1
    assert all_close(compiled, eager, inputs(2, 16, 64))
    assert (graphs.captured, graphs.replayed) == (2, 4)


def test_the_build_s_pick_is_what_runs(gpu: Gpu, graphs: Any) -> None:
    picked = [variant.launch is not None and variant.launch.graph for variant in gpu.artifact("mlp").variants]
    compiled, _ = gpu.loaded("mlp")
    assert graphs.captured == sum(picked)
    for batch in (4, 16):
        compiled(*inputs(1, batch, 64))
    assert graphs.replayed == sum(picked)


@pytest.mark.parametrize(("model", "width", "dtype", "precision", "tolerance"), [
    ("mlp-fp16", 64, torch.float16, "highest", 1e-2),
    ("mlp-bf16", 128, torch.bfloat16, "highest", 5e-2),
    ("mlp-tf32", 256, torch.float32, "high", 5e-3),
])  # fmt: skip
def test_every_dtype_runs_as_a_graph(
    gpu: Gpu, graphs: Any, model: str, width: int, dtype: torch.dtype, precision: str, tolerance: float
) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        compiled, eager = gpu.loaded(model, graphs=aotc.Graphs(use="always"))
        batch = int(str(compiled.artifact.variants[0].bucket["batch"]))
        for x in inputs(3, batch, width):
            assert close(compiled(x.to(dtype)), eager(x.to(dtype)), tolerance)
    finally:
        torch.set_float32_matmul_precision(before)
    assert graphs.replayed == 3


def test_float32_calls_need_the_precision_of_the_build(gpu: Gpu) -> None:
    """TF32 is a mode of the process: compiled code that used it must not answer for a process that does not."""
    compiled, _ = gpu.loaded("mlp-tf32")
    with pytest.raises(MissError, match="precision"):
        compiled(*inputs(1, 64, 256))


# -- outputs ----------------------------------------------------------------------------------------------------------


def test_copied_outputs_are_the_caller_s_to_keep(gpu: Gpu) -> None:
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="always"))
    xs = inputs(20, 4, 64)
    kept = [compiled(x) for x in xs]
    assert all(close(output, eager(x)) for output, x in zip(kept, xs, strict=True))


def test_viewed_outputs_are_overwritten_by_the_next_call(gpu: Gpu) -> None:
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="always", outputs="view"))
    x, other = inputs(2, 4, 64)
    first = compiled(x)
    assert close(first, eager(x))
    second = compiled(other)
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(first, second) and close(first, eager(other))


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_padded_calls_run_the_bucket_s_graph(gpu: Gpu, graphs: Any, outputs: str) -> None:
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="always", outputs=outputs))
    for batch in (16, 3, 1, 4, 9, 15, 2):  # larger calls first: what they leave in static buffers must not show
        (x,) = inputs(1, batch, 64)
        output = compiled(x)
        assert output.shape == (batch, 64) and close(output, eager(x))
    assert graphs.replayed == 7
    assert sum(bucket.padded_calls for bucket in compiled.stats().buckets.values()) == 5


def test_a_range_runs_a_graph_for_its_listed_sizes_and_directly_for_others(gpu: Gpu, graphs: Any) -> None:
    compiled, eager = gpu.loaded("ranged")
    assert graphs.captured == 9
    for rows, replays in ((8, 1), (9, 1), (512, 2), (511, 2), (2, 2), (192, 3), (8, 4)):
        (x,) = inputs(1, rows, 512)
        assert close(compiled(x), eager(x)), rows
        assert graphs.replayed == replays, rows


@pytest.mark.parametrize("launch", ["picked", "always", "never"])
def test_calls_are_answered_whatever_the_concurrency(gpu: Gpu, launch: str) -> None:
    """Of a container of several models one asks for an event that a capture has recorded."""
    compiled, eager = gpu.loaded("ranged", graphs=aotc.Graphs(use=launch), concurrency=2)
    for rows in (8, 9, 512, 511):
        assert all_close(compiled, eager, inputs(3, rows, 512)), rows


RECORDED_ON_ZEROS = """
import sys, torch
from pathlib import Path
import aotc
from gpu_runs import Gpu, close

gpu = Gpu(Path(sys.argv[1]))
with torch.no_grad():
    compiled, eager = gpu.loaded("last", graphs=aotc.Graphs(use="always", capture="lazy"))
    long = torch.randn(2, 4096, 64, device="cuda"), torch.tensor([4095, 4000], device="cuda")
    short = torch.randn(2, 4, 64, device="cuda"), torch.tensor([3, 1], device="cuda")
    for _ in range(2):
        for call in (long, short, long):
            print(close(compiled(*call), eager(*call)))
        compiled.update_weights({name: each.clone() for name, each in eager.named_parameters()})
    torch.cuda.synchronize()
"""


def test_a_graph_is_recorded_on_zeros_whatever_another_one_s_call_has_left(gpu: Gpu) -> None:
    """In a process of its own, which an index that is out of bounds ends."""
    assert run_python(RECORDED_ON_ZEROS, gpu.store).split() == ["True"] * 6


# -- memory -----------------------------------------------------------------------------------------------------------

RESERVED = """
import gc, json, sys, torch, msgspec, aotc
from pathlib import Path
from aotc.runtime.options import Graphs
from bound_files import bind_files
from aotc.runtime.libraries.files import FilesInMemory
from aotc.store.layout.store import Store
from gpu_runs import Gpu

together = sys.argv[2] == "together"
gpu = Gpu(Path(sys.argv[1]))
module, artifact, store = gpu.module("ranged"), gpu.artifact("ranged"), Store.open(Path(sys.argv[1]))
device = torch.device("cuda", 0)
(variant,) = artifact.variants

def attached(sizes):
    launch = msgspec.structs.replace(variant.launch, sizes=tuple(sizes))
    changed = msgspec.structs.replace(artifact, variants=(msgspec.structs.replace(variant, launch=launch),))
    return bind_files(
        changed, lambda v: FilesInMemory(v, store.blobs), module, device,
        read_file=lambda file: store.blobs.load(file, 1 << 26), graphs=Graphs(use="always"),
    )

def reserved():
    torch.cuda.synchronize(); gc.collect(); torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()

with torch.no_grad():
    before = reserved()
    sizes = variant.launch.sizes
    kept = [attached(sizes)] if together else [attached([one]) for one in sizes]
    print(json.dumps({"graphs": len(sizes), "bytes": reserved() - before}))
"""


def test_graphs_of_one_callable_share_their_memory(gpu: Gpu) -> None:
    """Nine graphs in one pool take less than half of what they take in nine callables, workspaces included."""
    together, separately = (
        json.loads(run_python(RESERVED, gpu.store, how).splitlines()[-1]) for how in ("together", "separately")
    )
    assert together["graphs"] == separately["graphs"] == 9
    assert together["bytes"] * 2 < separately["bytes"], (together, separately)


GIVEN_BACK = """
import sys, torch
from pathlib import Path
import aotc
from gpu_runs import Gpu, close, inputs

gpu = Gpu(Path(sys.argv[1]))
with torch.no_grad():
    compiled, eager = gpu.loaded("long-sum", graphs=aotc.Graphs(use="always"))
    (x,) = inputs(1, 16, 16384)
    expected = eager(x)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    print(close(compiled(x), expected))
    torch.cuda.synchronize()
"""


def test_a_graph_outlives_the_workspaces_that_torch_gives_back(gpu: Gpu) -> None:
    """Every capture by `torch.compile` frees them. In a process of its own, which an access to freed memory ends."""
    assert run_python(GIVEN_BACK, gpu.store).split() == ["True"]


# -- what cannot be captured ------------------------------------------------------------------------------------------


def test_a_model_with_a_cpu_operator_runs_directly(gpu: Gpu, graphs: Any) -> None:
    compiled, eager = gpu.loaded("round-trip")
    assert all_close(compiled, eager, inputs(5, 4, 16))
    assert (graphs.captured, graphs.replayed) == (0, 0)


IMPOSSIBLE = """
import sys, torch, aotc
from pathlib import Path
from gpu_runs import Gpu, all_close, inputs

gpu = Gpu(Path(sys.argv[1]))
with torch.no_grad():
    module = gpu.module("round-trip")
    try:
        gpu.load("round-trip", module, graphs=aotc.Graphs(use="always"))
    except aotc.LibraryError as error:
        print("hint" if "cuda_graphs: never" in error.hint else error)
    print(all_close(gpu.load("round-trip", module, graphs=aotc.Graphs(use="never")), module, inputs(3, 4, 16)))
    print(bool(torch.randn(8, device="cuda").isfinite().all()))  # torch's generator waits for the capture's end
    stream, before = torch.cuda.Stream(), torch.cuda.memory_reserved()
    for _ in range(20):  # torch's allocator takes back what another stream has used, but not during a capture
        used = torch.empty(1 << 24, dtype=torch.uint8, device="cuda")
        used.record_stream(stream)
        del used
        torch.cuda.synchronize()
    print(torch.cuda.memory_reserved() - before < 5 << 24)
"""


def test_a_capture_that_fails_says_what_to_do_and_leaves_the_process_well(gpu: Gpu) -> None:
    """In a process of its own: a capture that failed badly would spoil this one."""
    assert issubclass(LibraryError, RuntimeError)
    assert run_python(IMPOSSIBLE, gpu.store).split() == ["hint", "True", "True", "True"]


# -- within a graph of the caller's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("launch", ["always", "never"])
def test_a_call_can_be_captured_in_a_graph_of_the_caller_s(gpu: Gpu, graphs: Any, launch: str) -> None:
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use=launch))
    xs = inputs(4, 4, 64)
    static, stream = xs[0].clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compiled(static)
    torch.cuda.current_stream().wait_stream(stream)
    replayed = graphs.replayed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = compiled(static)
    assert graphs.replayed == replayed
    for x in xs:
        static.copy_(x)
        graph.replay()
        assert close(output, eager(x))
    assert all_close(compiled, eager, xs)


FIRST_CALL_CAPTURED = """
import sys, torch
from pathlib import Path
import aotc
from gpu_runs import Gpu, close, inputs

gpu = Gpu(Path(sys.argv[1]))
compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use=sys.argv[2], capture="lazy"))
(x,) = inputs(1, 4, 64)
module = gpu.module("mlp")
weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
graph = torch.cuda.CUDAGraph()
refused = []
with torch.cuda.graph(graph):
    kept = x * 2
    for attempt in (lambda: compiled(x), lambda: compiled.update_weights(weights), lambda: gpu.load("mlp", module)):
        try:
            attempt()
        except (aotc.LibraryError, aotc.BindError) as error:
            refused.append("captured" in str(error) and bool(error.hint))
graph.replay()
print(*refused, close(kept, x * 2), close(compiled(x), eager(x)))
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    compiled(x)
print(close(compiled(x), eager(x)))
"""


@pytest.mark.parametrize("launch", ["always", "never"])
def test_what_no_capture_can_hold_is_refused_before_it_would_invalidate_it(gpu: Gpu, launch: str) -> None:
    assert run_python(FIRST_CALL_CAPTURED, gpu.store, launch).split() == ["True"] * 6


def test_a_graph_of_the_caller_s_goes_on_reading_the_weights_of_its_capture(gpu: Gpu) -> None:
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="never"))
    (x,) = inputs(1, 4, 64)
    compiled(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = compiled(x)
    expected = eager(x)
    compiled.update_weights({name: tensor * 0 for name, tensor in eager.state_dict().items()})
    overwriting = [torch.full_like(tensor, 7.0) for tensor in eager.state_dict().values() for _ in range(8)]
    graph.replay()
    assert close(output, expected) and overwriting
    assert not close(compiled(x), expected)


# -- threads ----------------------------------------------------------------------------------------------------------


def test_a_second_thread_is_refused_where_outputs_are_views(gpu: Gpu) -> None:
    compiled, eager = gpu.loaded("mlp", graphs=aotc.Graphs(use="always", outputs="view"))
    (x,) = inputs(1, 4, 64)
    assert close(compiled(x), eager(x))
    with ThreadPoolExecutor(1) as other, pytest.raises(LibraryError, match="one thread may call"):
        other.submit(compiled, x).result()
    assert close(compiled(x), eager(x))
