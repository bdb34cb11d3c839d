"""What is written down of a module and a process: equal things equally, different things differently."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib
import struct
import sys
import types
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from aotc.digest import sha256_bytes, sha256_json
from aotc.reads.attributes import module_attributes, origin_of
from aotc.reads.modes import take_ambient
from aotc.reads.sources import file_identity, public_name, source_digests
from aotc.reads.state_specs import state_specs
from aotc.reads.syntax import syntax_digest
from aotc.reads.tensors import dtype_name, dtype_of, named_state, tensor_digests


def digest(tensor: Tensor) -> str:
    return tensor_digests({"t": tensor})["t"]


# -- tensors ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), max_size=3), st.randoms(use_true_random=False))
def test_a_tensors_digest_is_that_of_its_bytes_in_logical_order(shape: list[int], random: Any) -> None:
    x = torch.tensor([random.random() for _ in range(torch.Size(shape).numel())]).reshape(shape)
    values = x.flatten().tolist()
    assert digest(x) == "sha256:" + hashlib.sha256(struct.pack(f"<{len(values)}f", *values)).hexdigest()
    swapped = x.permute(tuple(reversed(range(x.dim()))))
    assert digest(swapped) == digest(swapped.contiguous())


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(24.0).reshape(4, 6).t(),
        torch.arange(24.0).reshape(4, 6)[::2, 1::3],
        torch.arange(6.0)[2:5],
        torch.tensor([7.0]).expand(3, 4),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.arange(6.0).to(torch.complex64).conj(),
        (torch.arange(6.0).to(torch.complex64) * 1j).conj().imag,
        torch.nn.Parameter(torch.arange(4.0).reshape(2, 2)).t(),
    ],
    ids=["transposed", "strided", "offset", "expanded", "channels_last", "conjugated", "negated", "parameter"],
)
def test_a_view_has_the_digest_of_a_contiguous_copy(view: Tensor) -> None:
    copy = torch.empty(view.shape, dtype=view.dtype).copy_(view.detach())
    assert digest(view) == digest(copy)


def test_a_conjugated_view_has_another_digest_than_what_it_views() -> None:
    x = torch.tensor([1 + 2j])
    assert digest(x.conj()) != digest(x)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_every_dtype_has_digests_and_one_changed_element_changes_them(dtype: torch.dtype) -> None:
    x = torch.ones(3).to(dtype)
    y = torch.tensor([1, 1, 0]).to(dtype)
    assert digest(x) == digest(torch.ones(3).to(dtype))
    assert digest(x) != digest(y)


def test_nan_and_minus_zero_are_digested_by_their_bytes() -> None:
    nan = torch.tensor([float("nan")])
    assert digest(nan) == digest(nan.clone())
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_empty_and_0_d_tensors_have_digests() -> None:
    assert digest(torch.ones(0, 3)) == "sha256:" + hashlib.sha256(b"").hexdigest()
    assert digest(torch.tensor(1.0)) == digest(torch.ones(1))
    assert tensor_digests({}) == {}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(2, 3).t())
        self.register_buffer("passing", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.register_buffer("absent", None)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_state_holds_tied_names_and_buffers_that_no_checkpoint_holds() -> None:
    module = Model()
    state = named_state(module)
    assert set(state) == {
        "embed.weight",
        "head.weight",
        "kept",
        "passing",
        *(f"blocks.{index}.{name}" for index in (0, 1) for name in ("weight", "bias")),
    }
    assert state["head.weight"] is state["embed.weight"] is module.embed.weight


def test_specs_say_layout_and_ties_and_digests_only_where_asked() -> None:
    state = named_state(Model())
    kept, head = state_specs(state, ["kept", "head.weight"], digests=True)
    assert (kept.name, kept.dtype, kept.shape, kept.stride, kept.aliases) == ("kept", "float32", (3, 2), (1, 3), ())
    assert head.aliases == ("embed.weight",)
    assert kept.digest == digest(state["kept"])
    assert {spec.digest for spec in state_specs(state, list(state), digests=False)} == {""}


def test_equal_tensors_that_are_not_tied_are_no_aliases() -> None:
    assert state_specs({"a": torch.ones(1), "b": torch.ones(1)}, ["a"], digests=False)[0].aliases == ()


# -- attributes -------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Number(float):
    """Like numpy.float64, which is a float too."""


@dataclasses.dataclass
class Config:
    heads: int = 4
    act: Any = None


@dataclasses.dataclass
class LibraryConfig:
    """As transformers' configurations are."""

    kind: ClassVar[str] = "library"
    heads: int = 4
    dtype: Any = None
    inner: Any = None


