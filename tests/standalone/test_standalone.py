"""Compiled code in a process without torch: which code ran, what it gave, and what is refused."""

from __future__ import annotations

import array
import ctypes
import gc
import importlib.util
import json
import mmap
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from processes import ROOT, finish, run_python, start
from safetensors.torch import save_file

import aotc
import aotc.standalone
from aotc.core import _cpu
from aotc.errors import BindError, LibraryError, MissError
from aotc.shim import FUNCTIONS, GPU_FUNCTIONS, OPERATORS
from aotc.standalone.cpu_environment import usable_features

HERE = Path(__file__).parent
TOLERANCE = 2e-5  # of float32, whose sums are taken in another order


def module_of(file: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_case(folder: Path, name: str, ref: str, module: torch.nn.Module, *inputs: torch.Tensor) -> dict[str, str]:
    """A model's weights, inputs and eager results, for `without_torch.py`."""
    with torch.no_grad():
        result = module(*inputs)
    results = [result] if isinstance(result, torch.Tensor) else [*result.values()]
    arrays = {f"x{index}": each.numpy() for index, each in enumerate(inputs)}
    arrays |= {f"y{index}": each.numpy() for index, each in enumerate(results)}
    numpy.savez(folder / f"{name}.npz", **arrays)
    tensors = {key: value.contiguous() for key, value in module.state_dict().items() if "head.weight" not in key}
    save_file(tensors, folder / f"{name}.safetensors")
    return {"name": name, "ref": ref}


def run_without_torch(folder: Path, cases: list[dict[str, str]]) -> dict[str, Any]:
    (folder / "cases.json").write_text(json.dumps(cases))
    ran = finish(start(HERE / "without_torch.py", folder))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    return told


def check_told(told: dict[str, Any], cases: list[dict[str, str]]) -> None:
    assert told["imported"] == []
    assert not [name for name in told["mapped"] if "torch" in name or "c10" in name]
    assert "_cpu.abi3.so" in told["mapped"]
    for case in cases:
        of = told[case["name"]]
        assert max(of["differences"]) < TOLERANCE, case["name"]
        assert all(of["shapes"]) and set(of["types"]) == {"ndarray"} and of["calls"] == 1


@pytest.fixture(scope="module")
def linear(zoo_store: Path) -> tuple[str, dict[str, numpy.ndarray], Callable[[numpy.ndarray], numpy.ndarray]]:
    """The reference of the zoo's linear layer, weights as arrays, and what it computes, by numpy."""
    rng = numpy.random.default_rng(0)
    weight, bias = (rng.standard_normal(shape).astype(numpy.float32) for shape in ((8, 8), (8,)))
    weights = {"linear.weight": weight, "linear.bias": bias}
    return f"{zoo_store}#linear", weights, lambda x: numpy.maximum(x @ weight.T + bias, 0)


@pytest.fixture
def x() -> numpy.ndarray:
    return numpy.random.default_rng(1).standard_normal((2, 8)).astype(numpy.float32)


# -- values and which code gave them -----------------------------------------------------------------------------------


def test_models_of_the_zoo_give_eager_s_values_without_torch(zoo_store: Path, tmp_path: Path, zoo: Any) -> None:
    shapes = module_of(ROOT / "tests" / "zoo" / "shape_models.py", "shape_models_of_zoo")
    torch.manual_seed(0)
    cases = [
        write_case(tmp_path, name, f"{zoo_store}#{name}", module.eval(), *inputs)
        for name, module, inputs in (
            ("linear", zoo.Linear(), [torch.randn(4, 8)]),
            ("ranged", zoo.Block(), [torch.randn(1, 77, 32)]),
            ("repeated", zoo.Repeated(), [torch.randn(128, 256)]),
            ("tied", zoo.Tied(), [torch.randint(0, 16, (4,))]),
            ("convolution", shapes.Convolution(), [torch.randn(16, 3, 8, 8)]),
        )
    ]
    check_told(run_without_torch(tmp_path, cases), cases)


def test_models_of_libraries_give_eager_s_values_without_torch(shared_folder: Path, tmp_path: Path, built: Any) -> None:
    store = built(shared_folder, "libraries-store", HERE / "libraries.yaml")
    models = module_of(HERE / "library_models.py", "library_models")
    ids, mask = torch.randint(0, 128, (2, 16)), torch.ones(2, 16, dtype=torch.int64)
    mask[0, 9:] = 0
    cases = [
        write_case(tmp_path, "bert", f"{store}#bert", models.bert(), ids, mask),
        write_case(tmp_path, "bert-without-mask", f"{store}#bert", models.bert(), ids),
        write_case(tmp_path, "resnet", f"{store}#resnet", models.resnet(), torch.randn(1, 3, 64, 64)),
    ]
    check_told(run_without_torch(tmp_path, cases), cases)


def test_a_process_may_hold_torch_and_the_standalone_runtime(zoo_store: Path, linear: Any, x: numpy.ndarray) -> None:
    ref, weights, expected = linear
    model = aotc.standalone.load(ref, weights=weights)
    tensors = {name: torch.from_numpy(each) for name, each in weights.items()}
    compiled = aotc.load(ref, weights=tensors)
    for _ in range(2):
        assert abs(model(x) - expected(x)).max() < TOLERANCE
        assert abs(compiled(torch.from_numpy(x)).numpy() - expected(x)).max() < TOLERANCE
    assert (model.stats().calls, compiled.stats().calls) == (2, 2)


def test_frozen_weights_are_those_of_the_store(zoo_store: Path) -> None:
    model, compiled = aotc.standalone.load(f"{zoo_store}#frozen"), aotc.load(f"{zoo_store}#frozen")
    given = torch.randn(2, 64)
    assert abs(model(given) - compiled(given)).max() < TOLERANCE and model.stats().calls == 1


def test_many_threads_may_call_and_nothing_is_left_behind(zoo_store: Path, tmp_path: Path) -> None:
    """Four threads, two calls at a time within the library; memory does not grow with calls."""
    weight = numpy.random.default_rng(0).standard_normal((256, 256)).astype(numpy.float32) / 16
    model = aotc.standalone.load(f"{zoo_store}#repeated", weights={"weight": weight}, concurrency=2)
    given = numpy.random.default_rng(1).standard_normal((128, 256)).astype(numpy.float32)
    first = model(given)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda _: model(given), range(40)):
            pass
        before = resident()
        same = list(pool.map(lambda _: bool((model(given) == first).all()), range(200)))
    assert all(same) and model.stats().calls == 241
    assert resident() - before < 100 * first.nbytes


