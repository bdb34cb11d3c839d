"""`aotc export --standalone`: a folder that runs from C and from Python's ctypes, without torch, numpy and aotc."""

from __future__ import annotations

import array
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ROOT, run_python
from safetensors.torch import save_file

import aotc.standalone
from aotc.call_table.dispatch import Dispatcher, Plan
from aotc.call_table.misses import fixed_size_issues
from aotc.call_table.obstacles import nearest, obstacles, unexplained
from aotc.cli import main
from aotc.errors import CorruptError
from aotc.machine.elf import needed_libraries
from aotc.records import Artifact, PadRule, SizeRange, TensorLeaf, bucket_name
from aotc.standalone.call_rows import call_rows
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.reader import StoreReader
from aotc.store.reference import parse_reference
from examples.models import transformer_block

HERE = Path(__file__).parent
TOLERANCE = 2e-5  # of float32, whose sums are taken in another order
OF_THE_SYSTEM = {"libc.so.6", "libm.so.6", "libmvec.so.1", "libstdc++.so.6", "libgcc_s.so.1", "libgomp.so.1"}
OF_THE_SYSTEM |= {"ld-linux-x86-64.so.2"}
"""What code in a folder may need beside the folder: glibc, GCC's own libraries."""


def export(ref: object, folder: Path, *options: object) -> Result:
    return CliRunner().invoke(main, ["export", str(ref), "--standalone", str(folder), *map(str, options)])


class Exported(NamedTuple):
    """A folder, its module of Python, and the module that was compiled."""

    folder: Path
    python: Any
    module: torch.nn.Module

    def eager(self, *inputs: numpy.ndarray) -> Any:
        with torch.no_grad():
            return self.module(*map(torch.from_numpy, inputs))


def exported(ref: str, module: torch.nn.Module, folder: Path) -> Exported:
    folder.mkdir(parents=True)
    tensors = {key: value.contiguous() for key, value in module.state_dict().items() if "head.weight" not in key}
    save_file(tensors, folder / "weights.safetensors")
    result = export(ref, folder / "model", "--weights", folder / "weights.safetensors")
    assert result.exit_code == 0, result.output
    return Exported(folder / "model", python_of(folder / "model"), module)


