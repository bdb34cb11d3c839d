"""The module's own tensors: used in place, checked before use, watched for what is put in their place."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hand_built import attach_fakes, make_artifact, specs_of, tensor
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from aotc.errors import BindError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.register_buffer("offset", torch.zeros(3), persistent=False)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3).eval()


def live(module: nn.Module, names: list[str] | None = None, built: nn.Module | None = None) -> Any:
    """A callable that gives the values of the module's tensors as its library got them."""
    state = specs_of(built or module, names)
    artifact = make_artifact([tensor("x", 1)], state=state)
    return attach_fakes(artifact, lambda x, *state: torch.cat([t.detach().flatten() for t in state]), module=module)


def frozen(module: nn.Module | None, built: nn.Module) -> Any:
    artifact = make_artifact([tensor("x", 1)], weights="frozen", state=specs_of(built, digests=True))
    return attach_fakes(artifact, lambda x: x, module=module)


def refused(action: Any) -> BindError:
    with pytest.raises(BindError) as caught:
        action()
    return caught.value


X = torch.ones(1)


# -- live -------------------------------------------------------------------------------------------------------------


def test_the_library_gets_the_modules_own_tensors_in_the_records_order_and_no_copies() -> None:
    module = Nested().eval()
    compiled = live(module, ["offset", "body.0.bias", "body.0.weight"])
    compiled(X)
    _, offset, bias, weight = compiled.libraries[0].seen[0]
    assert offset is module.offset
    assert bias is module.body[0].bias
    assert weight is module.body[0].weight


def test_a_change_in_place_is_seen_at_the_next_call() -> None:
    module = linear()
    compiled = live(module, ["bias"])
    with torch.no_grad():
        module.bias.fill_(3)
        assert compiled(X).tolist() == [3, 3, 3]
    module.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.full((3,), 4.0)})
    assert compiled(X).tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    "replace",
    [
        lambda module: setattr(module, "bias", nn.Parameter(torch.full((3,), 5.0))),
        lambda module: setattr(module.bias, "data", torch.full((3,), 5.0)),
        lambda module: module.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.full((3,), 5.0)}, assign=True),
    ],
    ids=["parameter", "data", "assign"],
)
def test_a_tensor_put_in_a_parameters_place_is_used_from_the_next_call_on(replace: Any) -> None:
    module = linear()
    compiled = live(module, ["bias", "weight"])
    compiled(X)
    replace(module)
    assert compiled(X)[:3].tolist() == [5, 5, 5]
    assert compiled.libraries[0].seen[-1][1] is module.bias


@pytest.mark.parametrize(
    "replace",
    [
        lambda module: setattr(module, "bias", nn.Parameter(torch.ones(4))),
        lambda module: setattr(module, "bias", nn.Parameter(torch.ones(3, dtype=torch.float64))),
        lambda module: setattr(module, "bias", nn.Parameter(torch.ones(6)[::2])),
        lambda module: setattr(module, "bias", None),
        lambda module: setattr(module.bias, "data", torch.ones(2)),
        lambda module: delattr(module, "bias"),
        lambda module: module.to(torch.bfloat16),
        lambda module: module.to("meta"),
    ],
    ids=["shape", "dtype", "stride", "none", "data", "deleted", "to dtype", "to device"],
)
def test_a_replacement_that_the_code_was_not_compiled_for_is_refused_at_the_next_call(replace: Any) -> None:
    module = linear()
    compiled = live(module)
    compiled(X)
    replace(module)
    error = refused(lambda: compiled(X))
    assert "bias" in [issue.where for issue in error.issues]
    assert len(compiled.libraries[0].seen) == 1
    refused(lambda: compiled(X))


def test_a_dtype_changed_twice_between_two_calls_is_noticed_wherever_the_new_weights_lie() -> None:
    """The storage that was checked is kept, so that nothing else can come to lie at its address."""
    module = nn.Linear(64, 64).eval()
    compiled = live(module)
    compiled(X)
    for _ in range(8):
        module.half()
        module.bfloat16()
        refused(lambda: compiled(X))
        module.float()
        compiled(X)


def test_the_storage_that_was_checked_lives_until_its_successor_was_checked_and_no_longer() -> None:
    module = linear()
    compiled = live(module)
    checked = StorageWeakRef(module.weight.untyped_storage())
    module.weight.data = torch.ones(3, 3)
    assert not checked.expired()
    compiled(X)
    assert checked.expired()


