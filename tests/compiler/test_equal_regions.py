"""Finding regions: which are equal, what they are called with, and what cannot be one. Nothing is compiled."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ZOO, run_python
from torch import Tensor, nn

from aotc.compiler.capture.regions.equal_regions import RegionPart, find_regions, regions_of, size_over_dims
from aotc.compiler.planning import plan
from aotc.compiler.planning.plan import plan_units
from aotc.errors import AotcError, BuildError, ManifestError
from aotc.manifest import ModelSpec, read_manifest
from aotc.models.factory import build_module
from aotc.models.regions import example_of
from aotc.models.signature import make_signature
from aotc.records import ConstantLeaf, SizeRange, TensorLeaf

MATRIX = {"x": {"shape": ["batch", "seq", 4]}}


def spec_of(factory: str, regions: list[str], inputs: Any = None, buckets: Any = None, **kwargs: Any) -> ModelSpec:
    return ModelSpec(
        name="tried",
        factory=f"region_models.py:{factory}",
        inputs=inputs or {"x": {"shape": ["n", 4]}},
        buckets=tuple(buckets or [{"n": 2}]),
        kwargs=kwargs,
        regions=tuple(regions),
    )


def found(spec: ModelSpec, folder: Path = ZOO) -> list[RegionPart]:
    return find_regions(spec, build_module(spec, folder), folder)


def probed(how: str, *buckets: Any) -> list[RegionPart]:
    return found(spec_of("Probe", ["parts.*"], MATRIX, buckets, how=how))


def shapes(part: RegionPart) -> list[tuple[int | str, ...]]:
    return [leaf.shape for leaf in part.region.signature.leaves if isinstance(leaf, TensorLeaf)]


# -- which are equal --------------------------------------------------------------------------------------------------


def test_equal_blocks_are_one_region_whatever_they_know_of_their_own_index() -> None:
    spec = spec_of("Stack", ["blocks.*"], {"x": {"shape": ["n", 8]}})
    (part,) = found(spec)
    assert part.region.instances == ("blocks.0", "blocks.1", "blocks.2")


def test_finding_them_imports_no_compiler() -> None:
    """Importing it would take longer than running the model."""
    code = """
import sys
from pathlib import Path
from aotc.compiler.capture.regions.equal_regions import find_regions
from aotc.manifest import ModelSpec
from aotc.models.factory import build_module
inputs = {"x": {"shape": ["n", 8]}}
spec = ModelSpec("tried", "region_models.py:Stack", inputs=inputs, buckets=({"n": 2},), regions=("blocks.*",))
folder = Path(sys.argv[1])
(part,) = find_regions(spec, build_module(spec, folder), folder)
print(len(part.region.instances), *sorted({"torch._dynamo", "torch._inductor"} & sys.modules.keys()))
"""
    assert run_python(code, ZOO) == "3\n"


class Counting(nn.Module):
    """Keeps how often it was called, in a buffer and in Python, and what it was last given."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.last = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls, self.last = self.calls + 1, x
        return self.block(x)


def test_the_module_is_as_before_afterwards() -> None:
    module = Counting()
    (part,) = find_regions(spec_of("unused", ["block"], buckets=[{"n": SizeRange(2, 8)}]), module, ZOO)
    assert part.region.instances == ("block",)
    assert (module.count.item(), module.calls, module.last) == (0, 0, None)


def test_planning_makes_a_slow_module_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "WORTH", 0.0)
    code = (
        "import torch\nmade = []\ndef block():\n    made.append(1)\n    return torch.nn.Sequential(torch.nn.ReLU())\n"
    )
    (tmp_path / "made_how_often.py").write_text(code)
    model = {"factory": "made_how_often.py:block", "inputs": {"input": {"shape": ["n"]}}, "buckets": [{"n": 4}]}
    manifest = {"version": 1, "models": {"m": {**model, "regions": ["0"], "targets": ["native", "cpu:x86-64-v3"]}}}
    (tmp_path / "manifest.yaml").write_text(json.dumps(manifest))
    units = plan_units(read_manifest(tmp_path / "manifest.yaml"))
    assert {unit.region for unit in units} == {"0"}
    assert len(sys.modules["made_how_often"].made) == 1


def test_a_model_that_cannot_be_planned_does_not_end_the_others(tmp_path: Path) -> None:
    (tmp_path / "planned_models.py").write_text("import torch\ndef block():\n    return torch.nn.ReLU()\n")
    model = {"factory": "planned_models.py:block", "inputs": {"input": {"shape": ["n"]}}, "buckets": [{"n": 4}]}
    models = {"broken": {**model, "regions": ["layers.*"]}, "right": model}
    (tmp_path / "manifest.yaml").write_text(json.dumps({"version": 1, "models": models}))
    manifest = read_manifest(tmp_path / "manifest.yaml")
    failed: dict[str, AotcError] = {}
    assert [unit.spec.name for unit in plan_units(manifest, failed=failed)] == ["right"]
    assert "the region `layers.*` matches no submodule" in str(failed["broken"])
    with pytest.raises(ManifestError, match="the regions of `broken`"):
        plan_units(manifest)