def python_of(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"exported_of_{folder.parent.name}", folder / "aotc_exported.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def quickstart(quickstart_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    torch.manual_seed(0)
    module = transformer_block(width=256, heads=4).eval()
    return exported(f"{quickstart_store}#quickstart", module, tmp_path_factory.mktemp("exported") / "quickstart")


@pytest.fixture(scope="module")
def zoo_model(zoo_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """Exports a model of the zoo, once: `zoo_model(name, module)`."""
    folder, made = tmp_path_factory.mktemp("zoo"), dict[str, Exported]()

    def of(name: str, module: torch.nn.Module) -> Exported:
        if name not in made:
            made[name] = exported(f"{zoo_store}#{name}", module.eval(), folder / name)
        return made[name]

    return of


@pytest.fixture
def linear(zoo_model: Callable[..., Exported], zoo: Any) -> Exported:
    torch.manual_seed(0)
    return zoo_model("linear", zoo.Linear())


@pytest.fixture
def x() -> numpy.ndarray:
    return numpy.random.default_rng(1).standard_normal((2, 8)).astype(numpy.float32)


def difference(result: Any, expected: torch.Tensor) -> float:
    assert tuple(result.shape) == tuple(expected.shape)
    return float(abs(numpy.asarray(result) - expected.numpy()).max())


# -- values, and which code gave them ----------------------------------------------------------------------------------

BARE = """
import array, json, sys
sys.path.insert(0, sys.argv[1])
from aotc_exported import ExportedModel
shape = json.loads(sys.argv[2])
given = array.array("f")
with open(sys.argv[3], "rb") as file:
    given.frombytes(file.read())
model = ExportedModel()
result = model(memoryview(given).cast("B").cast("f", shape))
with open(sys.argv[4], "wb") as file:
    file.write(result)
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
for name in ("torch", "numpy", "aotc"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(f"{name} can be imported")
print(json.dumps([result.shape, sorted(mapped)]))
"""


@pytest.mark.parametrize("batch", [1, 4])
def test_a_folder_gives_eager_s_values_where_nothing_is_installed(
    quickstart: Exported, batch: int, tmp_path: Path
) -> None:
    given = numpy.random.default_rng(0).standard_normal((batch, 128, 256)).astype(numpy.float32)
    given.tofile(tmp_path / "x.bin")
    options = [sys.executable, "-I", "-S", "-c", BARE]
    arguments = [quickstart.folder, json.dumps(given.shape), tmp_path / "x.bin", tmp_path / "y.bin"]
    ran = subprocess.run([*options, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    shape, mapped = json.loads(ran.stdout)
    result = numpy.fromfile(tmp_path / "y.bin", numpy.float32).reshape(shape)
    assert difference(result, quickstart.eager(given)) < TOLERANCE
    ours = {Path(path).name for path in mapped if path.startswith(str(quickstart.folder))}
    assert ours == {"libaotc.so", "bucket-0.so", "bucket-1.so", "weights.bin"}
    assert not [path for path in mapped if "torch" in path or "numpy" in path]


def test_models_of_the_zoo_give_eager_s_values(zoo_model: Callable[..., Exported], zoo: Any) -> None:
    """Buckets, ranges, tied and frozen weights, int64 inputs, a convolution of any batch."""
    spec = importlib.util.spec_from_file_location("shapes_to_export", ROOT / "tests" / "zoo" / "shape_models.py")
    assert spec is not None and spec.loader is not None
    shapes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shapes)
    rng = numpy.random.default_rng(0)

    def drawn(*shape: int) -> numpy.ndarray:
        return rng.standard_normal(shape).astype(numpy.float32)

    cases: list[tuple[str, torch.nn.Module, list[numpy.ndarray]]] = [
        ("linear", zoo.Linear(), [drawn(4, 8), drawn(2, 8)]),
        ("ranged", zoo.Block(), [drawn(1, 77, 32), drawn(1, 1, 32), drawn(1, 512, 32)]),
        ("tied", zoo.Tied(), [rng.integers(0, 16, 4)]),
        ("convolution", shapes.Convolution(), [drawn(16, 3, 8, 8), drawn(1, 3, 8, 8)]),
    ]
    for name, module, inputs in cases:
        own = zoo_model(name, module)
        model = own.python.ExportedModel()
        for each in inputs:
            assert difference(model(each), own.eager(each)) < TOLERANCE, name


def test_a_folder_pads_inputs_and_crops_results(zoo_model: Callable[..., Exported], zoo: Any) -> None:
    """To a bucket of fixed sizes, and to the next size of a range; sizes beyond the bucket are refused with both."""
    rng = numpy.random.default_rng(0)
    for name, sizes in (("pooled", [(4, 16), (3, 11), (1, 1)]), ("stepped", [(4, 8), (2, 9), (4, 31)])):
        own = zoo_model(name, zoo.Pooled())
        model = own.python.ExportedModel()
        for size in sizes:
            given = rng.integers(0, 32, size), numpy.ones(size, bool)
            result = model(*given)
            for key, expected in enumerate(own.eager(*given)):
                assert difference(result[str(key)], expected) < TOLERANCE, (name, size)
        with pytest.raises(own.python.InputMismatchError, match="batch is 5, the bucket takes up to 4"):
            model(numpy.zeros((5, 16), numpy.int64), numpy.ones((5, 16), bool))


def test_frozen_weights_come_with_the_code(zoo_store: Path, tmp_path: Path, zoo: Any) -> None:
    assert export(f"{zoo_store}#frozen", tmp_path / "frozen").exit_code == 0
    model = python_of(tmp_path / "frozen").ExportedModel()
    given = numpy.random.default_rng(0).standard_normal((2, 64)).astype(numpy.float32)
    assert numpy.array_equal(model(given), aotc.standalone.load(f"{zoo_store}#frozen")(given))
    refused = export(f"{zoo_store}#frozen", tmp_path / "other", "--weights", tmp_path / "frozen")
    assert refused.exit_code == 2 and "holds frozen weights" in refused.output


def test_models_of_libraries_give_eager_s_values(shared_folder: Path, tmp_path: Path, built: Any) -> None:
    store = built(shared_folder, "libraries-store", HERE / "libraries.yaml")
    spec = importlib.util.spec_from_file_location("library_models_to_export", HERE / "library_models.py")
    assert spec is not None and spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    ids, mask = numpy.random.default_rng(0).integers(0, 128, (2, 16)), numpy.ones((2, 16), numpy.int64)
    mask[0, 9:] = 0
    pixels = numpy.random.default_rng(0).standard_normal((1, 3, 64, 64)).astype(numpy.float32)
    for name, inputs in (("bert", [ids, mask]), ("resnet", [pixels])):
        own = exported(f"{store}#{name}", getattr(models, name)(), tmp_path / name)
        expected, result = own.eager(*inputs), own.python.ExportedModel()(*inputs)
        assert list(result) == list(expected) and set(map(type, result.values())) == {numpy.ndarray}
        assert max(difference(result[key], expected[key]) for key in expected) < TOLERANCE, name


# -- what a folder needs -----------------------------------------------------------------------------------------------


def test_code_in_a_folder_needs_the_c_library_and_gcc_s_alone(quickstart: Exported) -> None:
    needed = {}
    for path in quickstart.folder.glob("*.so"):
        needed[path.name] = {entry.name for entry in needed_libraries(path.read_bytes())} - OF_THE_SYSTEM
    assert needed == {"libaotc.so": set(), "bucket-0.so": {"libaotc.so"}, "bucket-1.so": {"libaotc.so"}}


def test_a_folder_is_small_and_its_sums_are_its_files(quickstart: Exported) -> None:
    sizes = {path.name: path.stat().st_size for path in quickstart.folder.iterdir() if path.is_file()}
    weights = sum(each.nbytes for each in quickstart.module.state_dict().values())
    assert weights <= sizes.pop("weights.bin") < 1.01 * weights and sum(sizes.values()) < 1 << 20
    summed = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=quickstart.folder, capture_output=True, text=True)
    assert summed.returncode == 0 and summed.stdout.count(": OK") == len(sizes)


def test_a_folder_may_be_moved(linear: Exported, tmp_path: Path, x: numpy.ndarray) -> None:
    moved = shutil.copytree(linear.folder, tmp_path / "a folder" / "moved")
    assert difference(python_of(moved).ExportedModel()(x), linear.eager(x)) < TOLERANCE


def test_two_folders_torch_and_the_other_runtime_share_a_process(
    quickstart: Exported, linear: Exported, zoo_store: Path, x: numpy.ndarray
) -> None:
    weights = {name: each.numpy() for name, each in linear.module.state_dict().items()}
    beside = aotc.standalone.load(f"{zoo_store}#linear", weights=weights)
    one, other = quickstart.python.ExportedModel(), linear.python.ExportedModel()
    given = numpy.zeros((1, 128, 256), numpy.float32)
    assert difference(one(given), quickstart.eager(given)) < TOLERANCE
    assert numpy.array_equal(beside(x), other(x))
    runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libaotc.so" in line}
    assert len(runtimes) == 1


# -- calls -------------------------------------------------------------------------------------------------------------


def test_results_are_of_the_library_of_the_first_input(linear: Exported, x: numpy.ndarray) -> None:
    model = linear.python.ExportedModel()
    of_buffer = model(memoryview(array.array("f", x.ravel())).cast("B").cast("f", [2, 8]))
    results = [model(x), model(torch.from_numpy(x)), of_buffer, model(x=x)]
    assert [type(each) for each in results] == [numpy.ndarray, torch.Tensor, memoryview, numpy.ndarray]
    assert all(difference(each, linear.eager(x)) < TOLERANCE for each in results)
    del model
    results[0] += 1  # the caller's own, also when the model is gone
    assert difference(results[2], linear.eager(x)) < TOLERANCE


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x.astype(numpy.float64), "dtype float32 is expected, float64 came"),
        (lambda x: torch.from_numpy(x).bfloat16(), "dtype float32 is expected, bfloat16 came"),
        (lambda x: x.astype(">f4"), "cannot be read: its items are `>f`"),
        (lambda x: numpy.asfortranarray(x), "x: the layout contiguous is expected, strides [1, 2] came"),
        (lambda x: x[:, ::-1], "the layout contiguous is expected, strides [8, -1] came"),
        (
            lambda x: numpy.frombuffer(b"\0" + x.tobytes(), numpy.float32, offset=1).reshape(2, 8),
            "is not aligned to 4 bytes",
        ),
        (lambda x: x[:1], "batch is 1, the bucket takes 2"),
        (lambda x: x[:0], "batch is 0, the bucket takes 2"),
        (
            lambda x: x.astype(numpy.float64)[:, :4],
            "x: shape [2, 8] is expected, [2, 4] came\n    hint: the manifest fixes 8",
        ),
        (lambda x: x[:, :4], "shape [2, 8] is expected, [2, 4] came"),
        (lambda x: x[0], "shape [batch, 8] is expected, [8] came"),
        (lambda x: x.tolist(), "a list cannot be read"),
        (lambda x: None, "a NoneType cannot be read"),
        (lambda x: torch.from_numpy(x).requires_grad_(), "a Tensor cannot be read"),
        (lambda x: torch.empty(2, 8, device="meta"), "a Tensor cannot be read"),
    ],
)
def test_another_input_is_an_error_with_both_values(linear: Exported, x: numpy.ndarray, make: Any, words: str) -> None:
    model = linear.python.ExportedModel()
    with pytest.raises(linear.python.InputMismatchError) as caught:
        model(make(x))
    assert words in str(caught.value) and isinstance(caught.value, ValueError)
    assert difference(model(x), linear.eager(x)) < TOLERANCE