def test_everything_that_is_wrong_at_load_is_listed_at_once_with_both_values() -> None:
    built, module = Nested().eval(), Nested().eval()
    module.body[0].weight = nn.Parameter(torch.ones(3, 3).t())
    module.body[0].bias = nn.Parameter(torch.ones(2, dtype=torch.float64))
    module.offset = None
    error = refused(lambda: live(module, built=built))
    found = {(issue.where, issue.expected, issue.actual) for issue in error.issues}
    assert ("body.0.weight", "[3, 1]", "[1, 3]") in found
    assert ("body.0.bias", "float32", "float64") in found
    assert ("body.0.bias", "[3]", "[2]") in found
    assert {"body.0.weight", "body.0.bias", "offset"} == {issue.where for issue in error.issues}


@pytest.mark.parametrize("missing", ["bias", "weight"])
def test_a_parameter_that_is_missing_at_load_is_refused_there(missing: str) -> None:
    module = linear()
    built = linear()
    setattr(module, missing, None)
    assert [issue.where for issue in refused(lambda: live(module, [missing], built)).issues] == [missing]


def test_a_submodule_that_is_missing_at_load_is_refused_there() -> None:
    error = refused(lambda: live(nn.Linear(3, 3).eval(), ["body.0.weight"], Nested()))
    assert [issue.where for issue in error.issues] == ["body.0.weight"]


def test_another_device_than_the_calls_is_refused() -> None:
    error = refused(lambda: live(linear().to("meta"), built=linear()))
    assert {(issue.expected, issue.actual) for issue in error.issues} == {("cpu", "meta")}


def test_strides_of_axes_of_size_1_are_not_compared() -> None:
    built, module = nn.Module().eval(), nn.Module().eval()
    built.register_buffer("b", torch.ones(1, 3))
    module.register_buffer("b", torch.ones(3, 1).t())
    assert live(module, built=built)(X).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "lazy", [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, 2).to_sparse()], ids=["conj", "sparse"]
)
def test_a_tensor_whose_memory_does_not_hold_its_values_is_refused(lazy: Tensor) -> None:
    built, module = nn.Module(), nn.Module()
    built.register_buffer("b", lazy.resolve_conj().clone() if lazy.is_complex() else lazy.to_dense())
    module.register_buffer("b", lazy)
    assert refused(lambda: live(module, built=built)).issues[0].where == "b"


def test_a_submodule_replaced_after_the_load_is_noticed_and_never_served_with_the_old_weights() -> None:
    module = Nested().eval()
    compiled = live(module)
    compiled(X)
    module.body[0] = nn.Linear(3, 3)
    assert "body.0" in str(refused(lambda: compiled(X)))


REFORMED: list[Callable[[Tensor], Tensor]] = [
    lambda data: data.t(),
    lambda data: data.view(9, 1),
    lambda data: data[:2],
    lambda data: data.as_strided((3, 3), (1, 1)),
    lambda data: data.view(torch.int32),
]


@pytest.mark.parametrize("reform", REFORMED, ids=["transposed", "reshaped", "cut", "strides", "dtype"])
@pytest.mark.parametrize("way", ["live", "frozen"])
def test_a_tensor_whose_form_changes_while_its_memory_stays_is_refused_until_it_is_as_before(
    reform: Callable[[Tensor], Tensor], way: str
) -> None:
    module = linear()
    compiled: Any = live(module) if way == "live" else frozen(module, linear())
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            compiled(X)
            compiled(X)
    module.requires_grad_(False).weight.data = reform(module.weight.data)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert "weight" in str(refused(lambda: compiled(X)))
    module.weight.data = module.weight.data.view(torch.float32).as_strided((3, 3), (3, 1))
    assert compiled(X) is not None


def test_a_tensor_that_is_transposed_in_place_is_refused() -> None:
    module = linear()
    compiled = live(module)
    compiled(X)
    with torch.no_grad():
        module.weight.t_()
    assert [issue.where for issue in refused(lambda: compiled(X)).issues] == ["weight"]


def test_a_gradient_flag_or_a_mode_makes_no_new_state() -> None:
    module = linear()
    compiled = live(module)
    state = compiled._state.take()
    module.requires_grad_(False)
    with torch.inference_mode():
        assert compiled._state.take() is state


def test_without_a_module_a_live_artifact_that_uses_weights_is_refused_and_one_that_uses_none_is_not() -> None:
    with pytest.raises(BindError, match="module"):
        attach_fakes(make_artifact([tensor("x", 1)], state=specs_of(linear())), lambda x, *s: x)
    assert attach_fakes(make_artifact([tensor("x", 1)]), lambda x: x)(X) is X


