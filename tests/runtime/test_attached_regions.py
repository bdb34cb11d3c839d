"""A model by regions, with libraries that compute with eager torch: what is attached where, and how it comes off."""

from __future__ import annotations

import copy
import linecache
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import msgspec
import pytest
import torch
from hand_built import FakeLibrary, attach_regions, make_artifact, specs_of, tensor
from torch import Tensor, nn

from aotc.digest import sha256_json
from aotc.errors import BindError, CorruptError, LibraryError, MissError
from aotc.reads.attributes import module_attributes
from aotc.reads.sources import source_digests
from aotc.reads.state_specs import submodules
from aotc.records import (
    Artifact,
    ConstantLeaf,
    ModuleGuard,
    Output,
    PadRule,
    Parameter,
    Region,
    ResultContainer,
    Signature,
    Variant,
)
from aotc.runtime.checkpoints import region_swap, swap
from aotc.runtime.compiled_regions import CompiledRegions
from aotc.runtime.load import compiled_module
from aotc.runtime.state import read_write_lock, weights
from aotc.store.layout.check_record import check_record
from aotc.telemetry import sample_shapes

PATHS = ("blocks.0", "blocks.1")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.power = 2

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x * self.weight if mask is None else x * self.weight * mask


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in PATHS)
        self.outside = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.outside
        for block in self.blocks:
            x = block(x)
        return x


def made() -> Model:
    return Model().eval()


def artifact_of(module: nn.Module, paths: tuple[str, ...] = PATHS) -> Artifact:
    """The artifact of one region, whose library takes `x` and `weight`, for two rows."""
    guarded = submodules(module, paths)
    whole = make_artifact([tensor("x", "n", 4)], [{"n": 2}], state=specs_of(made().blocks[0]))
    region = Region(paths[0], paths, whole.signature, whole.state)
    guard = ModuleGuard("ModuleDict", False, source_digests(guarded), sha256_json(module_attributes(guarded)))
    variants = tuple(msgspec.structs.replace(variant, region=paths[0]) for variant in whole.variants)
    return msgspec.structs.replace(whole, regions=(region,), variants=variants, state=(), module=guard)


def attached(module: nn.Module | None, artifact: Artifact | None = None, **options: Any) -> CompiledRegions:
    artifact = artifact or artifact_of(made())
    library = FakeLibrary(lambda x, weight: x * weight + 1000)
    given = attach_regions(artifact, [library], module, **options)
    given.library = library  # type: ignore[attr-defined]
    return given


X = torch.arange(8.0).view(2, 4)


def by_hand(module: Model, x: Tensor) -> Tensor:
    for block in module.blocks:
        x = x * block.weight + 1000
    return x


# -- what runs --------------------------------------------------------------------------------------------------------


def test_every_instance_runs_the_one_library_with_its_own_weights() -> None:
    module = made()
    compiled = attached(module)
    assert torch.equal(compiled(X), by_hand(module, X))
    assert [run[1] is block.weight for run, block in zip(compiled.library.seen, module.blocks, strict=True)] == [  # type: ignore[attr-defined]
        True,
        True,
    ]


def with_a_mask(artifact: Artifact) -> Artifact:
    """The artifact, with a second form of its region's calls: with a mask."""
    (region,), (variant,) = artifact.regions, artifact.variants
    mask = make_artifact([tensor("x", "n", 4), tensor("mask", 4)], [{"n": 2}], state=region.state)
    none = make_artifact(
        [tensor("x", "n", 4), ConstantLeaf("mask", None)],
        parameters=[Parameter("x", 0), Parameter("mask", 1, default=None)],
    )
    replace = msgspec.structs.replace
    regions = (
        replace(region, signature=none.signature),
        Region("blocks.0(mask=tensor)", PATHS, mask.signature, region.state),
    )
    return replace(artifact, regions=regions, variants=(variant, replace(mask.variants[0], region=regions[1].name)))