def test_an_input_on_another_device_is_refused_without_being_read(linear: Exported) -> None:
    python = linear.python
    model, library = python.ExportedModel(), python._library(str(linear.folder))
    numbers = (python.ctypes.c_int64 * 2)(2, 8)
    inputs = (python._DLTensor * 1)(python._DLTensor(64, 2, 1, 2, 2, 32, 1, numbers, None, 0))
    outputs = (python.ctypes.c_void_p * 1)(1)
    assert library.aotc_run(model._model, inputs, 1, outputs, 1) == 3 and outputs[0] is None
    assert library.aotc_error() == b"x: the CPU's memory is expected, it lies on device 2:1 of DLPack"
    assert library.aotc_run(model._model, inputs, 0, outputs, 1) == 3
    assert library.aotc_error() == b"1 inputs are expected, 0 came"


def test_arguments_that_do_not_bind_are_a_type_error(linear: Exported, x: numpy.ndarray) -> None:
    model = linear.python.ExportedModel()
    for args, kwargs in (((), {}), ((x, x), {}), ((x,), {"x": x}), ((x,), {"mask": x})):
        with pytest.raises(TypeError, match="the model takes x"):
            model(*args, **kwargs)


def test_many_threads_call_one_model_and_memory_is_given_back(quickstart: Exported) -> None:
    model = quickstart.python.ExportedModel(concurrency=2)
    given = numpy.random.default_rng(0).standard_normal((1, 128, 256)).astype(numpy.float32)
    first = model(given)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: model(given), range(20)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        same = list(pool.map(lambda _: bool((model(given) == first).all()), range(200)))
    assert all(same) and 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 100 * first.nbytes


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "bool", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_results_of_any_dtype_and_shape_are_given(linear: Exported, dtype: str, shape: tuple[int, ...]) -> None:
    """In numpy, in buffers and by DLPack; what numpy or Python's buffers lack is given by DLPack alone."""
    tensor = (10 * torch.rand(shape)).to(getattr(torch, dtype))
    python = linear.python
    for like, lacking in ((numpy.zeros(1), {"bfloat16"}), (b"", {"bfloat16", "float16"}), (tensor, set[str]())):
        result = python._giving_like(like)(python.ExportedTensor(managed(python, tensor)))
        if dtype in lacking:
            assert type(result) is python.ExportedTensor and result.shape == shape
            result = torch.from_dlpack(result)
        elif 0 not in shape:
            assert tuple(result.shape) == shape
        values = result if isinstance(result, torch.Tensor) else torch.from_numpy(numpy.array(result))
        flat = [float(each) for each in values.float().ravel()]
        assert flat == [float(each) for each in tensor.float().ravel()]