def test_neither_numpy_nor_torch_is_needed(zoo_store: Path, linear: Any, tmp_path: Path) -> None:
    ref, weights, expected = linear
    save_file({name: torch.from_numpy(each) for name, each in weights.items()}, tmp_path / "w.safetensors")
    code = """
import array, sys, aotc.standalone
model = aotc.standalone.load(sys.argv[1], weights=sys.argv[2])
given = memoryview(array.array("f", range(16))).cast("B").cast("f", [2, 8])
print(model(given).tolist(), [name for name in sys.modules if name in ("numpy", "torch")])
"""
    rows = expected(numpy.arange(16, dtype=numpy.float32).reshape(2, 8))
    given, imported = run_python(code, ref, tmp_path / "w.safetensors").rsplit(" ", 1)
    assert imported.strip() == "[]" and numpy.allclose(json.loads(given), rows, atol=1e-4)


# -- arrays ------------------------------------------------------------------------------------------------------------


def test_results_are_of_the_library_of_the_first_input(linear: Any, x: numpy.ndarray) -> None:
    ref, weights, expected = linear
    model = aotc.standalone.load(ref, weights=weights)
    of_numpy, of_torch = model(x), model(torch.from_numpy(x))
    of_buffer = model(memoryview(array.array("f", x.ravel())).cast("B").cast("f", [2, 8]))
    assert (type(of_numpy), type(of_torch), type(of_buffer)) == (numpy.ndarray, torch.Tensor, memoryview)
    for each in (of_numpy, of_torch, of_buffer):
        assert abs(numpy.asarray(each) - expected(x)).max() < TOLERANCE
    of_numpy += 1  # it is the caller's own
    assert abs(model(x) - expected(x)).max() < TOLERANCE


