"""Weights from a checkpoint instead of a module: what it may be, and everything that can be wrong with one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_built import CPU, FakeLibrary, make_artifact, specs_of, tensor
from msgspec.structs import replace
from processes import run_python
from safetensors.torch import load, save_file
from torch import Tensor, nn

from aotc.errors import BindError, CorruptError
from aotc.reads.state_specs import named_constants
from aotc.records import Artifact, StateSpec
from aotc.runtime.call import BoundModule, CompiledCall
from aotc.runtime.checkpoints.checkpoint_files import Weights, open_weights
from aotc.runtime.checkpoints.state import bind_checkpoint
from aotc.tensors.constants import decode_constants, encode_constants

X = torch.ones(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 4)


def serve(
    artifact: Artifact, weights: Weights, constants: Callable[[], Mapping[str, Tensor]] = dict
) -> tuple[CompiledCall, FakeLibrary]:
    """A callable that gives its weights, flat and one after the other."""
    library = FakeLibrary(lambda x, *state: torch.cat([each.flatten().double() for each in state]))
    bound = bind_checkpoint(artifact, open_weights(weights), constants, CPU)
    return CompiledCall(artifact, [library], BoundModule(None, bound), CPU, "error"), library


def built_for(*state: StateSpec, **fields: Any) -> Artifact:
    return make_artifact([tensor("x", 1)], state=state, **fields)


def flat(module: nn.Module) -> list[float]:
    return torch.cat([each.detach().flatten().double() for each in module.parameters()]).tolist()


def refused(action: Callable[[], object]) -> BindError:
    with pytest.raises(BindError) as caught:
        action()
    return caught.value


# -- what a checkpoint may be -----------------------------------------------------------------------------------------


def as_mapping(state: dict[str, Tensor], folder: Path) -> Weights:
    return state


def as_file(state: dict[str, Tensor], folder: Path) -> Weights:
    save_file(state, folder / "any.safetensors")
    return str(folder / "any.safetensors")


def as_index(state: dict[str, Tensor], folder: Path) -> Weights:
    files = {name: f"part-{number}.safetensors" for number, name in enumerate(state)}
    for name, file in files.items():
        save_file({name: state[name]}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return index


def as_folder_with_a_file(state: dict[str, Tensor], folder: Path) -> Weights:
    as_file(state, folder)
    return folder


def as_folder_with_shards(state: dict[str, Tensor], folder: Path) -> Weights:
    as_index(state, folder)
    return folder


FORMS = [as_mapping, as_file, as_index, as_folder_with_a_file, as_folder_with_shards]


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_a_file_an_index_their_folder_or_a_mapping(form: Any, tmp_path: Path) -> None:
    module = linear()
    weights = form({name: each.detach() for name, each in module.named_parameters()}, tmp_path)
    compiled, _ = serve(built_for(*specs_of(module)), weights)
    assert compiled(X).tolist() == flat(module)


def test_a_file_is_mapped_and_not_read_into_memory(tmp_path: Path) -> None:
    module = linear()
    compiled, library = serve(built_for(*specs_of(module)), as_file(dict(module.state_dict()), tmp_path))
    compiled(X)
    addresses = [each.data_ptr() for each in library.seen[0][1:]]
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "any.safetensors" in line]
    assert mapped
    ranges = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in mapped]
    assert all(any(low <= address < high for low, high in ranges) for address in addresses)


def test_what_a_model_writes_to_its_weights_stays_in_the_process(tmp_path: Path) -> None:
    spec = StateSpec(name="total", dtype="float32", shape=(2,), stride=(1,))
    path = as_file({"total": torch.zeros(2)}, tmp_path)
    for _ in range(2):
        compiled, library = serve(built_for(spec), path)
        library.function = lambda x, total: total.add_(1).clone()
        assert [compiled(X).tolist() for _ in range(2)] == [[1, 1], [2, 2]]


def test_weights_that_were_mapped_in_inference_mode_are_plain_tensors(tmp_path: Path) -> None:
    module = linear()
    with torch.inference_mode():
        compiled, library = serve(built_for(*specs_of(module)), as_file(dict(module.state_dict()), tmp_path))
        compiled(X)
    assert not any(each.is_inference() for each in library.seen[0][1:])


def test_tensors_of_a_mapping_are_used_in_place_but_for_those_that_the_model_writes_to() -> None:
    given = {"a": torch.zeros(2), "b": torch.zeros(2)}
    specs = [StateSpec(name=name, dtype="float32", shape=(2,), stride=(1,)) for name in given]
    artifact = built_for(*specs)
    (variant,) = artifact.variants
    artifact = replace(artifact, variants=(replace(variant, mutated_state=("b",)),))
    compiled, library = serve(artifact, given)
    compiled(X)
    _, a, b = library.seen[0]
    assert a.data_ptr() == given["a"].data_ptr()
    assert b.data_ptr() != given["b"].data_ptr()


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_one_name_of_tied_weights_is_enough(kept: str) -> None:
    module = Tied()
    specs = specs_of(module, ["embed.weight"])
    compiled, _ = serve(built_for(*specs), {kept: module.embed.weight})
    assert compiled(X).tolist() == flat(module)


def test_tied_weights_under_both_names_must_be_equal() -> None:
    module, specs = Tied(), specs_of(Tied(), ["embed.weight"])
    equal = {"embed.weight": module.embed.weight, "head.weight": module.embed.weight.clone()}
    compiled, _ = serve(built_for(*specs), equal)
    assert compiled(X).tolist() == flat(module)
    error = refused(lambda: serve(built_for(*specs), {**equal, "head.weight": module.embed.weight + 1}))
    assert [issue.where for issue in error.issues] == ["head.weight"]


def test_weights_are_laid_out_as_they_were_compiled() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    spec = StateSpec(name="w", dtype="float32", shape=(2, 3), stride=(1, 2))
    compiled, library = serve(built_for(spec), {"w": values})
    compiled(X)
    assert library.seen[0][1].stride() == (1, 2)
    assert torch.equal(library.seen[0][1], values)


def test_weights_that_repeat_a_slice_need_not_be_stored_so() -> None:
    spec = StateSpec(name="w", dtype="float32", shape=(2, 3), stride=(0, 1))
    compiled, library = serve(built_for(spec), {"w": torch.arange(3.0).repeat(2, 1)})
    assert compiled(X).tolist() == [0, 1, 2, 0, 1, 2]
    assert library.seen[0][1].stride() == (0, 1)
    assert "strides [0, 1]" in refused(lambda: serve(built_for(spec), {"w": torch.arange(6.0).reshape(2, 3)})).message


def test_a_tensor_that_lies_askew_is_copied() -> None:
    """A file written without padding may put float32 at any byte."""
    askew = torch.frombuffer(bytearray(13), dtype=torch.float32, offset=1, count=3)
    assert askew.data_ptr() % 4 == 1
    spec = StateSpec(name="w", dtype="float32", shape=(3,), stride=(1,))
    compiled, library = serve(built_for(spec), {"w": askew})
    assert compiled(X).tolist() == [0, 0, 0]
    assert library.seen[0][1].data_ptr() % 4 == 0


# -- what is wrong with a checkpoint ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_everything_that_is_wrong_is_listed_at_once_with_both_values(form: Any, tmp_path: Path) -> None:
    state = {
        "weight": torch.zeros(4, 2),
        "bias": torch.zeros(4, dtype=torch.bfloat16),
        "extra": torch.zeros(1),
    }
    spec = StateSpec(name="scale", dtype="float32", shape=(), stride=())
    error = refused(lambda: serve(built_for(*specs_of(linear()), spec), form(state, tmp_path)))
    assert {(issue.where, issue.expected, issue.actual) for issue in error.issues} == {
        ("scale", "", ""),
        ("extra", "", ""),
        ("weight", "[4, 3]", "[4, 2]"),
        ("bias", "float32", "bfloat16"),
    }


def test_what_the_model_has_and_no_variant_takes_may_be_there_or_not() -> None:
    module = linear()
    artifact = built_for(*specs_of(module, ["weight"]), unused=("bias",))
    for weights in (dict(module.named_parameters()), {"weight": module.weight}):
        compiled, _ = serve(artifact, weights)
        assert compiled(X).tolist() == module.weight.flatten().tolist()


@pytest.mark.parametrize(
    ("built", "given", "hint"),
    [("", "bert.", "begin with `bert.`"), ("bert.", "", "the artifact's names begin with `bert.`")],
)
def test_a_prefix_too_many_or_too_few_is_said(built: str, given: str, hint: str) -> None:
    specs = [StateSpec(name=f"{built}{name}", dtype="float32", shape=(), stride=()) for name in ("a.w", "a.b", "c")]
    weights = {f"{given}{name}": torch.zeros(()) for name in ("a.w", "a.b", "c")} | {"head.w": torch.zeros(())}
    error = refused(lambda: serve(built_for(*specs), weights))
    assert hint in error.hint
    assert len(error.issues) == 7


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (3, "weights is int"),
        ({"weight": [1.0]}, "not all plain tensors"),
        ({"weight": torch.zeros(4, 3, device="meta")}, "not all plain tensors"),
        ({"weight": torch.eye(3).to_sparse()}, "not all plain tensors"),
        ({3: torch.zeros(1)}, "not all plain tensors"),
    ],
)
def test_what_is_no_checkpoint_is_refused(weights: Any, message: str) -> None:
    assert message in refused(lambda: serve(built_for(*specs_of(linear())), weights)).message


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    artifact = built_for(*specs_of(linear()))

    def message(weights: Weights) -> str:
        return refused(lambda: serve(artifact, weights)).message

    assert "no weights at" in message(tmp_path / "none.safetensors")
    assert "nothing of the kind" in message(tmp_path)
    (tmp_path / "pickle.safetensors").write_bytes(b"\x80\x02 no")
    assert "cannot be read as safetensors" in message(tmp_path / "pickle.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert "other.safetensors, pickle.safetensors" in message(tmp_path)
    index = tmp_path / "m.safetensors.index.json"
    index.write_text("[1]")
    assert "cannot be read" in message(index)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors", "b": "away.safetensors"}}))
    assert "missing: away.safetensors, gone.safetensors" in message(index)
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    assert "files elsewhere" in message(index)
    index.write_text(json.dumps({"weight_map": {"a": "other.safetensors", "b": "other.safetensors"}}))
    assert "in none of its files: b" in message(index)


def index_of(folder: Path, names: dict[str, str], shards: dict[str, dict[str, Tensor]]) -> Path:
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    return index


@pytest.mark.parametrize("one", ["a.safetensors", "b.safetensors"])
def test_the_index_says_which_shard_a_tensor_comes_from(one: str, tmp_path: Path) -> None:
    shards = {
        "a.safetensors": {"weight": torch.full((4, 3), 1.0), "bias": torch.zeros(4)},
        "b.safetensors": {"weight": torch.full((4, 3), 2.0), "more": torch.zeros(4)},
    }
    opened = open_weights(index_of(tmp_path, {"weight": one, "bias": "a.safetensors", "more": "b.safetensors"}, shards))
    assert torch.equal(opened.read("weight"), shards[one]["weight"])


def test_a_tensor_in_another_shard_than_the_index_says_is_refused_with_both(tmp_path: Path) -> None:
    shards = {"a.safetensors": {"bias": torch.zeros(4)}, "b.safetensors": {"weight": torch.zeros(4, 3)}}
    error = refused(
        lambda: open_weights(index_of(tmp_path, dict.fromkeys(("weight", "bias"), "a.safetensors"), shards))
    )
    assert "weight" in error.message  # b.safetensors, which nothing names, is not looked at
    names = {"weight": "a.safetensors", "bias": "a.safetensors", "more": "b.safetensors"}
    shards["b.safetensors"]["more"] = torch.zeros(1)
    (issue,) = refused(lambda: open_weights(index_of(tmp_path, names, shards))).issues
    assert (issue.where, issue.expected, issue.actual) == ("weight", "a.safetensors", "b.safetensors")


def test_a_tensor_that_the_index_does_not_name_must_be_in_one_shard(tmp_path: Path) -> None:
    shards = {file: {file[0]: torch.zeros(1), "extra": torch.ones(1)} for file in ("a.safetensors", "b.safetensors")}
    names = {"a": "a.safetensors", "b": "b.safetensors"}
    message = refused(lambda: open_weights(index_of(tmp_path, names, shards))).message
    assert "`extra` is in a.safetensors and in b.safetensors" in message
    del shards["b.safetensors"]["extra"]
    assert set(open_weights(index_of(tmp_path, names, shards)).forms) == {"a", "b", "extra"}


def test_other_formats_and_what_cannot_be_read_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    for weights in (tmp_path, tmp_path / "pytorch_model.bin"):
        error = refused(lambda weights=weights: open_weights(weights))  # type: ignore[misc]
        assert "pytorch_model.bin" in error.message
        assert "safetensors.torch.save_file" in error.hint
    error = refused(lambda: open_weights("n" * 300))
    assert "File name too long" in error.message
    assert "read" in error.hint

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    monkeypatch.setattr("aotc.checkpoints.mapped_file.open_regular", denied)
    error = refused(lambda: open_weights(tmp_path / "a.safetensors"))
    assert "Permission denied" in error.message
    assert "save_file" not in error.hint


def test_frozen_artifacts_take_no_weights() -> None:
    artifact = built_for(*specs_of(linear(), digests=True), weights="frozen")
    assert "holds frozen weights" in refused(lambda: serve(artifact, dict(linear().named_parameters()))).message


def test_without_a_module_calls_cannot_be_run_eagerly() -> None:
    artifact = built_for(*specs_of(linear()))
    bound = bind_checkpoint(artifact, open_weights(dict(linear().named_parameters())), dict, CPU)
    error = refused(
        lambda: CompiledCall(artifact, [FakeLibrary(lambda *args: X)], BoundModule(None, bound), CPU, "eager")
    )
    assert "needs the module" in error.message


# -- what no checkpoint holds -----------------------------------------------------------------------------------------


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(2))
        for name, value in VALUES.items():
            self.register_buffer(name, value, persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("twice", self.kept, persistent=False)


VALUES = {
    "positions": torch.arange(4).expand(1, 4),
    "zeros": torch.zeros(2, 3, dtype=torch.bfloat16),
    "mask": torch.ones(2, 2, dtype=torch.bool).tril(),
    "nans": torch.full((3,), float("nan")),
    "signed": torch.tensor([0.0, -0.0]),
    "minus": torch.full((2,), -0.0),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
    "complex": torch.tensor([1 + 2j, 3j]),
    "repeated": torch.arange(3.0).expand(2, 3),
}


def test_buffers_that_are_persistent_under_no_name_are_constants() -> None:
    assert named_constants(Buffers()).keys() == VALUES.keys()


def test_constants_are_a_safetensors_file_and_need_no_numpy() -> None:
    """NumPy is none of aotc's dependencies, and the library's writer takes it."""
    values = {
        "é": torch.randn(3, 2),
        "ids": torch.arange(5),
        "on": torch.tensor([True, False]),
        "none": torch.empty(0, 2),
        "half": torch.randn(3).bfloat16(),
    }
    read = load(encode_constants(values))
    assert read.keys() == values.keys()
    assert all(read[name].dtype == value.dtype and torch.equal(read[name], value) for name, value in values.items())
    said = run_python(
        "import sys; sys.modules['numpy'] = None; import torch; from aotc.tensors.constants import encode_constants;"
        "print(len(encode_constants({'a': torch.arange(8.0)})))"
    )
    assert int(said) > 32


def test_constants_come_back_from_the_artifact_as_they_were() -> None:
    module = Buffers()
    values = decode_constants(encode_constants(named_constants(module)))
    assert values["zeros"].shape == () and values["mask"].shape == (2, 2)
    specs = tuple(
        StateSpec(spec.name, spec.dtype, spec.shape, spec.stride, persistent=False)
        for spec in specs_of(module, list(VALUES))
    )
    artifact = built_for(*specs)
    compiled, library = serve(artifact, {}, lambda: values)
    library.function = lambda x, *state: x
    compiled(X)
    for got, expected in zip(library.seen[0][1:], VALUES.values(), strict=True):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=0, atol=0, equal_nan=True)
    signs = dict(zip(VALUES, library.seen[0][1:], strict=True))
    assert torch.signbit(signs["signed"]).tolist() == [False, True]
    assert torch.signbit(signs["minus"]).all()


def test_constants_that_the_artifact_could_not_keep_may_be_given() -> None:
    spec = StateSpec(name="table", dtype="float32", shape=(2,), stride=(1,), persistent=False)
    assert [issue.where for issue in refused(lambda: serve(built_for(spec), {})).issues] == ["table"]
    compiled, _ = serve(built_for(spec), {"table": torch.ones(2)})
    assert compiled(X).tolist() == [1, 1]


def test_too_many_constants_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotc.tensors.constants.CONSTANTS_LIMIT", 100)
    assert encode_constants({"small": torch.arange(8)})
    assert encode_constants({"zeros": torch.zeros(1 << 20)})
    assert not encode_constants({"large": torch.arange(16)})


def test_a_checkpoint_that_holds_a_constant_too_is_as_good_and_the_artifacts_value_is_used() -> None:
    spec = StateSpec(name="table", dtype="float32", shape=(2,), stride=(1,), persistent=False)
    compiled, _ = serve(built_for(spec), {"table": torch.ones(5)}, lambda: {"table": torch.zeros(2)})
    assert compiled(X).tolist() == [0, 0]


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_stored_constant_of_another_form_is_refused(value: Tensor) -> None:
    spec = StateSpec(name="table", dtype="float32", shape=(2,), stride=(1,), persistent=False)
    assert "table" in refused(lambda: serve(built_for(spec), {}, lambda: {"table": value})).message


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"\xff" * 32, encode_constants({"a": torch.arange(3)})[:-1]])
def test_a_damaged_file_of_constants_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError, match="constants cannot be read"):
        decode_constants(data)


def test_strides_that_no_memory_has_are_refused() -> None:
    artifact = built_for(StateSpec("weight", "float32", (2, 2), (1 << 50, 1)))
    assert "for which there is no memory" in str(refused(lambda: serve(artifact, {"weight": torch.ones(2, 2)})))