def managed(python: Any, tensor: torch.Tensor) -> Any:
    """A DLManagedTensor over a copy of the tensor's values, as the runtime gives one."""
    capsule = tensor.clone().__dlpack__()
    pointer = python._pointer_of(capsule, b"dltensor")
    rename = python.ctypes.PyDLL(None).PyCapsule_SetName
    rename.argtypes = [python.ctypes.py_object, python.ctypes.c_char_p]
    assert rename(capsule, USED) == 0
    return python.ctypes.cast(pointer, python.ctypes.POINTER(python._DLManagedTensor))


USED = b"used_dltensor"  # which is kept: a capsule holds no copy of its name


# -- damage ------------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda folder: cut(folder / "weights.bin"), r"weights.bin cannot be read: \d+ bytes are expected, it has \d+"),
        (lambda folder: cut(folder / "bucket-1.so"), r"bucket-1.so cannot be read: \d+ bytes are expected"),
        (lambda folder: (folder / "bucket-0.so").unlink(), "bucket-0.so cannot be read: No such file"),
        (lambda folder: cut(folder / "table.txt"), "the call table"),
        (lambda folder: (folder / "table.txt").unlink(), "table.txt cannot be read: No such file"),
        (
            lambda folder: edit(folder, "table 2", "table 1"),
            "begins with `aotc-call-table 1`, and this libaotc.so reads",
        ),
        (lambda folder: edit(folder, "feature avx2", "feature avx1024"), "this CPU has no avx1024"),
        (
            lambda folder: edit(folder, "float32 0 1 8 1", "float32 0 1 800000 1"),
            "beyond the end of the file of weights",
        ),
        (lambda folder: edit(folder, "argument input 0", "argument input 7"), "names input 7, of 1"),
        (lambda folder: edit(folder, "argument input 0\n", ""), "takes another number of tensors"),
        (lambda folder: edit(folder, "result index 0", "result index 5"), "a result that its library does not give"),
        (lambda folder: edit(folder, "size 2", "sizes 2"), "has a line `sizes`"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_load(linear: Exported, tmp_path: Path, harm: Any, words: str) -> None:
    folder = shutil.copytree(linear.folder, tmp_path / "copy")
    harm(folder)
    with pytest.raises(linear.python.ExportedModelError, match=words):
        linear.python.ExportedModel(folder)


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "table.txt").read_text()
    assert old in text
    (folder / "table.txt").write_text(text.replace(old, new, 1))