class LibraryModule(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


LibraryConfig.__module__ = LibraryModule.__module__ = "transformers.library"


def attribute(value: Any) -> Any:
    module = nn.Identity()
    module.value = value
    found = module_attributes(module)
    sha256_json(found)
    return found[""].get("value", "left out")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (2**70, str(2**70)),
        (1.5, 1.5),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        ("text", "text"),
        (Colour.RED, "Colour.RED"),
        (torch.bfloat16, "bfloat16"),
        ((1, [2, (3,)]), [1, [2, [3]]]),
        ({"a": {1: 2.0}}, {"a": {"1": 2.0}}),
        (Number(1.5), 1.5),
        (Number("inf"), "inf"),
        (torch.Size([2, 3]), [2, 3]),
        (Config(), {"heads": 4, "act": None}),
        (Config(act=nn.GELU), {"heads": 4, "act": "torch.nn.modules.activation.GELU"}),
        (Config(act=NotImplemented), {"heads": 4}),
        (len, "builtins.len"),
        (Config, "test_snapshot.Config"),
        (functools.partial(len, [1], key=2.0), ["builtins.len", [1], {"key": 2.0}]),
        (types.SimpleNamespace(eps=1.0), {"eps": 1.0}),
        (types.MappingProxyType({"eps": {1}}), {"eps": ["set", 1]}),
        (1 - 2j, "complex (1-2j)"),
        (Fraction(1, 3), "Fraction 1/3"),
        (Decimal("0.10"), "Decimal 0.10"),
        (range(1, 9, 2), "range range(1, 9, 2)"),
        (slice(None, -1), ["slice", None, -1, None]),
        pytest.param(frozenset({"b", "a", 3}), ["set", "a", "b", 3], id="frozenset"),
        (torch.device("cuda", 1), "device cuda"),
        (torch.channels_last, "torch.channels_last"),
        (torch.strided, "torch.strided"),
        (nn.Identity().extra_repr, "torch.nn.modules.module.Module.extra_repr"),
    ],
    ids=repr,
)
def test_plain_attributes_are_written_as_json_can_hold_them(value: Any, written: Any) -> None:
    assert attribute(value) == written
    assert type(attribute(value)) is type(written)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"one", b"two"),
        (1j, -1j),
        (range(3), range(4)),
        (slice(1), slice(2)),
        ({1, 2}, {1, 3}),
        ({"a": frozenset({(1, 2)})}, {"a": frozenset({(2, 1)})}),
        (torch.device("cpu"), torch.device("cuda")),
        (torch.channels_last, torch.contiguous_format),
        (nn.Identity().train, nn.Identity().eval),
        (Fraction(1, 2), Fraction(1, 3)),
    ],
)
def test_another_value_is_written_otherwise(one: Any, other: Any) -> None:
    assert attribute(one) != attribute(other)
    assert "left out" not in (attribute(one), attribute(other))


@pytest.mark.parametrize(
    "value",
    [object(), [1, object()], {"a": object()}, [[[[[[1]]]]]]],
    ids=["object", "list", "dict", "too deep"],
)
def test_what_is_not_plain_is_left_out(value: Any) -> None:
    assert attribute(value) == "left out"


def test_a_tensor_that_is_a_plain_attribute_is_written_by_its_kind_and_digest() -> None:
    assert attribute(torch.ones(2)) == attribute(torch.ones(2))
    others = [torch.zeros(2), torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2, 1)]
    assert len({attribute(other) for other in [torch.ones(2), *others]}) == 5


def test_every_submodule_has_its_class_and_attributes_private_ones_and_the_flag_left_out() -> None:
    module = nn.Sequential(nn.Dropout(0.25))
    module[0]._private = 1
    found = module_attributes(module.eval())
    assert found == {
        "": {"class": "Sequential", "0": "module"},
        "0": {"class": "Dropout", "p": 0.25, "inplace": False},
    }


def test_slots_without_a_tensor_or_a_module_are_told_from_those_that_have_one() -> None:
    module = nn.Linear(2, 2, bias=False)
    module.register_buffer("mask", torch.ones(2))
    module.register_module("child", None)
    slots = {"weight": "parameter", "bias": "no parameter", "mask": "buffer", "child": "no module"}
    assert slots.items() <= module_attributes(module)[""].items()


