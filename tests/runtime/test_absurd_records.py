"""Records that are well typed and make no sense: a CorruptError with every reason where they enter a store, and at load
never another exception; nothing is imported."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from bound_files import bind_files
from hand_built import CPU, FakeLibrary, attach_fakes, make_artifact, tensor
from processes import ROOT, run_python
from torch import Tensor, nn

from aotc.errors import AotcError, CorruptError, LibraryError
from aotc.machine.compatibility import mismatches
from aotc.machine.environment import this_environment
from aotc.reads.module_check import check_module
from aotc.reads.tensors import dtype_name
from aotc.records import (
    Argument,
    Artifact,
    Backward,
    ConstantLeaf,
    File,
    Gradient,
    LaunchPick,
    Leaf,
    Output,
    PadRule,
    Parameter,
    Region,
    ResultContainer,
    Saved,
    Signature,
    SizeRange,
    StateSpec,
    Total,
    decode_artifact,
)
from aotc.runtime.conversions.result_containers import maker
from aotc.runtime.libraries.library_folder import FilesInFolder
from aotc.runtime.load import bind_artifact
from aotc.store.layout.check_record import DEEPEST, DTYPES, check_record

X = tensor("x", "batch", 4, pad={"batch": PadRule(0)})


def artifact_with(**fields: Any) -> Artifact:
    return make_artifact([X], [{"batch": 4}], **fields)


def variant_with(**fields: Any) -> Artifact:
    artifact = artifact_with()
    return msgspec.structs.replace(artifact, variants=(msgspec.structs.replace(artifact.variants[0], **fields),))


def signed(leaves: Sequence[Leaf], *parameters: Parameter, buckets: Sequence[Any] = ({"batch": 4},)) -> Artifact:
    return make_artifact(leaves, buckets, parameters=parameters or None)


def ambient_with(**fields: Any) -> Artifact:
    artifact = artifact_with()
    return msgspec.structs.replace(artifact, ambient=msgspec.structs.replace(artifact.ambient, **fields))


def deep(levels: int) -> Any:
    tree: Any = 0
    for _ in range(levels):
        tree = [tree]
    return tree


def deep_result(levels: int) -> Any:
    tree: Any = 0
    for _ in range(levels):
        tree = ResultContainer("list", (tree,))
    return tree


def imports_of(*names: str) -> Artifact:
    artifact = artifact_with()
    imports = dict.fromkeys(names, "")
    return msgspec.structs.replace(artifact, module=msgspec.structs.replace(artifact.module, imports=imports))


def named(name: str) -> Artifact:
    return artifact_with(state=[StateSpec(name, "float32", (), ())])


WEIGHT = StateSpec("weight", "float32", (2, 3), (3, 1))


def trained(**fields: Any) -> Artifact:
    """A variant whose backward takes the gradient of its one result, and gives that of its one argument."""
    files = tuple(File(name, "sha256:" + "0" * 64, 1, "sha256:" + "0" * 64, 1) for name in ("model.so", "backward.so"))
    saved, gradients = (Saved(gradient=0),), (Gradient(0, 0),)
    backward = Backward("backward.so", 1, (0,), saved, gradients)
    return variant_with(files=files, library="model.so", backward=msgspec.structs.replace(backward, **fields))


ABSURD = {
    "a backward that is not a file": (trained(library="other.so"), "is not one of its files, or is the forward's"),
    "a backward that is the forward": (trained(library="model.so"), "is not one of its files, or is the forward's"),
    "results that the outputs are not": (trained(results=0), "its forward has 0 results"),
    "a gradient that the backward does not give": (trained(gradients=(Gradient(1, 0),)), "1 of the tensors that pass"),
    "what is saved from nowhere": (trained(saved=(Saved(),)), "1 of the tensors that pass between its libraries"),
    "what is saved from two places": (trained(saved=(Saved(0, 0),)), "1 of the tensors that pass between"),
    "a saved argument that is not there": (trained(saved=(Saved(argument=1),)), "1 of the tensors that pass between"),
    "a gradient of no result": (trained(saved=(Saved(gradient=1),)), "1 of the tensors that pass between"),
    "no gradient of what is gone": (trained(without=(Argument(state="gone"),)), "1 of the tensors without a gradient"),
    "a gradient for no argument": (trained(gradients=(Gradient(0, 1),)), "1 of the tensors that pass between"),
    "a gradient of a result that is not there": (
        trained(gradients=(Gradient(0, 0, (1,)),)),
        "1 of the tensors that pass between",
    ),
    "a result that depends on itself": (
        trained(totals=(Total(0, 0, (0,)),)),
        "1 of the tensors that pass between",
    ),
    "a view of a constant": (
        variant_with(outputs=(Output(constant=1, view=True),)),
        "a view of an input that is not a tensor",
    ),
    "a dtype that is none": (signed([tensor("x", "batch", dtype="float33")]), "'float33' is not a dtype"),
    "a dtype that is a function": (signed([tensor("x", "batch", dtype="ones")]), "'ones' is not a dtype"),
    "a dtype of a weight that is none": (
        artifact_with(state=[msgspec.structs.replace(WEIGHT, dtype="")]),
        "weight: '' is not a dtype",
    ),
    "an ambient dtype that is none": (ambient_with(autocast="Tensor"), "'Tensor' is not a dtype"),
    "a layout of another rank": (
        signed([tensor("x", "batch", 4, layout="channels_last")]),
        "a tensor of 2 axes has no layout channels_last",
    ),
    "an expression that is none": (signed([tensor("x", "batch", "os.abort()")]), "is not an expression"),
    "a dim that no input says": (signed([tensor("x", "batch", "batch*seq")]), "needs seq, which no input says"),
    "padding with a text": (
        signed([tensor("x", "batch", pad={"batch": PadRule("zero")})]),
        "padded with 'zero', which float32 cannot hold",
    ),
    "padding with what the dtype cannot hold": (
        signed([tensor("x", "batch", dtype="uint8", pad={"batch": PadRule(-1e300)})]),
        "which uint8 cannot hold",
    ),
    "padding with a number beyond all": (
        signed([tensor("x", "batch", dtype="int64", pad={"batch": PadRule(10**40)})]),
        "which int64 cannot hold",
    ),
    "two parameters of one name": (
        signed([X, ConstantLeaf("y", 1)], Parameter("x", 0), Parameter("x", 1)),
        "two parameters have one name",
    ),
    "a position after keywords": (
        signed([X, ConstantLeaf("y", 1)], Parameter("x", 0, "keyword"), Parameter("y", 1)),
        "follow others that are not",
    ),
    "a leaf that is not there": (signed([X], Parameter("x", 1)), "not each in one place"),
    "a negative leaf": (signed([X], Parameter("x", -1)), "not each in one place"),
    "a leaf twice": (signed([X], Parameter("x", [0, 0])), "not each in one place"),
    "a leaf nowhere": (signed([X, X], Parameter("x", 0)), "not each in one place"),
    "a leaf that is true": (signed([X], Parameter("x", False)), "a bool where a leaf's index should be"),
    "a leaf that is a text": (signed([X], Parameter("x", {"a": "0"})), "a str where a leaf's index should be"),
    "a structure too deep": (signed([X], Parameter("x", deep(DEEPEST + 1))), f"more than {DEEPEST} levels"),
    "strides of another rank": (
        artifact_with(state=[msgspec.structs.replace(WEIGHT, stride=(1,))]),
        "2 sizes and 1 strides",
    ),
    "strides beyond all memory": (
        artifact_with(state=[msgspec.structs.replace(WEIGHT, stride=(10**30, 1))]),
        "strides that no tensor has",
    ),
    "two tensors of one name": (artifact_with(state=[WEIGHT, WEIGHT]), "two tensors of the module have one name"),
    "an argument of a leaf that is not there": (variant_with(arguments=(Argument(leaf=1),)), "1 of 1 arguments"),
    "an argument of a negative leaf": (variant_with(arguments=(Argument(leaf=-1),)), "1 of 1 arguments"),
    "an argument of no tensor": (variant_with(arguments=(Argument(state="weight"),)), "1 of 1 arguments"),
    "an argument of nothing": (variant_with(arguments=(Argument(), Argument(leaf=0))), "1 of 2 arguments"),
    "an argument of two things": (variant_with(arguments=(Argument(leaf=0, state="x"),)), "1 of 1 arguments"),
    "an output of two places": (variant_with(outputs=(Output(index=0, leaf=0),)), "an output comes from two places"),
    "an output that is an input that is not there": (variant_with(outputs=(Output(leaf=7),)), "is the input 7"),
    "an output that is not a tensor of the module": (variant_with(outputs=(Output(state="w"),)), "an output is `w`"),
    "an output cropped by no expression": (variant_with(outputs=(Output(index=0, dims=("a b",)),)), "cannot be read"),
    "an output cropped by no dim": (variant_with(outputs=(Output(index=0, dims=("seq",)),)), "needs seq"),
    "an output that its result does not hold": (variant_with(output_tree=ResultContainer("list", ())), "1 outputs are"),
    "an output that its result holds twice": (
        variant_with(output_tree=ResultContainer("list", (0, 0))),
        "1 outputs are",
    ),
    "a result that is too deep": (variant_with(output_tree=deep_result(DEEPEST + 1)), f"more than {DEEPEST} levels"),
    "a dict without its keys": (variant_with(output_tree=ResultContainer("dict", (0,))), "1 items with 0 keys"),
    "a write to an input that is not there": (
        variant_with(mutated_leaves=(3,)),
        "input that is not a tensor",
    ),
    "the storage of an input that is not there": (
        variant_with(storage_leaves=(3,)),
        "storage of an input that is not a tensor",
    ),
    "a write to no tensor of the module": (variant_with(mutated_state=("w",)), "writes to w"),
    "a range that ends before it begins": (
        variant_with(bucket={"batch": SizeRange(9, 3)}),
        "`batch` has the sizes 9 to 3",
    ),
    "a graph at other sizes": (
        variant_with(launch=LaunchPick(True, sizes=({"batch": 5},))),
        "a graph is to be captured at sizes that are not the bucket's",
    ),
    "a name of a tensor that is too long": (
        artifact_with(state=[StateSpec("w" * 2000, "float32", (), ())]),
        "has 2000",
    ),
    "a name of a tensor of too many parts": (
        artifact_with(state=[StateSpec("." * 300, "float32", (), ())]),
        "301 parts",
    ),
    "a module of too many parts": (imports_of(".".join("a" * 500)), "500 parts"),
    "a graph at other dims": (
        variant_with(launch=LaunchPick(True, sizes=({"seq": 4},))),
        "a graph is to be captured at sizes that are not the bucket's",
    ),
}


@pytest.mark.parametrize("what", ABSURD)
def test_an_absurd_record_is_refused_with_its_reason(what: str) -> None:
    artifact, reason = ABSURD[what]
    with pytest.raises(CorruptError, match="makes no sense") as caught:
        check_record(artifact)
    assert reason in str(caught.value)


def test_every_reason_is_said_at_once() -> None:
    outputs, tree = (Output(state="w"), Output(leaf=9)), ResultContainer("tuple", (0, 1))
    artifact = variant_with(mutated_leaves=(3,), mutated_state=("w",), outputs=outputs, output_tree=tree)
    with pytest.raises(CorruptError) as caught:
        check_record(artifact)
    assert len(caught.value.issues) == 4
    assert {issue.where for issue in caught.value.issues} == {"bucket batch=4"}


def regions_of(*instances: tuple[str, ...], variants: int = 0) -> Artifact:
    artifact = artifact_with()
    names = [f"{paths[0]}({number})" for number, paths in enumerate(instances)]
    regions = tuple(Region(name, paths, Signature((), ())) for name, paths in zip(names, instances, strict=True))
    made = tuple(msgspec.structs.replace(artifact.variants[0], region=name, bucket={}) for name in names[:variants])
    return msgspec.structs.replace(artifact, variants=made, regions=regions)


@pytest.mark.parametrize(
    "instances",
    [[("a", "a.b")], [("a", "b"), ("a",)], [("a.b", "a-b", "a")], [("",)], [("", "a")], [("a", "a0", "a.0.b")]],
)
def test_regions_that_lie_within_one_another_are_refused(instances: list[tuple[str, ...]]) -> None:
    with pytest.raises(CorruptError, match="regions lie within one another"):
        check_record(regions_of(*instances))


def test_regions_beside_one_another_are_taken() -> None:
    check_record(regions_of(("a.0", "a.00", "a0"), ("b", "a-0", "a.1.2")))


def test_regions_with_the_same_instances_are_forms_of_their_calls() -> None:
    check_record(regions_of(("a", "b"), ("a", "b"), ("c",)))


@pytest.mark.parametrize(
    "artifact",
    [
        lambda: regions_of(("." * 300_000,)),
        lambda: regions_of((".".join("a" * 60),) * 20_000),
        lambda: regions_of(*[(f"a{number}",) for number in range(10_000)], variants=10_000),
        lambda: msgspec.structs.replace(regions_of(*[("a",)] * 10_000, variants=10_000), variants=()),
        lambda: imports_of(*map(str, range(100_000))),
        lambda: make_artifact([ConstantLeaf("x", 1)] * 10_000, [{}] * 10_000),
    ],
)
def test_what_a_record_says_a_lot_of_takes_no_minutes(artifact: Callable[[], Artifact]) -> None:
    made = artifact()
    begin = time.process_time()
    with contextlib.suppress(CorruptError):
        check_record(made)
    assert time.process_time() - begin < 5.0


def test_a_path_of_many_parts_takes_no_more_memory_than_it_has_characters() -> None:
    made = regions_of(("." * 20_000, "a"))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="20001 parts"):
            check_record(made)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


HOSTILE: dict[str, tuple[Any, tuple[str | int, ...], int]] = {
    "results beyond all memory": (trained(), ("variants", 0, "backward", "results"), 2**40),
    "a result that is differentiable": (trained(), ("variants", 0, "backward", "differentiable", 0), 2**62),
    "an argument of a gradient": (trained(), ("variants", 0, "backward", "gradients", 0, "argument"), 2**40),
    "what is saved": (trained(), ("variants", 0, "backward", "saved", 0, "gradient"), -1),
    "a leaf": (artifact_with(), ("variants", 0, "arguments", 0, "leaf"), -1),
    "an output": (artifact_with(), ("variants", 0, "outputs", 0, "index"), 2**70),
    "a negative output": (artifact_with(), ("variants", 0, "outputs", 0, "index"), -1),
    "a size": (artifact_with(), ("signature", "leaves", 0, "shape", 1), -4),
    "a size beyond all": (artifact_with(), ("signature", "leaves", 0, "shape", 1), 10**30),
    "a negative bucket": (artifact_with(), ("variants", 0, "bucket", "batch"), -1),
    "a negative stride": (artifact_with(state=[WEIGHT]), ("state", 0, "stride", 1), -1),
    "a bucket": (artifact_with(), ("variants", 0, "bucket", "batch"), 2**64),
    "a step of a range": (
        variant_with(bucket={"batch": SizeRange(0, 9, 3)}),
        ("variants", 0, "bucket", "batch", "multiple_of"),
        0,
    ),
    "a stride": (artifact_with(state=[WEIGHT]), ("state", 0, "stride", 0), 2**63),
    "the size of a file": (trained(), ("variants", 0, "files", 0, "size"), -1),
}
"""A record, the place of a number in it, and what stands there instead."""


@pytest.mark.parametrize("what", HOSTILE)
def test_a_number_that_torch_or_memory_cannot_hold_is_refused_when_the_record_is_read(what: str) -> None:
    """Also from a folder into which somebody else has written: no load counts to it."""
    built, keys, number = HOSTILE[what]
    artifact = built.record(File("provenance", "sha256:" + "0" * 64, 1, "sha256:" + "0" * 64, 1))
    record = json.loads(artifact.encode())
    assert decode_artifact(json.dumps(record).encode()) == artifact
    *path, last = keys
    inner = functools.reduce(lambda value, key: value[key], path, record)
    assert last in inner if isinstance(inner, dict) else inner[last] is not None
    inner[last] = number
    with pytest.raises(CorruptError, match="Expected `int`") as caught:
        decode_artifact(json.dumps(record).encode())
    assert str(keys[-1]) in str(caught.value) or f"{keys[-2]}[...]" in str(caught.value)


@pytest.mark.parametrize("what", ABSURD)
def test_a_load_of_an_absurd_record_ends_with_no_other_error(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load does not look for what makes no sense, and says so where it trips over it."""
    monkeypatch.setitem(
        bind_artifact.__globals__, "open_library", lambda *_: FakeLibrary(lambda *arguments: arguments[:1])
    )
    with contextlib.suppress(AotcError):
        bind_files(
            ABSURD[what][0],
            lambda variant: FilesInFolder(tmp_path, variant.library),
            None,
            CPU,
            ignore=("class", "source", "attributes", "training"),
            read_file=no_file,
        )