# -- refusals of the export --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("accumulating", "writes to its inputs"),
        ("assigned", "writes to its buffers: hidden"),
        ("recurrent", "operators by name"),
        ("pooling", "torch's operator `adaptive_max_pool2d`"),
    ],
)
def test_what_a_folder_does_not_do_is_refused_by_name(zoo_store: Path, tmp_path: Path, name: str, words: str) -> None:
    result = export(f"{zoo_store}#{name}", tmp_path / name, "--weights", tmp_path)
    assert result.exit_code == 2 and words in result.output
    assert list(tmp_path.iterdir()) == []


def test_other_weights_and_a_folder_in_use_are_refused(zoo_store: Path, tmp_path: Path) -> None:
    ref = f"{zoo_store}#linear"
    save_file({"linear.weight": torch.zeros(4, 8), "bias": torch.zeros(8)}, tmp_path / "w.safetensors")
    result = export(ref, tmp_path / "model", "--weights", tmp_path / "w.safetensors")
    assert result.exit_code == 2 and {*re.findall(r"^  - ([\w.]+):", result.output, re.MULTILINE)} == {
        *("linear.weight", "linear.bias", "bias")
    }
    assert "no weights were given" in export(ref, tmp_path / "model").output
    save_file({"linear.weight": torch.zeros(8, 8), "linear.bias": torch.zeros(8)}, tmp_path / "w.safetensors")
    assert "is not empty" in export(ref, tmp_path, "--weights", tmp_path / "w.safetensors").output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.safetensors"]


def test_one_kind_of_export_is_asked_for(tmp_path: Path) -> None:
    for options in ([], ["--pt2", "a.pt2", "--standalone", "a"], ["--pt2", "a.pt2", "--weights", str(tmp_path)]):
        assert CliRunner().invoke(main, ["export", "store#model", *options]).exit_code == 2


# -- the call table, beside Python's -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def choose(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[str]]:
    folder = tmp_path_factory.mktemp("choose")
    sources = [HERE / "choose_bucket.cpp", *(ROOT / "aotc" / "core" / "cpu" / f"{each}.cpp" for each in TABLE_SOURCES)]
    subprocess.run(["g++", "-std=c++20", "-O0", "-Wall", "-fopenmp", "-o", folder / "choose", *sources], check=True)

    def of(table: str, calls: str) -> list[str]:
        (folder / "table.txt").write_text(table)
        command = [folder / "choose", folder / "table.txt"]
        return subprocess.run(command, input=calls, capture_output=True, text=True, check=True).stdout.splitlines()

    return of