def test_what_is_registered_stands_by_its_name_and_a_view_of_it_by_its_layout_whatever_the_values() -> None:
    class Model(nn.Module):
        def __init__(self, order: tuple[int, int] = (0, 1)) -> None:
            super().__init__()
            self.weight, self.layers = nn.Parameter(torch.randn(4, 4)), nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
            self.order = [self.layers[index] for index in order]
            self.tied, self.rows = (self.weight, 1), {"last": self.weight[2:]}
            self.other = [nn.Linear(2, 2)]

    attributes = module_attributes(Model())[""]
    assert attributes == {
        "class": Model.__qualname__,
        "order": ["module layers.0", "module layers.1"],
        "tied": ["state weight", 1],
        "rows": {"last": "view weight float32 [2, 4] [4, 1] at 8"},
        "weight": "parameter",
        "layers": "module",
    }
    assert module_attributes(Model((1, 0)))[""]["order"] == ["module layers.1", "module layers.0"]
    untied = Model()
    untied.weight = nn.Parameter(untied.weight.data.clone())
    assert module_attributes(untied)[""] != attributes


def test_where_weights_came_from_stands_under_names_of_its_own() -> None:
    inner = LibraryConfig(dtype="bfloat16")
    library = LibraryModule(LibraryConfig(dtype="float32", inner=inner))
    library.listed = [LibraryConfig()]
    library.name_or_path = "a/path"
    found = module_attributes(library)[""]
    origins = {name: found.pop(name) for name in list(found) if origin_of(name)}
    assert found == {
        "class": "LibraryModule",
        "config": {"heads": 4, "inner": {"heads": 4, "inner": None}},
        "listed": [{"heads": 4, "inner": None}],
    }
    assert origins == {
        "origin config.dtype": "float32",
        "origin config.inner.dtype": "bfloat16",
        "origin listed.0.dtype": None,
        "origin name_or_path": "a/path",
    }
    assert [origin_of(name) for name in sorted(origins)] == ["dtype", "dtype", "dtype", "name_or_path"]


def test_attributes_of_the_same_names_are_a_users_own_elsewhere() -> None:
    module = nn.Identity()
    module.name_or_path, module.dtype = "a/path", torch.float16
    module.config = Config(act="gelu")
    module.config.architectures = ["mine"]  # type: ignore[attr-defined]
    found = module_attributes(module)[""]
    assert found["name_or_path"] == "a/path" and found["dtype"] == "float16"
    assert found["config"] == {"heads": 4, "act": "gelu", "architectures": ["mine"]}
    assert not any(map(origin_of, found))


def test_what_an_object_says_as_its_class_does_is_not_written_twice() -> None:
    module = nn.Identity()
    module.config = LibraryConfig()
    before = module_attributes(module)
    module.config.kind = LibraryConfig.kind  # from_pretrained does so
    assert module_attributes(module) == before
    module.config.kind = "another"
    assert module_attributes(module) != before


def own_forward(self: nn.Module, x: Tensor) -> Tensor:
    return x


class CallableForward:
    def __call__(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("forward_of", "written"),
    [
        (lambda module: own_forward, "test_snapshot.own_forward"),
        (lambda module: types.MethodType(own_forward, module), "test_snapshot.own_forward"),
        (lambda module: functools.partial(own_forward, None), ["test_snapshot.own_forward", None, {}]),
        (lambda module: functools.partial(own_forward, module), ["test_snapshot.own_forward", "module 0", {}]),
        (lambda module: CallableForward(), "test_snapshot.CallableForward"),
        (lambda module: nn.Identity().forward, "torch.nn.modules.linear.Identity.forward"),
        (lambda module: nn.Identity.forward, "torch.nn.modules.linear.Identity.forward"),
        (lambda module: module.forward, "left out"),
    ],
    ids=["function", "method", "partial", "partial of the module", "object", "another's", "unbound", "its own"],
)
def test_a_forward_in_the_place_of_the_class_s_is_an_attribute(forward_of: Any, written: Any) -> None:
    module = nn.Sequential(nn.Identity())
    module[0].forward = forward_of(module[0])
    assert module_attributes(module)["0"].get("forward", "left out") == written


def test_hooks_on_a_module_are_counted() -> None:
    module = nn.Identity()
    before = module_attributes(module)
    module.register_forward_hook(lambda *_: None)
    assert module_attributes(module) != before


def test_hooks_of_transformers_that_take_down_hidden_states_are_not() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=10, output_hidden_states=True)).eval()
    before = module_attributes(model)
    assert len(model(torch.zeros(1, 2, dtype=torch.int64)).hidden_states) == 2
    assert any(module._forward_hooks for module in model.modules())
    assert module_attributes(model) == before