def test_an_error_over_an_absurd_record_is_explained_by_it(tmp_path: Path) -> None:
    def trip(variant: object) -> FilesInFolder:
        raise KeyError("library.so")

    with pytest.raises(CorruptError, match="makes no sense"):
        bind_files(variant_with(mutated_leaves=(3,)), trip, None, CPU, read_file=no_file)
    with pytest.raises(KeyError):
        bind_files(artifact_with(), trip, None, CPU, read_file=no_file)


def test_every_dtype_of_torch_is_known() -> None:
    found = {dtype_name(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert found - {"bit"} <= DTYPES


def no_file(file: File) -> bytes:
    raise AssertionError(file)


# -- what shows only at a call ----------------------------------------------------------------------------------------


def call(artifact: Artifact, function: Callable[..., Any], *arguments: Tensor) -> Any:
    return attach_fakes(artifact, function)(*arguments)


def test_an_axis_that_shrinks_in_a_larger_bucket_is_refused() -> None:
    shrinking = make_artifact([X, tensor("y", "8-batch", pad={"batch": PadRule(0)})], [{"batch": 4}])
    with pytest.raises(CorruptError, match="`8-batch` of y is 5 for a call and 4 in a larger bucket"):
        call(shrinking, lambda x, y: x, torch.zeros(3, 4), torch.zeros(5))


def test_a_bucket_that_divides_by_zero_is_refused() -> None:
    with pytest.raises(CorruptError, match="bucket n=0 gives the inputs no shape"):
        attach_fakes(make_artifact([tensor("x", "n", "8 // n")], [{"n": 0}]), lambda x: x)


@pytest.mark.parametrize("size", [2**46, 2**62])
def test_a_bucket_that_no_memory_holds_is_refused_when_a_call_is_padded_to_it(size: int) -> None:
    with pytest.raises(CorruptError, match="which no memory holds"):
        call(make_artifact([X], [{"batch": size}]), lambda x: x, torch.zeros(3, 4))


def test_a_crop_to_a_size_beyond_64_bits_is_refused() -> None:
    artifact = artifact_with(outputs=(Output(index=0, dims=(f"batch*{2**62}", "")),))
    with pytest.raises(CorruptError, match="does not fit the library's output"):
        call(artifact, lambda x: x, torch.zeros(3, 4))


@pytest.mark.parametrize("dims", [("", "", "batch"), ("", "batch")])
def test_crops_that_do_not_fit_the_output_are_refused(dims: tuple[str, ...]) -> None:
    artifact = artifact_with(outputs=(Output(index=0, dims=dims),))
    with pytest.raises(CorruptError, match="does not fit the library's output"):
        call(artifact, lambda x: torch.zeros(4, 2), torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("outputs", "sample", "given"),
    [((Output(index=0),), (0,), 2), ((Output(index=0), Output(index=1)), (0, 0), 1), ((Output(index=5),), 0, 1)],
)
def test_a_library_that_gives_another_number_of_outputs_is_no_wrong_answer(
    outputs: tuple[Output, ...], sample: Any, given: int
) -> None:
    artifact = artifact_with(outputs=outputs, output_sample=sample)
    with pytest.raises(LibraryError, match=f"the library gave {given} outputs"):
        call(artifact, lambda x: (x,) * given, torch.zeros(4, 4))


class Counted(FakeLibrary):
    def __init__(self, takes: int, gives: int) -> None:
        super().__init__(lambda *arguments: arguments[:1] * gives)
        self.counts = (takes, gives)  # type: ignore[assignment]


@pytest.mark.parametrize(("takes", "gives"), [(2, 1), (0, 1), (1, 0)])
def test_a_library_of_other_counts_is_refused_at_load(
    takes: int, gives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bind_artifact.__globals__, "open_library", lambda *_: Counted(takes, gives))
    with pytest.raises(CorruptError, match=f"takes {takes} tensors and gives {gives}"):
        bind_files(
            artifact_with(), lambda variant: FilesInFolder(tmp_path, variant.library), None, CPU, read_file=no_file
        )


def test_a_shared_object_that_is_no_library_of_ours_is_a_library_error(tmp_path: Path) -> None:
    from torch import _C

    (tmp_path / "library.so").symlink_to(_C.__file__)
    with pytest.raises(LibraryError, match="cannot be opened"):
        bind_files(
            artifact_with(), lambda variant: FilesInFolder(tmp_path, variant.library), None, CPU, read_file=no_file
        )


# -- texts that other code reads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"[]", b'{"":1}', b"\xff", b"[" * 9999, b'{"a":NaN}', b"9" * 9999])
def test_attributes_that_cannot_be_read_are_refused(data: bytes) -> None:
    artifact = artifact_with()
    guard = msgspec.structs.replace(artifact.module, attributes_file=File("a", "", 0, "", 0))
    with pytest.raises(CorruptError, match="module's attributes cannot be read"):
        check_module(msgspec.structs.replace(artifact, module=guard), nn.ReLU(), ("class",), lambda file: data)


@pytest.mark.parametrize("field", ["torch", "libc", "cuda", "cuda_capability"])
@pytest.mark.parametrize("version", ["", "9", "²", "٣.٤", "9" * 5000, "...", "-1", "1e9", "+", "a.b"])
def test_any_text_can_stand_for_a_version(field: str, version: str) -> None:
    artifact = artifact_with()
    needed = msgspec.structs.replace(artifact.environment, **{field: version})
    here = this_environment("cpu")
    for machine in (here, msgspec.structs.replace(here, cuda_capability="9.0", cuda="12.4")):
        mismatches(msgspec.structs.replace(artifact, environment=needed), machine)


STRUCTURES = {
    "a defaultdict of a built-in function": ResultContainer("collections.defaultdict", (0,), ("a",), "breakpoint"),
    "a defaultdict of a module's function": ResultContainer("collections.defaultdict", (0,), ("a",), "os.abort"),
    "a defaultdict of nothing": ResultContainer("collections.defaultdict", (0,), ("a",)),
    "a class without a name": ResultContainer("NO_SERIALIZED_TYPE_NAME_FOUND", (0,)),
    "a class that nobody registered": ResultContainer("os.system", (0,)),
    "a class of a module that is not imported": ResultContainer("antigravity.Fly", (0,)),
    "keys of another number": ResultContainer("dict", (0,), ("a", "b")),
    "one key twice": ResultContainer("dict", (0, 1), ("a", "a")),
    "what torch's operators return, with too few": ResultContainer("torch.return_types.topk", (0,)),
    "namedtuple itself": ResultContainer("collections.namedtuple", (0,), context="x.Y"),
    "the length of a deque in words": ResultContainer("collections.deque", (0,), context="long"),
}


@pytest.mark.parametrize("what", STRUCTURES)
def test_a_structure_that_cannot_be_made_is_refused_and_imports_and_calls_nothing(what: str) -> None:
    container = STRUCTURES[what]
    with pytest.raises(CorruptError, match="output structure cannot be read"):
        maker(container, plain=False)
    assert "antigravity" not in sys.modules


def test_no_text_of_a_record_imports_the_compiler() -> None:
    """torch imports `torch._dynamo` when somebody asks for its attribute `_dynamo`, as `getattr` with a dtype does."""
    run_python(
        """
import sys
from hand_built import make_artifact, tensor
from aotc.errors import CorruptError
from aotc.store.layout.check_record import check_record
for name in ("_dynamo", "_inductor", "_export", "onnx"):
    try:
        check_record(make_artifact([tensor("x", 1, dtype=name)]))
    except CorruptError as error:
        assert f"{name!r} is not a dtype" in str(error)
    else:
        raise AssertionError(name)
assert not {"torch._dynamo", "torch._inductor", "torch.onnx"} & sys.modules.keys()
""",
        PYTHONPATH=f"{ROOT / 'tests'}:{Path(__file__).parent}",
    )