TABLE_SOURCES = ("call_table", "table_call", "cut_views", "library", "tensor")
SHAPES: list[tuple[int | str, ...]] = [
    ("a", "b"),
    ("2*a + 1", "b", 3),
    ("max(a, 4)", "b"),
    ("a", "b", "a*b // 2 - 1"),
    ("a", "-(1 - b)"),
]
NUMBERS = st.recursive(
    st.sampled_from(["a", "b", "0", "1", "2", "5"]),
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from(["+", "-", "*", "//", "%"]), part).map(lambda each: f"({' '.join(each)})"),
        st.tuples(st.sampled_from(["min", "max"]), part, part).map(lambda each: f"{each[0]}({each[1]}, {each[2]})"),
        part.map(lambda each: f"abs(-{each})"),
    ),
    max_leaves=4,
)
ORDER = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
CONDITIONS = st.recursive(
    st.one_of(
        st.tuples(NUMBERS, ORDER, NUMBERS).map(" ".join),
        st.tuples(NUMBERS, ORDER, NUMBERS, ORDER, NUMBERS).map(" ".join),
    ).map(lambda each: f"({each})"),
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from(["and", "or"]), part, st.just("or"), part).map(
            lambda each: f"({' '.join(each)})"
        ),
        part.map(lambda each: f"(not {each})"),
    ),
    max_leaves=4,
)
EXTENTS = st.one_of(
    st.integers(0, 8),
    st.tuples(st.integers(0, 4), st.integers(4, 9), st.integers(1, 3), st.integers(0, 9)).map(
        lambda each: SizeRange(min=each[0], max=each[1], multiple_of=each[2], tune_at=each[3])
    ),
)
BUCKETS = st.lists(st.tuples(EXTENTS, EXTENTS, st.lists(CONDITIONS, max_size=2)), min_size=1, max_size=5)


class Shaped(NamedTuple):
    """A tensor, as far as the Python side reads it."""

    shape: tuple[int, ...]

    def size(self, axis: int) -> int:
        return self.shape[axis]


@pytest.fixture(scope="module")
def record(zoo_store: Path) -> Artifact:
    reader = StoreReader.open(zoo_store)
    return read_artifact(reader, read_bundle(reader, parse_reference("linear")).artifacts[0])


@settings(max_examples=60)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=2),
    buckets=BUCKETS,
    calls=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(-1, 1)), min_size=8, max_size=16),
    padded=st.sets(st.sampled_from("ab")),
)
def test_the_table_in_c_chooses_as_python_s_and_misses_in_its_words(
    record: Artifact,
    choose: Callable[[str, str], list[str]],
    shapes: list[tuple[int | str, ...]],
    buckets: list[tuple[Any, Any, list[str]]],
    calls: list[tuple[int, int, int]],
    padded: set[str],
) -> None:
    """The same bucket and pads for the same sizes, else the same reasons of the nearest buckets, whatever the shapes,
    ranges and conditions, also where a division is by 0."""
    pad = {name: PadRule() for name in sorted(padded)}
    leaves = tuple(TensorLeaf(path=f"x{at}", dtype="float32", shape=shape, pad=pad) for at, shape in enumerate(shapes))
    first = record.variants[0]
    variants = tuple(
        msgspec.structs.replace(first, bucket={"a": a, "b": b}, conditions=tuple(conditions), padded=tuple(padded))
        for a, b, conditions in buckets
    )
    signature = msgspec.structs.replace(record.signature, leaves=leaves)
    artifact = msgspec.structs.replace(record, signature=signature, variants=variants)
    try:
        dispatcher = Dispatcher(signature, variants)
    except Exception:  # a bucket that gives the inputs no shape: the load refuses it
        return
    table = "\n".join(call_rows(artifact, dispatcher))
    lines: list[str] = []
    expected: list[str | None] = []
    for a, b, change in calls:
        sizes = {"a": a, "b": b}
        shaped = [Shaped(tuple(evaluated(entry, sizes) for entry in shape)) for shape in shapes]
        if change:
            shaped[-1] = Shaped((*shaped[-1].shape[:-1], max(shaped[-1].shape[-1] + change, 0)))
        lines.append(" ".join(str(number) for each in shaped for number in (len(each.shape), *each.shape)))
        asked = dispatcher.dims.read(shaped)
        try:
            plan = dispatcher.plan(asked)
        except CorruptError:  # a shape that is smaller in a larger bucket
            expected.append(None)
            continue
        fits = plan is not None and tuple(each.shape for each in shaped) == plan.shapes
        if plan and fits:
            expected.append(" ".join(map(str, (plan.variant, *run_sizes(shaped, plan)))))
        else:
            expected.append("" if plan else words_of_miss(dispatcher, asked, shaped))
    found = choose(table, "".join(f"{line}\n" for line in lines))
    for line, answer in zip(found, expected, strict=True):
        if answer:
            assert line == answer
        elif answer is not None:
            assert not line[:1].isdigit()


