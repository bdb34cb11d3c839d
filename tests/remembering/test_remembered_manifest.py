"""The manifest that a build is made from, of calls that were remembered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from remembered_nets import Pictures

import aotc
from aotc.errors import CorruptError, ManifestError
from aotc.manifest import ModelSpec, read_manifest
from aotc.models.factory import build_module
from aotc.reads.modes import ambient_here
from aotc.records import SizeRange
from aotc.tools.recording.weight_layouts import with_layouts
from aotc.tools.remembering.forms import form_of
from aotc.tools.remembering.making.functions import function_of, with_function
from aotc.tools.remembering.making.made_from import made_from
from aotc.tools.remembering.memory.manifest import manifest_of
from aotc.tools.remembering.memory.memory import Kind, Memory, Place
from aotc.tools.remembering.memory.remembered_calls import as_json, from_json, seen_with_caches


def memory_of(*sizes: tuple[int, int], **fields: Any) -> Memory:
    calls = [{"ids": {"shape": list(size), "dtype": "int64", "low": 0, "high": 49}} for size in sizes]
    asked = fields.pop("asked", {})
    kinds = [Kind(fields.pop("ambient", {}), calls)]
    facts = {"class": "Net", "target": "cpu:x86-64-v3"}
    return Memory(facts, asked, "remembered_nets:Net", {"width": 8}, "float32", kinds, **fields)


def spec_of(memory: Memory, folder: Path, *, wide: bool = True) -> ModelSpec:
    text, _ = manifest_of(memory, {"net": memory.kinds[0]}, folder, wide=wide)
    (folder / "manifest.yaml").write_text(text)
    return read_manifest(folder / "manifest.yaml").models["net"]


def test_a_length_that_varies_is_a_range_wider_than_what_was_seen(tmp_path: Path) -> None:
    seen = memory_of((2, 16), (2, 24))
    assert spec_of(seen, tmp_path).buckets == ({"batch": 2, "seq": SizeRange(2, 32, tune_at=32)},)
    assert spec_of(seen, tmp_path, wide=False).buckets == ({"batch": 2, "seq": SizeRange(16, 24, tune_at=24)},)
    assert spec_of(memory_of((2, 16)), tmp_path).buckets == ({"batch": 2, "seq": 16},)


def test_sizes_are_ranges_at_once_or_never_as_dynamic_says(tmp_path: Path) -> None:
    at_once = spec_of(memory_of((1, 16), asked={"dynamic": True}), tmp_path)
    assert at_once.buckets == ({"batch": 1, "seq": SizeRange(2, 32, tune_at=32)},)
    assert spec_of(memory_of((2, 16), asked={"dynamic": True}), tmp_path, wide=False).buckets == (
        {"batch": 2, "seq": 16},
    )
    never = spec_of(memory_of((2, 16), (2, 24), asked={"dynamic": False}), tmp_path)
    assert never.buckets == ({"batch": 2, "seq": 16}, {"batch": 2, "seq": 24})


def test_a_range_that_was_asked_for_is_taken(tmp_path: Path) -> None:
    asked = memory_of((2, 16), asked={"ranges": {"seq": [1, 512]}, "mode": "max-autotune"})
    spec = spec_of(asked, tmp_path)
    assert spec.buckets == ({"batch": 2, "seq": SizeRange(1, 512, tune_at=512)},)
    assert (spec.mode, spec.kwargs, spec.targets) == ("max-autotune", {"width": 8}, ("cpu:x86-64-v3",))


def test_a_call_in_training_says_which_inputs_require_gradients(tmp_path: Path) -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    net, x, y = Sum(), torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)
    seen = as_json(seen_with_caches(net, None, (x, y), {}, gradients=True))
    memory = Memory(
        {"class": "Sum", "target": "cpu:x86-64-v3"}, {"train": True}, "nets:Sum", {}, "", [Kind({}, [seen])]
    )
    spec = spec_of(memory, tmp_path)
    assert spec.train
    assert [spec.inputs[name].get("requires_grad", False) for name in ("x", "y")] == [True, False]
    with torch.no_grad():
        other = seen_with_caches(net, None, (y, y), {}, gradients=True)
        assert seen_with_caches(net, None, (x, y), {}, gradients=True) == other
    assert from_json(seen) == seen_with_caches(net, None, (x, y), {}, gradients=True)
    assert from_json(seen) != seen_with_caches(net, None, (x, y), {})


def test_the_modes_of_a_call_are_the_model_s_and_part_of_its_form(tmp_path: Path) -> None:
    x = torch.ones(2)
    plain = form_of((x,), {}, "cpu")
    assert ambient_here("cpu") == {}
    with torch.autocast("cpu", torch.bfloat16):
        ambient = ambient_here("cpu")
        assert form_of((x,), {}, "cpu") != plain
    assert form_of((torch.zeros(2),), {}, "cpu") == plain
    assert form_of((torch.zeros(3),), {}, "cpu") != plain
    assert form_of((x, 1), {}, "cpu") != form_of((x, True), {}, "cpu")
    assert spec_of(memory_of((2, 16), ambient=ambient), tmp_path).autocast == "bfloat16"


def test_what_was_seen_survives_the_file() -> None:
    class Nested(torch.nn.Module):
        def forward(self, x: torch.Tensor, more: Any, scale: float = 1.0) -> torch.Tensor:
            return x

    net = Nested()
    more = {"images": [torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last)], "name": "a"}
    seen = seen_with_caches(net, None, (torch.arange(6),), {"more": more, "scale": 2.0})
    assert from_json(as_json(seen)) == seen
    assert as_json(seen)["x"] == {"shape": (6,), "dtype": "int64", "low": 0, "high": 5}


def test_a_tensor_on_another_device_than_the_module_s_is_refused() -> None:
    net = torch.nn.Linear(2, 2)
    here, elsewhere = torch.ones(1, 2), torch.ones(1, 2, device="meta")
    with pytest.raises(ManifestError, match="`input` is on the device meta, and the module on cpu"):
        seen_with_caches(net, None, (elsewhere,), {})
    assert form_of((here,), {}, "cpu") != form_of((elsewhere,), {}, "cpu")


def test_the_manifest_of_a_function_names_it_and_how_its_module_is_made(tmp_path: Path) -> None:
    files = {"factory": str(tmp_path / "nets" / "own.py") + ":Own", "kwargs": {"width": 8}}
    made = made_from(function_of(scaled, torch.nn.Linear(2, 2)), files["factory"], files["kwargs"])
    assert made.kwargs == {"function": "test_remembered_manifest:scaled", "module": files}
    memory = memory_of((2, 16))
    memory.factory, memory.kwargs = made.factory, made.kwargs
    spec = spec_of(memory, tmp_path)
    assert spec.factory == "aotc.tools.remembering.making.functions:with_function"
    assert spec.kwargs["module"] == {"factory": "nets/own.py:Own", "kwargs": {"width": 8}}
    again = with_function("test_remembered_manifest:scaled", torch.nn.Linear(2, 2))
    assert torch.equal(again(torch.ones(1, 2)), again.module(torch.ones(1, 2)) * 2)


def scaled(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = net(x)
    return y * 2


@torch.no_grad()
@aotc.compile(build="never")
@torch.inference_mode()
def decorated(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return scaled(net, x)


def test_a_build_finds_a_function_between_its_decorators() -> None:
    function = decorated.__wrapped__.function
    net = torch.nn.Linear(2, 2)
    made = made_from(function_of(function, net), "nets:Own", {})
    assert made.kwargs["decorators"] == 1
    assert with_function(**{**made.kwargs, "module": net}).function is function


def test_a_damaged_memory_is_told_with_its_file(tmp_path: Path) -> None:
    place = Place(tmp_path, "net")
    assert place.change(memory_of((2, 16)), lambda memory: None) == place.read() == memory_of((2, 16))
    deep = f'{(tmp_path / "net.json").read_text().rstrip()[:-1]},"more":{"[" * 5000}{"]" * 5000}}}'
    (tmp_path / "net.json").write_text(deep)
    with pytest.raises(CorruptError, match=r"net\.json cannot be read"):
        place.read()
    (tmp_path / "net.json").write_text("{")
    with pytest.raises(CorruptError, match=r"net\.json cannot be read"):
        place.read()


def test_weights_that_lie_otherwise_are_made_so(tmp_path: Path) -> None:
    """Those of channels last, and of any other order; not the views that the module makes of its own tensors."""
    net = Pictures().to(memory_format=torch.channels_last).eval()
    net.turned.data = net.turned.data.t().contiguous().t()
    made = made_from(net, None, {})
    kwargs = json.loads(json.dumps(made.kwargs))
    spec = ModelSpec(name="net", inputs={}, buckets=(), factory=made.factory, kwargs=kwargs)
    again = build_module(spec, tmp_path)
    dummy = build_module(spec, tmp_path, dummy_weights=True)
    strides = {name: tensor.stride() for name, tensor in net.state_dict().items()}
    assert strides["conv.weight"] == (27, 1, 9, 3) and strides["turned"] == (1, 4) and strides["window"] == (4, 1)
    for other in (again, dummy):
        assert {name: tensor.stride() for name, tensor in other.state_dict().items()} == strides
    torch.manual_seed(0)
    assert torch.equal(again.conv.weight, Pictures().conv.weight)
    assert "strides" not in made_from(Pictures(), None, {}).kwargs
    with pytest.raises(ManifestError, match=r"\[1, 1\] are not strides of `turned`"):
        with_layouts(Pictures(), {"turned": [1, 1]})