# -- source -----------------------------------------------------------------------------------------------------------


def write_model(folder: Path, name: str, body: str = "pass") -> Any:
    (folder / f"{name}.py").write_text(f"from torch import nn\n\n\nclass Block(nn.Module):\n    {body}\n")
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_each_class_that_is_not_torchs_has_the_digest_of_its_file(folder: Path) -> None:
    made = write_model(folder, "snapshot_one")
    digests = source_digests(nn.Sequential(nn.Linear(1, 1), made.Block()))
    assert digests == {"Block": syntax_digest((folder / "snapshot_one.py").read_bytes())}


def test_the_folder_of_a_source_file_does_not_matter_and_its_text_does(folder: Path) -> None:
    first = source_digests(write_model(folder, "snapshot_two").Block())
    assert source_digests(write_model(folder, "snapshot_three").Block()) == first
    assert source_digests(write_model(folder, "snapshot_four", "x = 1").Block()) != first


def test_a_file_whose_tree_is_known_by_its_bytes_is_not_parsed(folder: Path) -> None:
    (folder / "snapshot_known.py").write_text("x = 1  # one\n")
    trees: dict[str, str] = {}
    text = sha256_bytes(b"x = 1  # one\n")
    assert file_identity("snapshot_known", trees) == trees[text] == syntax_digest(b"x = 1\n")
    assert file_identity("snapshot_known", {text: "sha256:recorded"}) == "sha256:recorded"


def test_a_script_and_a_file_under_a_made_up_name_go_by_the_file_s(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_model(folder, "snapshot_script")
    for name in ("__main__", "aotc_snapshot_script_0123abcd"):
        monkeypatch.setitem(sys.modules, name, made)
        assert public_name(name) == "snapshot_script"
    assert public_name("snapshot_script") == "snapshot_script"
    assert public_name("nowhere.at_all") == "nowhere.at_all"


def test_of_two_classes_of_one_name_neither_hides_the_other(folder: Path) -> None:
    a, b = write_model(folder, "snapshot_five"), write_model(folder, "snapshot_six", "x = 1")
    both = source_digests(nn.Sequential(a.Block(), b.Block()))
    assert both == source_digests(nn.Sequential(b.Block(), a.Block()))
    assert both != source_digests(a.Block())
    assert both != source_digests(b.Block())


def test_an_installed_package_is_named_by_its_version_and_torch_and_what_has_no_file_not_at_all() -> None:
    assert file_identity("pytest") == f"pytest {pytest.__version__}"
    assert file_identity("torch.nn.modules.linear") == ""
    assert file_identity("builtins") == ""
    assert file_identity("no_such_module") == ""


def test_a_module_that_is_not_imported_is_found_within_packages_that_are_not_either(folder: Path) -> None:
    (folder / "snapshot_late" / "space").mkdir(parents=True)
    (folder / "snapshot_late" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (folder / "snapshot_late" / "space" / "inner.py").write_text("x = 1\n")
    (folder / "snapshot_space").symlink_to(folder / "snapshot_late" / "space")
    digest = syntax_digest(b"x = 1\n")
    assert file_identity("snapshot_late.space.inner") == file_identity("snapshot_space.inner") == digest
    assert file_identity("snapshot_late.space") == file_identity("snapshot_late.space.inner.x") == ""
    assert not {name for name in sys.modules if name.startswith(("snapshot_late", "snapshot_space"))}


def test_what_pretends_to_be_a_package_has_no_modules_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    pretender = types.ModuleType("snapshot_pretender")
    monkeypatch.setattr(pretender, "__path__", object(), raising=False)
    monkeypatch.setitem(sys.modules, "snapshot_pretender", pretender)
    assert file_identity("snapshot_pretender.inner") == ""


# -- modes and dtypes -------------------------------------------------------------------------------------------------


def test_the_modes_of_the_process_are_taken_as_they_are_now() -> None:
    plain = take_ambient("cpu")
    assert (plain.autocast, plain.default_dtype, plain.deterministic) == (None, "float32", False)
    with torch.autocast("cpu", torch.bfloat16):
        assert take_ambient("cpu").autocast == "bfloat16"
        assert take_ambient("cuda").autocast is None
    assert take_ambient("cpu") == plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e5m2])
def test_dtypes_have_names_and_names_dtypes(dtype: torch.dtype) -> None:
    assert dtype_of(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["", "float31", "nn", "Tensor", "torch.float32"])
def test_what_is_no_dtype_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="not a dtype"):
        dtype_of(name)