def words_of_miss(dispatcher: Dispatcher, asked: tuple[int, ...], shaped: Sequence[Shaped]) -> str:
    odd = unexplained(dispatcher, asked, shaped)
    issues = odd or fixed_size_issues(dispatcher.signature, shaped)
    lines = [f"{issue.where}: {issue.message} ({issue.hint});" for issue in issues]
    for index in () if odd else nearest(dispatcher, asked, 3):
        name = bucket_name(dispatcher.variants[index].bucket)
        lines += [f"{name}: {issue.message} ({issue.hint});" for issue in obstacles(dispatcher, index, asked)]
    return "".join(lines)


def run_sizes(shaped: Sequence[Shaped], plan: Plan) -> list[int]:
    """Of every axis of the inputs, padded."""
    shapes = [list(each.shape) for each in shaped]
    for each in plan.pads:
        shapes[each.leaf][each.axis] = each.size
    return [size for shape in shapes for size in shape]


def evaluated(entry: int | str, sizes: Mapping[str, int]) -> int:
    """By Python itself; a size below 0 is none that a tensor has."""
    value = entry if isinstance(entry, int) else eval(entry, {"max": max}, dict(sizes))
    return max(int(value), 0)


# -- programs ----------------------------------------------------------------------------------------------------------


def test_the_example_in_c_runs(quickstart: Exported, tmp_path: Path) -> None:
    """As its page says."""
    page = (ROOT / "examples" / "c" / "README.md").read_text()
    (compiling,) = re.findall(r"^ *(gcc .*)$", page, re.MULTILINE)
    shutil.copytree(quickstart.folder, tmp_path / "quickstart")
    shutil.copytree(ROOT / "examples" / "c", tmp_path / "examples" / "c")
    strict = compiling.replace("-O2", "-O2 -Wall -Wextra -Werror -pedantic")
    subprocess.run(strict, shell=True, cwd=tmp_path, check=True)
    given = numpy.random.default_rng(0).standard_normal((4, 128, 256)).astype(numpy.float32)
    given.tofile(tmp_path / "x.bin")

    def run(*arguments: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["./run", *map(str, arguments)], cwd=tmp_path, capture_output=True, check=False)

    ran = run("quickstart", "x.bin", 4, 128, 256)
    assert ran.returncode == 0 and b"output: 32 bits, shape 4 128 256" in ran.stderr, ran.stderr
    result = numpy.frombuffer(ran.stdout, numpy.float32).reshape(4, 128, 256)
    assert difference(result, quickstart.eager(given)) < TOLERANCE
    ran = run("quickstart", "x.bin", 2, 128, 256)
    assert ran.returncode == 3 and b"batch is 2, the bucket takes 1" in ran.stderr
    ran = run("nowhere", "x.bin", 2, 128, 256)
    assert ran.returncode == 1 and b"nowhere/table.txt cannot be read: No such file" in ran.stderr