def test_one_artifact_serves_any_number_of_modules_each_with_its_own_weights() -> None:
    one, two = linear(), linear()
    with torch.no_grad():
        two.bias.fill_(2)
    first, second = live(one, ["bias"]), live(two, ["bias"])
    assert first(X).tolist() == one.bias.tolist()
    assert second(X).tolist() == [2, 2, 2]


# -- tied weights -----------------------------------------------------------------------------------------------------


def test_weights_that_were_tied_at_build_are_passed_once() -> None:
    module = Tied().eval()
    compiled = live(module, ["embed.weight"])
    compiled(X)
    assert compiled.libraries[0].seen[0][1] is module.head.weight


def test_weights_that_were_tied_at_build_and_are_not_at_load_are_refused() -> None:
    module = Tied().eval()
    module.head.weight = nn.Parameter(module.embed.weight.detach().clone())
    error = refused(lambda: live(module, ["embed.weight"], Tied()))
    assert [issue.where for issue in error.issues] == ["head.weight"]


def test_weights_that_are_untied_after_the_load_are_refused_whichever_of_the_two_was_replaced() -> None:
    for part in ("head", "embed"):
        module = Tied().eval()
        compiled = live(module, ["embed.weight"])
        compiled(X)
        getattr(module, part).weight = nn.Parameter(torch.zeros(4, 4))
        error = refused(lambda run=compiled: run(X))
        assert [issue.where for issue in error.issues] == ["head.weight"]


def test_tied_weights_replaced_together_are_used() -> None:
    module = Tied().eval()
    compiled = live(module, ["embed.weight"])
    module.embed.weight = module.head.weight = nn.Parameter(torch.full((4, 4), 6.0))
    assert compiled(X).unique().tolist() == [6]


# -- written to -------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self, one: Tensor, other: Tensor) -> None:
        super().__init__()
        self.register_buffer("one", one)
        self.register_buffer("other", other)
        self.eval()


def writing(module: nn.Module, name: str = "one") -> Any:
    """A callable over a library that writes to the module's tensor `name`."""
    artifact = make_artifact([tensor("x", 1)], state=specs_of(module))
    variant = msgspec.structs.replace(artifact.variants[0], mutated_state=(name,))
    return attach_fakes(msgspec.structs.replace(artifact, variants=(variant,)), lambda x, *_: x, module=module)


WHOLE = torch.zeros(4, 4)


@pytest.mark.parametrize("written", ["one", "other"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (WHOLE, WHOLE.detach()),
        (WHOLE[:3], WHOLE[2:]),
        (WHOLE[:, 1], WHOLE[1]),
        (WHOLE[0], WHOLE[0].view(torch.int32)),
        (WHOLE[:, 0], WHOLE[2, :1].expand(3)),
        (WHOLE, torch.from_dlpack(WHOLE.detach())),
    ],
)
def test_a_tensor_that_is_written_and_lies_in_anothers_memory_is_refused(
    one: Tensor, other: Tensor, written: str
) -> None:
    error = refused(lambda: writing(Two(one, other), written))
    (issue,) = error.issues
    assert {issue.where, issue.actual} in ({"one", "that of `other`"}, {"other", "that of `one`"})
    assert writing(Two(one.clone(), other), written)(X) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (WHOLE[:2], WHOLE[2:]),
        (WHOLE[:, 0], WHOLE[:, 1]),
        (WHOLE[::2, ::2], WHOLE[1:, 1::2]),
        (WHOLE[:0], WHOLE),
    ],
)
def test_tensors_beside_each_other_in_one_memory_are_distinct(one: Tensor, other: Tensor) -> None:
    assert writing(Two(one, other))(X) is not None


def test_tensors_that_are_only_read_may_share_memory() -> None:
    assert live(Two(WHOLE, WHOLE.detach()))(X) is not None


def test_a_tensor_that_is_put_in_the_memory_of_a_written_one_after_the_load_is_refused() -> None:
    module = Two(torch.zeros(2), torch.zeros(2))
    compiled = writing(module)
    module.other = module.one.detach()
    assert "lies in the memory of" in str(refused(lambda: compiled(X)))


# -- frozen -----------------------------------------------------------------------------------------------------------


def test_a_frozen_library_takes_no_weights_and_needs_no_module() -> None:
    compiled = frozen(None, linear())
    assert compiled(X) is X
    assert len(compiled.libraries[0].seen[0]) == 1