def test_an_input_is_read_where_it_lies_and_is_not_written_to(linear: Any, x: numpy.ndarray) -> None:
    ref, weights, expected = linear
    model = aotc.standalone.load(ref, weights=weights)
    x.flags.writeable = False
    before = x.copy()
    assert abs(model(x) - expected(x)).max() < TOLERANCE
    assert (x == before).all() and _cpu.view(x).address == x.ctypes.data
    wide = numpy.zeros((3, 8), numpy.float32)
    wide[1:] = x
    assert abs(model(wide[1:]) - expected(x)).max() < TOLERANCE


def test_what_is_written_must_be_writable_and_is_written_where_it_lies(zoo_store: Path) -> None:
    model = aotc.standalone.load(f"{zoo_store}#accumulating", weights={})
    memory, x = bytearray(4 * 6 * 4), numpy.ones((4, 6), numpy.float32)
    total = memoryview(memory).cast("f", [4, 6])
    result = model(total, x)
    assert result["total"] is total and memory == x.tobytes() and type(result["first"]) is memoryview
    frozen = numpy.zeros((4, 6), numpy.float32)
    frozen.flags.writeable = False
    with pytest.raises(MissError, match="the model writes to it, and it is read-only"):
        model(frozen, x)
    assert not frozen.any() and model(x, frozen)["first"].flags.writeable is False


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x.astype(numpy.float64), "dtype float32 is expected, float64 came"),
        (lambda x: x.astype(">f4"), "cannot be read: its items are"),
        (lambda x: numpy.asfortranarray(x), "the layout contiguous is expected"),
        (lambda x: numpy.repeat(x, 2, axis=1)[:, ::2], "the layout contiguous is expected"),
        (lambda x: x[:, ::-1], "the layout contiguous is expected"),
        (
            lambda x: numpy.frombuffer(b"\0" + x.tobytes(), numpy.float32, offset=1).reshape(2, 8),
            "is not aligned to 4 bytes",
        ),
        (lambda x: x[:0], "batch is 0"),
        (lambda x: x[0], "shape [batch, 8] is expected"),
        (lambda x: x.tolist(), "a tensor is expected"),
        (lambda x: None, "a tensor is expected, None came"),
        (lambda x: numpy.array([object()] * 16).reshape(2, 8), "cannot be read"),
        (lambda x: torch.from_numpy(x).requires_grad_(), "cannot be read"),
        (lambda x: _OnDevice(2), "lies on the device 2:0"),
    ],
)
def test_another_input_is_a_miss_that_says_why(linear: Any, x: numpy.ndarray, make: Any, words: str) -> None:
    ref, weights, expected = linear
    model = aotc.standalone.load(ref, weights=weights)
    with pytest.raises(MissError) as caught:
        model(make(x))
    assert words in str(caught.value)
    assert model.stats().misses == 1 and abs(model(x) - expected(x)).max() < TOLERANCE