def test_the_header_is_c_and_c_plus_plus(quickstart: Exported, tmp_path: Path) -> None:
    for compiler, standard, suffix in (("gcc", "c99", "c"), ("g++", "c++11", "cpp")):
        (tmp_path / f"use.{suffix}").write_text('#include "aotc.h"\nint main(void) { return aotc_error()[0]; }\n')
        command = [compiler, f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{quickstart.folder}"]
        subprocess.run([*command, "-fsyntax-only", tmp_path / f"use.{suffix}"], check=True)


def test_pyproject_compiles_every_file_of_the_runtime_s_folder() -> None:
    """As an export for another architecture does: one that a list lacks would be missing at a load."""
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    listed = {each["name"].rpartition(".")[2]: (set(each["sources"]), set(each["depends"])) for each in modules}
    core = Path("aotc", "core")

    def files(pattern: str) -> set[str]:
        return {str(path.relative_to(ROOT)) for path in (ROOT / core).glob(pattern)}

    shared, interface = {*files("cpu/*.cpp"), str(core / "openmp.cpp")}, str(core / "cpu" / "c_api.cpp")
    headers = {*files("cpu/*.h"), str(core / "openmp.h")}
    assert listed["_libaotc"] == (shared, headers)
    of_python = {*headers, *files("cpu/python/*.h"), *files("gpu/*.h"), str(core / "equal_constants.h")}
    assert listed["_cpu"] == ((shared - {interface}) | files("cpu/python/*.cpp") | files("gpu/*.cpp"), of_python)


def test_the_functions_of_the_header_are_what_the_library_exports(quickstart: Exported) -> None:
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", quickstart.folder / "libaotc.so"], capture_output=True, text=True
    )
    exported_names = set(re.findall(r" T (aotc_\w+)", shown.stdout))
    assert exported_names == set(re.findall(r"\b(aotc_\w+)\(", (quickstart.folder / "aotc.h").read_text()))
    assert len(exported_names) <= 12


# -- an image from scratch ---------------------------------------------------------------------------------------------

IMAGE = ROOT / "examples" / "small_image"
LIMIT = 80_000_000
CHROOT = str(shutil.which("chroot", path="/usr/sbin:/sbin:/usr/bin:/bin"))
NEW_ROOT = [CHROOT] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", CHROOT]


@pytest.fixture
def root_of_image(quickstart: Exported, tmp_path: Path) -> Path:
    """What the Dockerfile's last stage has, of this Python."""
    (collecting,) = re.findall(
        r"^RUN python /collect\.py (\S+) (.*)$", (IMAGE / "Dockerfile").read_text(), re.MULTILINE
    )
    assert collecting == ("/root-of-image", "/model /serve.py")
    model = shutil.copytree(quickstart.folder, tmp_path / "model")
    run_python((IMAGE / "collect.py").read_text(), tmp_path / "root", model, IMAGE / "serve.py")
    return tmp_path / "root"


@pytest.fixture
def service(root_of_image: Path) -> Iterator[str]:
    """The entry point of the image, in that root: the URL of its service."""
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", (IMAGE / "Dockerfile").read_text(), re.MULTILINE)
    (root_of_image / "proc").mkdir()
    shutil.copyfile("/proc/cpuinfo", root_of_image / "proc" / "cpuinfo")  # a container has all of /proc
    command = [*NEW_ROOT, str(root_of_image), *json.loads(entry), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(r"listening on port (\d+)\n", line)
        assert match, line + process.stdout.read()
        yield f"http://127.0.0.1:{match[1]}"
    finally:
        process.kill()
        process.wait()


def test_an_image_from_scratch_has_80_mb_and_serves(quickstart: Exported, root_of_image: Path, service: str) -> None:
    files = [path for path in root_of_image.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files if path.name != "cpuinfo") < LIMIT
    assert not [path for path in files if "torch" in path.name or "numpy" in path.parts or "aotc" in path.parts]
    given = numpy.random.default_rng(0).standard_normal((1, 128, 256)).astype(numpy.float32)

    def post(rows: object) -> Any:
        body = json.dumps({"x": rows}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{service}/predict", body), timeout=60) as answer:
            return json.load(answer)

    result = numpy.array(post(given.tolist())["y"], numpy.float32)
    assert difference(result, quickstart.eager(given)) < TOLERANCE
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(given[:, :100].tolist())
    assert caught.value.code == 422 and "seq is 100, the bucket takes 128" in json.load(caught.value)["error"]
    with urllib.request.urlopen(f"{service}/healthz", timeout=60) as answer:
        assert json.load(answer) == {"inputs": ["float32 [batch, seq, 256]"]}