class Twice(torch.autograd.Function):
    """A view, whose gradient is twice as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Rule(nn.Module):
    """The same operators in each, and other gradients."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule, self.linear = rule, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        with torch.set_grad_enabled(self.rule != "none"):
            return Twice.apply(hidden) if self.rule == "twice" else hidden.view_as(hidden)


@pytest.mark.parametrize("train", [True, False])
def test_blocks_with_other_gradients_are_equal_unless_they_are_trained(train: bool) -> None:
    module = nn.Sequential(*map(Rule, ("once", "twice", "once", "none")))
    spec = ModelSpec("tried", "", {"input": {"shape": [2, 4]}}, ({},), train=train, regions=("*",))
    parts = [part.region.instances for part in find_regions(spec, module, ZOO)]
    assert parts == ([("0", "2"), ("1",), ("3",)] if train else [("0", "1", "2", "3")])


def test_two_kinds_of_blocks_are_two_regions() -> None:
    spec = spec_of("Stack", ["gates.*", "blocks.*"], {"x": {"shape": ["n", 8]}})
    regions = regions_of(found(spec))
    assert [region.name for region in regions] == ["blocks.0", "gates.0"]
    assert [path for region in regions for path in region.instances] == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "gates.0",
        "gates.1",
    ]


def test_blocks_that_differ_in_a_plain_function_are_not_equal() -> None:
    """Nothing that can be compared says so: class, attributes and weights' shapes are the same."""
    regions = regions_of(found(spec_of("Acts", ["blocks.*"])))
    assert [region.instances for region in regions] == [("blocks.0", "blocks.2"), ("blocks.1",)]


def test_a_bucket_that_the_region_cannot_tell_from_another_is_compiled_once() -> None:
    inputs = {"x": {"shape": ["n", 8]}}
    parts = found(spec_of("Stack", ["blocks.*"], inputs, [{"n": 2}, {"n": 4}, {"n": 2}]))
    assert [part.bucket for part in parts] == [{"n": 2}, {"n": 4}]
    assert [part.sizes for part in parts] == [{"n": 2}, {"n": 4}]


# -- what they are called with ----------------------------------------------------------------------------------------


def test_sizes_that_never_change_are_numbers() -> None:
    (part,) = probed("plain", {"batch": 2, "seq": 3})
    assert (part.bucket, shapes(part)) == ({}, [(2, 3, 4)])


def test_sizes_that_change_from_bucket_to_bucket_are_the_models_dims() -> None:
    first, second = probed("plain", {"batch": 2, "seq": 3}, {"batch": 2, "seq": 5})
    assert shapes(first) == [(2, "seq", 4)]
    assert [first.bucket, second.bucket] == [{"seq": 3}, {"seq": 5}]
    assert second.sizes == {"batch": 2, "seq": 5}


def test_the_dims_of_a_range_are_found_within_it() -> None:
    (part,) = probed("doubled", {"batch": 2, "seq": SizeRange(2, 64, 2, 8)})
    assert shapes(part) == [(2, "2*seq", 4), (2, 4)]
    assert part.bucket == {"seq": SizeRange(2, 64, 2, 8)}


def test_arguments_that_are_left_out_are_constants_and_containers_keep_their_members() -> None:
    (part,) = probed("nested", {"batch": 2, "seq": 3})
    signature = part.region.signature
    assert [leaf for leaf in signature.leaves if isinstance(leaf, ConstantLeaf)] == [
        ConstantLeaf("scale", 1.0),
        ConstantLeaf("mask", None),
        ConstantLeaf("extra.pair[1]", None),
    ]
    assert signature.parameters[3].tree == {"pair": ["tuple", 3, 4]}


def test_inputs_that_are_views_are_copied_into_the_compiled_layout() -> None:
    """The first part is given a view; the second one what the first one gave, whose layout is the compiled one."""
    first, second = probed("transposed", {"batch": 2, "seq": 3})
    assert (first.region.signature.make_contiguous, second.region.signature.make_contiguous) == (True, False)
    assert not probed("plain", {"batch": 2, "seq": 3})[0].region.signature.make_contiguous


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([3, 3, 3], 3),
        ([2, 4, 2], "a"),
        ([5, 5, 9], "b"),
        ([5, 9, 5], "2*a + 1"),
        ([1, 3, 1], "1*a - 1"),
        ([10, 20, 18], "1*a*b"),
        ([30, 60, 54], "3*a*b"),
        ([7, 8, 100], None),
        ([4, 2, 4], None),
    ],
)
def test_an_axis_is_explained_by_the_dims_or_not_at_all(sizes: list[int], expected: int | str | None) -> None:
    samples = [{"a": 2, "b": 5}, {"a": 4, "b": 5}, {"a": 2, "b": 9}]
    assert size_over_dims(sizes, samples) == expected