class _OnDevice:
    """An array that says it lies on a device, and must not be asked for."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError("it was asked for its memory")


def test_a_layout_that_the_model_copies_is_copied_and_counted(zoo_store: Path, linear: Any, x: numpy.ndarray) -> None:
    model = aotc.standalone.load(f"{zoo_store}#autocast", weights=linear[1])
    plain, turned = model(torch.from_numpy(x)), model(torch.from_numpy(numpy.asfortranarray(x)))
    assert torch.equal(plain, turned) and model.stats().contiguous_copies == 1


def test_a_result_lives_as_long_as_its_consumer_wants(linear: Any, x: numpy.ndarray) -> None:
    """One that never deletes what it took leaks that, and harms nothing."""
    ref, weights, expected = linear
    model = aotc.standalone.load(ref, weights=weights)
    tensor = model(_cpu.view(x))
    assert type(tensor) is _cpu.Tensor
    capsule = tensor.__dlpack__(max_version=(1, 0))
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_void_p]
    never_freed = ctypes.create_string_buffer(b"used_dltensor_versioned")
    gc.collect()
    kept = numpy.from_dlpack(tensor)
    assert rename(capsule, ctypes.addressof(never_freed)) == 0
    del tensor, capsule, model
    gc.collect()
    assert abs(kept - expected(x)).max() < TOLERANCE


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("recurrent", "operators by name"),
        ("pooling", "torch's operator `adaptive_max_pool2d`"),
        ("noisy", "torch's operator `randint"),
    ],
)
def test_what_does_not_run_is_refused_by_a_load_by_name(zoo_store: Path, zoo: Any, name: str, words: str) -> None:
    artifact = f"{zoo_store}#{name}"
    shapes = module_of(ROOT / "tests" / "zoo" / "shape_models.py", "shape_models_of_zoo")
    module = {"pooling": "Pooling", "noisy": "Noisy"}.get(name)
    weights = {key: value.numpy() for key, value in getattr(shapes, module)().state_dict().items()} if module else {}
    with pytest.raises(LibraryError) as caught:
        aotc.standalone.load(artifact, weights=weights)
    assert any(words in issue.message for issue in caught.value.issues)
    assert "aotc.load" in caught.value.hint


def test_other_weights_are_refused_with_every_difference(linear: Any) -> None:
    ref, weights, _ = linear
    wrong = {"linear.weight": weights["linear.weight"][:4], "bias": weights["linear.bias"]}
    with pytest.raises(BindError) as caught:
        aotc.standalone.load(ref, weights=wrong)
    assert {issue.where for issue in caught.value.issues} == {"linear.weight", "linear.bias", "bias"}


def test_a_changed_byte_of_a_library_is_refused(zoo_store: Path, linear: Any, tmp_path: Path) -> None:
    store = shutil.copytree(zoo_store, tmp_path / "store")
    model = aotc.standalone.load(f"{store}#linear", weights=linear[1])
    blob = store / "blobs" / "sha256" / model.artifact.variants[0].files[0].blob.partition(":")[2]
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    code = "import sys, aotc.standalone; aotc.standalone.load(sys.argv[1], weights={})"
    code = code.replace("weights={}", "weights=sys.argv[2]")
    save_file({name: torch.from_numpy(each) for name, each in linear[1].items()}, tmp_path / "w.safetensors")
    ran = finish(start("-c", code, f"{store}#linear", tmp_path / "w.safetensors"))
    assert ran.returncode == 1 and "CorruptError" in ran.stderr


# -- the operators, beside torch's -------------------------------------------------------------------------------------

HANDLE = ctypes.c_void_p


@pytest.fixture(scope="module")
def shim() -> ctypes.CDLL:
    return ctypes.CDLL(_cpu.__file__)


def handle(value: Any) -> ctypes.c_void_p:
    """Of the memory of an array, which must outlive it."""
    shim, tensor, made = ctypes.CDLL(_cpu.__file__), _cpu.view(value), HANDLE()
    several, rank = ctypes.c_int64 * len(tensor.shape), ctypes.c_int64(len(tensor.shape))
    dtype = getattr(shim, f"aoti_torch_dtype_{tensor.dtype}")()
    where = HANDLE(tensor.address), rank, several(*tensor.shape), several(*tensor.strides), ctypes.c_int64(0)
    assert shim.aoti_torch_create_tensor_from_blob(*where, dtype, 0, 0, ctypes.byref(made)) == 0
    return made


@pytest.mark.parametrize("sizes", [(1, 5, 7), (7, 33, 300), (13, 16, 1), (64, 96, 257), (400, 70, 1300), (3, 4, 0)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_product_is_numpy_s(shim: ctypes.CDLL, sizes: tuple[int, int, int], turned: bool) -> None:
    m, n, k = sizes
    rng = numpy.random.default_rng(0)
    for dtype, tolerance in ((numpy.float32, 1e-4), (numpy.float64, 1e-12), (numpy.float16, 5e-2)):
        a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
        given = (numpy.asfortranarray(a), numpy.asfortranarray(b)) if turned else (a, b)
        out = numpy.full((n, m), 7, dtype).T if turned else numpy.full((m, n), 7, dtype)
        assert shim.aoti_torch_cpu_mm_out(handle(out), *map(handle, given)) == 0
        wide = a.astype(numpy.float64) @ b.astype(numpy.float64)
        assert numpy.allclose(out, wide, rtol=tolerance, atol=tolerance * max(k, 1) ** 0.5)


@pytest.mark.parametrize(("beta", "alpha"), [(1.0, 1.0), (0.0, 2.0), (0.5, -1.0)])
def test_a_summand_is_added(shim: ctypes.CDLL, beta: float, alpha: float) -> None:
    rng = numpy.random.default_rng(0)
    a, b, bias = (rng.standard_normal(shape).astype(numpy.float32) for shape in ((9, 20), (20, 17), (17,)))
    out = numpy.full((9, 17), numpy.nan, numpy.float32)
    scales = ctypes.c_double(beta), ctypes.c_double(alpha)
    assert shim.aoti_torch_cpu_addmm_out(handle(out), handle(bias), handle(a), handle(b), *scales) == 0
    assert numpy.allclose(out, beta * bias + alpha * (a @ b), atol=1e-4)


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_linear_layer_is_numpy_s(shim: ctypes.CDLL, with_bias: bool) -> None:
    rng = numpy.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(shape).astype(numpy.float32) for shape in ((9, 20), (17, 20), (17,)))
    made, summand = HANDLE(), ctypes.byref(handle(bias)) if with_bias else None
    operands = handle(x), handle(weight), summand
    status = shim.aoti_torch_cpu__linear_pointwise(
        *operands, b"none", None, ctypes.c_int64(0), None, ctypes.byref(made)
    )
    assert status == 0
    assert numpy.allclose(array_of(shim, made), x @ weight.T + (bias if with_bias else 0), atol=1e-4)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize(("groups", "transposed"), [(1, 0), (2, 0), (4, 0), (1, 1), (2, 1)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolution_is_torch_s(
    shim: ctypes.CDLL, axes: int, groups: int, transposed: int, channels_last: bool
) -> None:
    torch.manual_seed(0)
    space = (9, 8, 7)[:axes]
    weight = torch.randn(4, 8 // groups if transposed else 4 // groups, *(3,) * axes)
    given, bias = torch.randn(2, 4, *space), torch.randn(8 if transposed else 4)
    if channels_last and axes > 1:
        given = given.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[axes - 2])
    stride, padding, dilation = [2, 1, 1][:axes], [1, 0, 2][:axes], [1, 2, 1][:axes]
    extra = [1, 0, 0][:axes] if transposed else [0] * axes
    expected = torch.convolution(given, weight, bias, stride, padding, dilation, bool(transposed), extra, groups)
    several, count = ctypes.c_int64 * axes, ctypes.c_int64(axes)
    numbers = [item for each in (stride, padding, dilation) for item in (several(*each), count)]
    last = several(*extra), count, ctypes.c_int64(groups)
    made = HANDLE()
    status = shim.aoti_torch_cpu_convolution(
        handle(given), handle(weight), ctypes.byref(handle(bias)), *numbers, transposed, *last, ctypes.byref(made)
    )
    assert status == 0
    assert numpy.allclose(array_of(shim, made), expected.numpy(), atol=1e-4)


def test_a_window_that_is_larger_than_its_image_is_refused_as_torch_does(shim: ctypes.CDLL) -> None:
    given, weight = torch.randn(1, 4, 2), torch.randn(4, 4, 3)
    one, zero, two = ((ctypes.c_int64 * 1)(number) for number in (1, 0, 2))
    count, made = ctypes.c_int64(1), HANDLE()
    numbers = two, count, zero, count, one, count  # stride, padding, dilation
    status = shim.aoti_torch_cpu_convolution(
        handle(given), handle(weight), None, *numbers, 0, zero, count, ctypes.c_int64(1), ctypes.byref(made)
    )
    assert status == 1


def array_of(shim: ctypes.CDLL, made: ctypes.c_void_p) -> numpy.ndarray:
    """The values behind a handle of float32."""
    data, rank = HANDLE(), ctypes.c_int64()
    sizes, strides = ctypes.POINTER(ctypes.c_int64)(), ctypes.POINTER(ctypes.c_int64)()
    shim.aoti_torch_get_data_ptr(made, ctypes.byref(data))
    shim.aoti_torch_get_dim(made, ctypes.byref(rank))
    shim.aoti_torch_get_sizes(made, ctypes.byref(sizes))
    shim.aoti_torch_get_strides(made, ctypes.byref(strides))
    shape, steps = sizes[: rank.value], strides[: rank.value]
    count = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    memory = (ctypes.c_float * count).from_address(data.value or 0)
    return numpy.lib.stride_tricks.as_strided(
        numpy.frombuffer(memory, numpy.float32), shape, [4 * step for step in steps]
    )


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_torch_s(shim: ctypes.CDLL, causal: int, mask: str, dtype: torch.dtype) -> None:
    if causal and mask != "none":
        pytest.skip("torch takes one of the two")
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 70, 3, 16).to(dtype).transpose(1, 2) for _ in range(3))
    masks = {"none": None, "bool": torch.rand(2, 1, 70, 70) > 0.3, "float": torch.randn(70, 70).to(dtype)}
    added = masks[mask]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, added, is_causal=bool(causal))
    given = None if added is None else ctypes.byref(handle(added))
    out, sums = HANDLE(), HANDLE()
    operands = handle(query), handle(key), handle(value), ctypes.c_double(0)
    attend = shim.aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu
    assert attend(*operands, causal, given, None, ctypes.byref(out), ctypes.byref(sums)) == 0
    made = array_of(shim, out) if dtype is torch.float32 else narrow_array_of(shim, out)
    assert numpy.allclose(made, expected.float().numpy(), atol=1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("causal", [0, 1])
def test_attention_over_many_keys_is_made_in_blocks_of_queries(shim: ctypes.CDLL, causal: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 100, 16), *(torch.randn(1, 2, 1500, 16) for _ in range(2))
    query[0, 0, 99, 0] = torch.nan
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=bool(causal))
    out, sums = HANDLE(), HANDLE()
    operands = *map(handle, (query, key, value)), ctypes.c_double(0)
    attend = shim.aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu
    assert attend(*operands, causal, None, None, ctypes.byref(out), ctypes.byref(sums)) == 0
    assert numpy.allclose(array_of(shim, out), expected.numpy(), atol=1e-5, equal_nan=True)


def narrow_array_of(shim: ctypes.CDLL, made: ctypes.c_void_p) -> numpy.ndarray:
    """The values behind a handle of bfloat16, axes [batch, head, place, feature] over [batch, place, head, feature]."""
    data = HANDLE()
    shim.aoti_torch_get_data_ptr(made, ctypes.byref(data))
    memory = (ctypes.c_uint16 * (2 * 70 * 3 * 16)).from_address(data.value or 0)
    wide = numpy.frombuffer(memory, numpy.uint16).astype(numpy.uint32) << 16
    return wide.view(numpy.float32).reshape(2, 70, 3, 16).transpose(0, 2, 1, 3)


ONE_ARGUMENT = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh"]
ONE_ARGUMENT += ["asin", "acos", "atan", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma"]


def exported() -> set[str]:
    shown = subprocess.run(["nm", "-D", "--defined-only", _cpu.__file__], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in shown.stdout.splitlines()}


def test_the_build_knows_what_the_runtime_exports() -> None:
    of_torch_and_cuda = {name for name in exported() if name.startswith(("aoti_", "cuda"))}
    assert of_torch_and_cuda == FUNCTIONS | GPU_FUNCTIONS | OPERATORS.keys()


def test_every_function_of_sleef_that_torch_s_vectors_call_is_there() -> None:
    headers = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vec"
    text = "".join(path.read_text() for path in headers.rglob("vec[25]*/*.h"))
    names = set(re.findall(r"\bSleef_[a-z0-9]+(?:f8|f16|d4|d8)(?:_u\d\d)?\b", text))
    assert len(names) > 100 and names - exported() == set()


def test_functions_of_sleef_are_as_exact_as_sleef_s(tmp_path: Path) -> None:
    """Each in one unit of the last place of float32, also where it overflows, and at NaN and infinities."""
    source = tmp_path / "calls.cpp"
    names = {name: f"Sleef_{name}f8_{'u15' if name == 'erfc' else 'u10'}" for name in ONE_ARGUMENT}
    calls = "\n".join(
        f'extern "C" __m256 {of_sleef}(__m256);\n'
        f'extern "C" void call_{name}(float* x) {{ _mm256_storeu_ps(x, {of_sleef}(_mm256_loadu_ps(x))); }}'
        for name, of_sleef in names.items()
    )
    source.write_text(f"#include <immintrin.h>\n{calls}\n")
    library = tmp_path / "calls.so"
    command = ["g++", "-mavx2", "-shared", "-fPIC", "-o", str(library), str(source), _cpu.__file__]
    subprocess.run(command, check=True)
    opened = ctypes.CDLL(str(library))
    rng = numpy.random.default_rng(0)
    drawn = [rng.standard_normal(4096) * scale for scale in (1e-3, 1, 30)]
    x = numpy.concatenate(
        [*drawn, rng.uniform(-1, 1, 4096), [0.0, -0.0, numpy.inf, -numpy.inf, numpy.nan, 89, -104, 1]]
    )
    of_all_magnitudes = numpy.arange(0, 1 << 32, 40009, dtype=numpy.uint32).view(numpy.float32)
    x = numpy.concatenate([x.astype(numpy.float32), of_all_magnitudes[: len(of_all_magnitudes) // 8 * 8]])
    for name in ONE_ARGUMENT:
        made = x.copy()
        for first in range(0, len(made), 8):
            getattr(opened, f"call_{name}")(ctypes.c_void_p(made.ctypes.data + 4 * first))
        exact = getattr(torch, {"lgamma": "lgamma"}.get(name, name))(torch.from_numpy(x).double()).numpy()
        with numpy.errstate(all="ignore"):
            near = exact.astype(numpy.float32)
            unit = numpy.spacing(numpy.abs(near)).astype(numpy.float64)
            error = numpy.abs(made.astype(numpy.float64) - exact) / unit
        finite = numpy.isfinite(near)
        assert error[finite].max() < (1.5 if name in ("erfc", "lgamma") else 1.0), name
        assert ((made == near) | (numpy.isnan(made) & numpy.isnan(near)))[~finite].all(), name


def test_the_features_of_this_cpu_are_those_that_torch_finds() -> None:
    from aotc.machine.environment import cpu_features

    assert usable_features() == cpu_features()