def test_a_module_with_the_frozen_weights_is_accepted_whatever_their_strides() -> None:
    module = linear()
    module.weight.data = module.weight.data.t().contiguous().t()
    assert frozen(module, linear())(X) is X


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda m: m.bias.data.add_(1), "bias"),
        (lambda m: setattr(m.weight, "data", m.weight.data.reshape(9, 1)), "weight"),
        (lambda m: m.bfloat16(), "bias"),
        (lambda m: setattr(m, "bias", None), "bias"),
    ],
    ids=["value", "shape", "dtype", "missing"],
)
def test_a_module_with_other_weights_than_the_frozen_ones_is_refused(change: Any, where: str) -> None:
    module = linear()
    change(module)
    error = refused(lambda: frozen(module, linear()))
    assert where in [issue.where for issue in error.issues]
    assert all(issue.expected for issue in error.issues)


def test_all_frozen_tensors_that_differ_are_listed_with_both_digests() -> None:
    built, module = linear(), linear()
    with torch.no_grad():
        module.bias.add_(1)
        module.weight.add_(1)
    error = refused(lambda: frozen(module, built))
    assert {issue.where for issue in error.issues} == {"weight", "bias"}
    assert all(issue.expected.startswith("sha256:") and issue.actual.startswith("sha256:") for issue in error.issues)
    assert all(issue.expected != issue.actual for issue in error.issues)


def in_place(module: nn.Module) -> None:
    with torch.no_grad():
        module.bias.add_(1)


@pytest.mark.parametrize(
    "change",
    [
        in_place,
        lambda m: m.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(3)}),
        lambda m: setattr(m, "bias", nn.Parameter(m.bias.detach().clone())),
        lambda m: setattr(m.bias, "data", torch.ones(3)),
        lambda m: setattr(m, "bias", None),
        lambda m: delattr(m, "bias"),
        lambda m: m.to(torch.bfloat16),
    ],
    ids=["in place", "load_state_dict", "parameter", "data", "none", "deleted", "to dtype"],
)
def test_a_change_of_frozen_weights_after_the_load_is_refused_at_the_next_call(change: Any) -> None:
    module = linear()
    compiled = frozen(module, linear())
    compiled(X)
    change(module)
    assert "bias" in str(refused(lambda: compiled(X)))
    refused(lambda: compiled(X))


def wrapped() -> nn.Module:
    """A weight of a class that keeps its values in other tensors, as torchao's quantized ones do."""
    module = linear()
    values = module.weight.detach()
    module.weight = nn.Parameter(TwoTensor(values.clone(), values.clone()), requires_grad=False)
    return module


def test_a_step_of_a_fused_optimizer_on_frozen_weights_is_refused_and_counts_nowhere_else() -> None:
    """torch leaves `_version` as it is."""
    module, other = linear(), linear()
    compiled = frozen(module, linear())
    for each in (other, module):
        each.weight.grad = torch.ones_like(each.weight)
        before = each.weight._version
        torch.optim.SGD(each.parameters(), lr=0.1, fused=True).step()
        assert each.weight._version - before == (each is module)
    with pytest.raises(BindError, match="weights of the module changed after the load: weight"):
        compiled(X)
    del compiled, each
    gc.collect()
    before = module.weight._version
    torch.optim.SGD(module.parameters(), lr=0.1, fused=True).step()
    assert module.weight._version == before


def test_frozen_weights_that_hold_their_values_in_other_tensors_are_compared_and_watched() -> None:
    module, other = wrapped(), wrapped()
    compiled = frozen(module, wrapped())
    assert compiled(X) is X
    other.weight.b.add_(1)
    (issue,) = refused(lambda: frozen(other, wrapped())).issues
    assert issue.where == "weight" and issue.expected != issue.actual
    module.weight.b.add_(1)
    assert "after the load: weight;" in str(refused(lambda: compiled(X)))


def test_a_submodule_replaced_beside_a_frozen_artifact_is_noticed() -> None:
    module, built = Nested().eval(), Nested().eval()
    built.load_state_dict(module.state_dict())
    compiled = frozen(module, built)
    module.body[0] = nn.Linear(3, 3)
    assert "body.0" in str(refused(lambda: compiled(X)))


def test_inference_tensors_whose_changes_torch_does_not_record_are_refused_with_a_way_out() -> None:
    with torch.inference_mode():
        module = linear()
    error = refused(lambda: frozen(module, linear()))
    assert "inference" in str(error)
    assert "without a module" in error.hint