# -- the forms of their calls -----------------------------------------------------------------------------------------


def masking(*buckets: Any, **mask: Any) -> tuple[ModelSpec, list[RegionPart]]:
    inputs = {"attention_mask": {"shape": ["batch", "seq"], "dtype": "int64", "init": "ones", **mask}, **MATRIX}
    spec = spec_of("Masking", ["parts.*"], inputs, buckets)
    return spec, found(spec)


def test_a_mask_that_masks_something_is_another_form_of_the_same_region() -> None:
    _, parts = masking({"batch": 2, "seq": SizeRange(1, 8, 1, 8)})
    assert [(part.region.name, part.region.instances) for part in parts] == [
        ("parts.0", ("parts.0", "parts.1")),
        ("parts.0(mask=tensor)", ("parts.0", "parts.1")),
    ]
    assert ConstantLeaf("mask", None) in parts[0].region.signature.leaves
    assert shapes(parts[1]) == [(2, "seq", 4), (2, 4)]
    # A row of one token is never masked, so code for that is not built.
    assert [part.bucket["seq"] for part in parts] == [SizeRange(1, 8, 1, 8), SizeRange(2, 8, 1, 8)]


@pytest.mark.parametrize(
    ("init", "names"),
    [
        (["ones"], ["parts.0"]),
        (["padding"], ["parts.0"]),
        ("padding", ["parts.0", "parts.0(mask=None)"]),
        (["zeros", "ones"], ["parts.0", "parts.0(mask=None)"]),
    ],
)
def test_a_list_of_inits_says_which_forms_there_are(init: Any, names: list[str]) -> None:
    assert [part.region.name for part in masking({"batch": 2, "seq": 4}, init=init)[1]] == names


def test_the_example_of_each_form_is_a_call_that_has_it() -> None:
    spec, parts = masking({"batch": 2, "seq": 4})
    module = build_module(spec, ZOO)
    for part, is_masked in zip(parts, (False, True), strict=True):
        example = example_of(spec, module, make_signature(spec, module), part.region, part.sizes, ZOO)
        assert [isinstance(leaf, Tensor) for leaf in example.leaves] == [True, False, is_masked, False]


def test_a_value_that_follows_fixed_sizes_is_a_form_at_each_and_over_a_range_an_error() -> None:
    parts = probed("counting", {"batch": 2, "seq": 3}, {"batch": 2, "seq": 5})
    assert [part.region.name for part in parts] == ["parts.0", "parts.0(scale=5)"]
    assert [part.sizes["seq"] for part in parts] == [3, 5]
    with pytest.raises(BuildError, match=r"(?s)scale=8 at batch=2,seq=8, scale=2 at batch=2,seq=2.*split the range"):
        probed("counting", {"batch": 2, "seq": SizeRange(2, 8, 1, 8)})


# -- what cannot be one -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        (["layers.*"], "the region `layers.*` matches no submodule"),
        (["blocks"], ""),
        (["blocks.*", "blocks.*.linear"], "the region `blocks.0.linear` lies within the region `blocks.0`"),
    ],
)
def test_patterns_that_do_not_fit_the_module(regions: list[str], message: str) -> None:
    spec = spec_of("Stack", regions, {"x": {"shape": ["n", 8]}})
    if not message:
        with pytest.raises(BuildError, match="the region `blocks` is not called when the model is run at n=2"):
            found(spec)
        return
    with pytest.raises(ManifestError) as raised:
        found(spec)
    assert message in str(raised.value)


def test_a_near_miss_of_a_pattern_is_named() -> None:
    with pytest.raises(ManifestError, match=r"did you mean `blocks\.\*`"):
        found(spec_of("Stack", ["block.*"], {"x": {"shape": ["n", 8]}}))


def test_a_region_that_is_given_an_object_is_refused_with_the_objects_type() -> None:
    with pytest.raises(BuildError, match=r"`blocks\.0` is given a region_models\.Caching\.Cache as `scale`"):
        found(spec_of("Caching", ["blocks.*"]))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("twice", "`parts.0` is called 2 times in one call of the model, with different sizes or operators"),
        ("failing", "the model itself fails at batch=2,seq=5: ValueError: too long"),
    ],
)
def test_calls_that_a_record_cannot_describe(how: str, message: str) -> None:
    with pytest.raises(BuildError) as raised:
        probed(how, {"batch": 2, "seq": 3}, {"batch": 2, "seq": 5})
    assert message in str(raised.value)


def test_an_axis_that_mixes_two_dims_tells_neither() -> None:
    with pytest.raises(BuildError, match=r"an axis of `1\*batch\*seq`, and none from which to read `batch` and `seq`"):
        probed("flat", {"batch": 2, "seq": 3}, {"batch": 3, "seq": 5}, {"batch": 2, "seq": 5})