def test_each_call_runs_the_code_of_its_own_form() -> None:
    module = made()
    artifact = with_a_mask(artifact_of(module))
    check_record(artifact)
    plain, masked = FakeLibrary(lambda x, w: x * w + 1000), FakeLibrary(lambda x, mask, w: x * w * mask + 2000)
    compiled = attach_regions(artifact, [plain, masked], module)
    block, mask = module.blocks[0], torch.tensor([1.0, 0, 1, 0])
    assert repr(compiled).endswith("2 regions of 1 kind>")
    assert list(compiled.regions) == [*PATHS, *(f"{path}(mask=tensor)" for path in PATHS)]
    with torch.no_grad():
        assert torch.equal(block(X), X * block.weight + 1000)
        assert torch.equal(block(X, mask), X * block.weight * mask + 2000)
        with pytest.raises(MissError, match=r"`handmade blocks.0`.*(?s:.)*mask"):
            block(X, mask=True)
        with pytest.raises(MissError, match=r"`handmade blocks.0\(mask=tensor\)`.*(?s:.)*n is 3"):
            block(torch.ones(3, 4), mask)
    assert (compiled.stats().calls, compiled.stats().misses) == (2, 2)
    compiled.detach(["blocks.0"])  # calls of that form run eagerly then
    with torch.no_grad():
        assert torch.equal(block(X), X * block.weight)
        assert torch.equal(block(X, mask), X * block.weight * mask + 2000)
    compiled.detach()
    assert "forward" not in vars(block)


def test_the_module_itself_runs_the_compiled_regions_until_they_are_detached() -> None:
    module = made()
    eager = module(X)
    compiled = attached(module)
    with torch.no_grad():
        assert torch.equal(module(X), by_hand(module, X))
    compiled.detach()
    assert torch.equal(module(X), eager)
    assert all("forward" not in vars(block) for block in module.blocks)
    with pytest.raises(BindError, match="was detached from its module"):
        compiled(X)
    compiled.attach()
    assert torch.equal(compiled(X), by_hand(module, X))


def test_it_stands_in_the_modules_place_and_the_module_runs_with_its_hooks() -> None:
    module, parent = made(), nn.Module()
    compiled, seen = compiled_module(attached(module)), []
    parent.child = compiled
    compiled.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(parent.child(X), by_hand(module, X)) and seen == [1]
    module.forward = compiled
    with torch.no_grad():
        assert torch.equal(module(X), by_hand(module, X)) and torch.equal(compiled(X), by_hand(module, X))
    assert compiled.regions.keys() == {"blocks.0", "blocks.1"}
    assert list(parent.state_dict()) == [f"child.{name}" for name in made().state_dict()]
    compiled.detach()
    with pytest.raises(BindError, match="was detached"):
        compiled(X)


def test_a_call_gives_no_gradients_where_the_caller_left_them_enabled() -> None:
    assert not attached(made())(X).requires_grad


def test_weights_that_change_are_seen_at_the_next_call() -> None:
    module = made()
    compiled = attached(module)
    with torch.no_grad():
        module.blocks[1].weight.zero_()
    assert torch.equal(compiled(X), torch.full((2, 4), 1000.0))
    module.blocks[1].weight.data = torch.ones(3)
    with pytest.raises(BindError, match="the module's tensors are not those"):
        compiled(X)


def test_the_state_dict_is_as_it_was() -> None:
    module = made()
    before = list(module.state_dict())
    attached(module)
    assert list(module.state_dict()) == before
    module.load_state_dict(made().state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_the_module_is_eager_and_can_be_attached_to_itself(copied: Any) -> None:
    """The library has the weights of the instance that it was attached to: in a copy it would use the original's."""
    module = made()
    eager = module(X)
    compiled = attached(module)
    other = copied(module)
    assert torch.equal(other(X), eager)
    with torch.no_grad():
        other.blocks[0].weight.zero_()
    assert torch.equal(other(X), torch.zeros(2, 4))
    assert torch.equal(attached(other)(X), by_hand(other, X))
    assert torch.equal(compiled(X), by_hand(module, X))


def test_attached_code_is_no_attribute_of_the_module_nor_of_a_copy() -> None:
    module = made()
    before = module_attributes(module)
    compiled = attached(module)
    assert module_attributes(module) == module_attributes(copy.deepcopy(module)) == before
    compiled.detach()
    module.blocks[1].forward = lambda x: x
    with pytest.raises(BindError) as caught:
        attached(module)
    assert "attributes" in str(caught.value)


# -- other weights ----------------------------------------------------------------------------------------------------


def weights_of(value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(each, value) for name, each in made().state_dict().items()}


def served(value: float) -> Tensor:
    """What a call gives whose weights are all that value: also those between two regions."""
    return (X * value * value + 1000) * value + 1000


def test_weights_are_replaced_in_regions_and_around_them() -> None:
    module = made()
    compiled = attached(module)
    compiled.update_weights(weights_of(2))
    assert torch.equal(compiled(X), served(2))
    assert all(torch.equal(each, torch.full_like(each, 2)) for each in module.parameters())
    assert all(isinstance(each, nn.Parameter) for each in (module.outside, module.blocks[1].weight))
    compiled.update_weights({"blocks.1.weight": torch.full((4,), 3.0)})
    assert torch.equal(compiled(X), (X * 4 + 1000) * 3 + 1000)


def test_any_name_stands_for_all_where_two_regions_have_one_tensor() -> None:
    module = made()
    module.blocks[1].weight = module.blocks[0].weight
    compiled = attached(module)
    compiled.update_weights({**weights_of(2), "blocks.0.weight": torch.full((4,), 2.0)})
    assert torch.equal(compiled(X), served(2)) and module.blocks[1].weight is module.blocks[0].weight
    compiled.update_weights({"outside": torch.full((4,), 3.0), "blocks.1.weight": torch.full((4,), 3.0)})
    assert torch.equal(compiled(X), served(3)) and module.blocks[1].weight is module.blocks[0].weight


def test_what_is_around_the_regions_stays_on_its_device() -> None:
    module = made()
    module.register_buffer("elsewhere", torch.empty(2, device="meta"))
    compiled = attached(module)
    compiled.update_weights({**weights_of(2), "elsewhere": torch.ones(2)})
    assert module.elsewhere.is_meta and torch.equal(compiled(X), served(2))


def test_all_that_is_wrong_with_weights_is_said_and_nothing_has_changed() -> None:
    module = made()
    compiled = attached(module)
    before = compiled(X)
    wrong = {"blocks.0.weight": torch.ones(3), "outside": torch.ones(4, dtype=torch.int64), "other": torch.ones(1)}
    with pytest.raises(BindError, match=r"(?s)other.*outside.*blocks\.0\.weight"):
        compiled.update_weights({**weights_of(2), **wrong})
    assert torch.equal(compiled(X), before)


def test_a_call_that_has_begun_ends_on_the_old_weights_and_an_update_waits_for_it() -> None:
    """Also in the regions that it has not come to yet, and between two."""
    module, inside, go_on = made(), threading.Event(), threading.Event()
    compiled = attached(module)
    compiled.update_weights(weights_of(1))

    def slowly(x: Tensor, weight: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(60)
        return x * weight + 1000

    compiled.library.function = slowly  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(compiled, X)
        assert inside.wait(60)
        update = pool.submit(compiled.update_weights, weights_of(2))
        assert not update.done()
        go_on.set()
        assert torch.equal(call.result(60), served(1))
        update.result(60)
    assert torch.equal(compiled(X), served(2))


def test_no_call_sees_a_mixture_of_weights() -> None:
    compiled = attached(made())
    compiled.update_weights(weights_of(1))
    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(lambda: [compiled(X) for _ in range(500)])
        while not calls.done():
            for value in (2.0, 1.0):
                compiled.update_weights(weights_of(value))
    assert all(any(torch.equal(given, served(value)) for value in (1, 2)) for given in calls.result())


def test_an_update_that_is_interrupted_at_any_line_leaves_all_weights_old_or_all_new() -> None:
    compiled, left, before = attached(made()), 0, 1.0
    compiled.update_weights(weights_of(before))
    files = [module.__file__ for module in (region_swap, swap, weights, read_write_lock)]

    def interrupt(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        # Where a `with` ends, no signal comes between its last line and the lock's release, as the trace does.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        left -= event == "line" and text != "with compiled._updating:"
        if left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    seen = set()
    for number in range(1, 2000, 5):
        left, after = number, 3.0 - before
        sys.settrace(lambda frame, event, argument: interrupt if frame.f_code.co_filename in files else None)
        try:
            compiled.update_weights(weights_of(after))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        given = compiled(X)
        value = after if torch.equal(given, served(after)) else before
        assert torch.equal(given, served(value))
        assert {each[0].item() for each in compiled.module.parameters()} == {value}
        seen.add(value == after)
        before = value
        if left > 0:
            break
    assert left > 0 and seen == {False, True}


def test_an_update_within_a_call_of_its_own_thread_is_refused() -> None:
    compiled = attached(made(), on_miss=lambda error, x: compiled.update_weights(weights_of(2)))
    with pytest.raises(BindError, match="by the same thread"):
        compiled(torch.ones(3, 4))


# -- calls that are padded --------------------------------------------------------------------------------------------


class Padded(Model):
    """Its result has the rows in a dict, and something else."""

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"x": super().forward(x * scale), "rest": (x.shape[1], None)}


def padded() -> tuple[CompiledRegions, Padded]:
    module = Padded().eval()
    pad = tensor("x", "n", 4, pad={"n": PadRule(7)})
    artifact, signature = artifact_of(module), make_artifact([pad, ConstantLeaf("scale", 1.0)]).signature
    parameters = (signature.parameters[0], Parameter("scale", 1, default=1.0))
    outputs = (Output(index=0, dims=("n", "")), Output(index=1), Output(index=2))
    call = Variant({"n": 2}, "", (), (), outputs, ResultContainer("tuple", (0, 1, 2)))
    signature = msgspec.structs.replace(signature, parameters=parameters)
    artifact = msgspec.structs.replace(artifact, signature=signature, calls=(call,))
    check_record(artifact)
    return attached(module, artifact), module


@pytest.mark.parametrize("call", [lambda run, x: run(x), lambda run, x: run(x=x), lambda run, x: run(x, scale=1.0)])
def test_a_call_of_the_model_is_padded_as_a_whole_and_its_result_is_cropped(call: Any) -> None:
    compiled, module = padded()
    x = X[:1].clone()
    given = call(compiled, x)
    assert torch.equal(given["x"], by_hand(module, x * module.outside)) and given["rest"] == (4, None)
    assert [run[0].shape for run in compiled.library.seen] == [(2, 4)] * 2  # type: ignore[attr-defined]
    assert compiled.library.seen[0][0][1].tolist() == [7.0] * 4 and x.shape == (1, 4)  # type: ignore[attr-defined]
    assert compiled.explain(x).pads == ("x.shape[0]: 1 → 2",) and not compiled.explain(X).pads
    assert torch.equal(call(compiled, X)["x"], by_hand(module, X * module.outside))


def test_a_call_that_cannot_be_padded_is_decided_by_its_regions() -> None:
    compiled, module = padded()
    for arguments in ((torch.ones(3, 4),), (torch.ones(1, 4, dtype=torch.float64),), (torch.ones(1, 4), 2.0)):
        with pytest.raises(MissError, match=r"no variant of `handmade blocks\.0`"):
            compiled(*arguments)
    with pytest.raises(MissError), torch.no_grad():
        module(X[:1])  # a call of the module itself is not padded


def test_a_result_of_another_structure_than_at_the_build_is_not_cropped_by_guess() -> None:
    compiled, module = padded()
    module.forward = lambda x: {"x": x}  # type: ignore[method-assign]
    with pytest.raises(LibraryError, match="has 1 values, and had 3 at the build"):
        compiled(X[:1])


# -- misses -----------------------------------------------------------------------------------------------------------


def test_a_miss_of_a_region_is_an_error_that_names_the_region() -> None:
    with pytest.raises(MissError, match=r"no variant of `handmade blocks\.0`"):
        attached(made())(torch.ones(3, 4))


def test_a_miss_runs_the_instances_own_forward_if_asked_and_is_counted() -> None:
    module = made()
    compiled = attached(module, on_miss="eager")
    x = torch.ones(3, 4)
    assert torch.equal(compiled(x), x * module.blocks[0].weight * module.blocks[1].weight)
    compiled(X)
    stats = compiled.stats()
    assert (stats.calls, stats.misses, stats.buckets["blocks.0 n=2"].calls) == (2, 2, 2)
    assert compiled.regions["blocks.1"].stats().misses == 1
    assert list(stats.miss_kinds) == ["blocks.0: n is 3, the bucket takes 2 and its inputs are not padded"]


def test_a_function_that_is_asked_at_a_miss_gets_the_regions_arguments() -> None:
    compiled = attached(made(), on_miss=lambda error, x: x * 0 + 7)
    assert torch.equal(compiled(torch.ones(3, 4)), torch.full((3, 4), 7.0))


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_module_that_has_compiled_regions_already_is_refused() -> None:
    module = made()
    first = attached(module)
    with pytest.raises(BindError, match=r"(?s)blocks\.0: its forward was replaced already.*call detach\(\)"):
        attached(module)
    first.detach()
    attached(module)


@pytest.mark.parametrize("replaced", ["blocks", "blocks.1"])
def test_a_region_that_is_replaced_after_the_load_does_not_run_eagerly_in_silence(replaced: str) -> None:
    module = made()
    compiled = attached(module)
    owner, _, key = replaced.rpartition(".")
    setattr(module.get_submodule(owner), key, made().get_submodule(replaced))
    with pytest.raises(BindError, match="were replaced in its module after the load"):
        compiled(X)


def test_there_must_be_a_module_with_these_regions() -> None:
    with pytest.raises(BindError, match="no module was given to run the rest"):
        attached(None)
    shorter = made()
    del shorter.blocks[1]
    with pytest.raises(BindError, match=r"the module lacks regions of `handmade`"):
        attached(shorter)


def test_an_attribute_of_any_instance_counts_and_none_of_what_is_outside() -> None:
    module = made()
    module.name = "outside"  # type: ignore[assignment]
    attached(module).detach()
    module.blocks[1].power = 3  # type: ignore[assignment]
    with pytest.raises(BindError, match="Python attributes are not those of the build"):
        attached(module)
    attached(module, ignore=["attributes"])


def test_a_state_of_another_shape_is_refused_with_the_instances_path() -> None:
    module = made()
    module.blocks[1].weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
    with pytest.raises(BindError, match=r"(?s)blocks\.1: .*weight: built for dtype float32, the module's is float64"):
        attached(module)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variants": "other"}, "variants are code of regions that there are not: other"),
        ({"regions": 2}, "two regions have one name"),
        ({"name": "gates.0"}, "regions are not called by the path of their first instance: gates.0"),
        ({"instances": ("blocks", "blocks.0")}, "regions lie within one another"),
        ({"instances": ("blocks.0", "blocks.0")}, "regions lie within one another, are named twice"),
        ({"signature": True}, "region blocks.0: a parameter's structure has a str where a leaf's index should be"),
    ],
)
def test_records_of_regions_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    artifact = artifact_of(made())
    (region,) = artifact.regions
    replace = msgspec.structs.replace
    if "variants" in change:
        artifact = replace(artifact, variants=(replace(artifact.variants[0], region="other"),))
    if "regions" in change:
        artifact = replace(artifact, regions=(region, region))
    if "name" in change:
        variant = replace(artifact.variants[0], region=change["name"])
        artifact = replace(artifact, regions=(replace(region, name=change["name"]),), variants=(variant,))
    if "instances" in change:
        artifact = replace(artifact, regions=(replace(region, instances=change["instances"]),))
    if "signature" in change:
        wrong = Signature((replace(region.signature.parameters[0], tree="x"),), region.signature.leaves)
        artifact = replace(artifact, regions=(replace(region, signature=wrong),))
    with pytest.raises(CorruptError) as raised:
        check_record(artifact)
    assert message in str(raised.value)


def test_sampled_sizes_count_a_call_of_the_model_once() -> None:
    """Both instances run the region; the first one's calls are sampled."""
    compiled = compiled_module(attached(made()))
    sample = sample_shapes(compiled)
    compiled(torch.ones(2, 4))
    assert [*sample.lines()] == ['{"n": 2, "count": 1}']
