"""What `aotc verify` notices of code that gives the right numbers at first: it writes to memory that is not its own, or
holds the weights of its build, or results that are the caller's; and outputs that prove nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from processes import ZOO
from torch import Tensor, nn

import aotc
from aotc.manifest import ModelSpec
from aotc.reads.tensors import same_bits
from aotc.store.layout.built import read_built
from aotc.store.opening import open_readable
from aotc.store.reference import Reference
from aotc.store.signing.trust import read_trust, read_trusted
from aotc.verify import comparison as comparison_module
from aotc.verify.cases import VerifyStep
from aotc.verify.compare_worker import _verify_sizes, _verify_weights
from aotc.verify.comparison import Comparison, VerifyJob
from aotc.verify.verdicts import VerifyReport


@pytest.fixture
def compared(zoo_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[VerifyJob, Comparison]:
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    store = open_readable(str(zoo_store))
    bundle = read_trusted(store, Reference(None, "linear", tag="latest"), read_trust())
    artifact = read_built(store, bundle.artifacts[0].digest)
    spec = msgspec.convert(artifact.manifest, ModelSpec)
    job = VerifyJob("linear", str(zoo_store), spec, str(ZOO), artifact.target, seeds=2)
    return job, Comparison(job)


def writing(comparison: Comparison, value: float) -> tuple[Any, str]:
    """The compiled code, and after each call a value over one element of a bias; and the bias's name."""
    compiled, name = comparison.compiled, "linear.bias"

    def call(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        comparison.module.get_parameter(name).data[3] = value
        return result

    return call, name


def verified(job: VerifyJob, comparison: Comparison) -> VerifyReport:
    return _verify_sizes(comparison, job, "batch=4", {"batch": 4}, job.seeds)


def sound(job: VerifyJob, comparison: Comparison) -> bool:
    return verified(job, comparison).status == "ok"


@pytest.mark.parametrize("value", [float("nan"), 0.125])
def test_a_parameter_that_is_written_over_fails_and_is_named(
    compared: tuple[VerifyJob, Comparison], value: float
) -> None:
    job, comparison = compared
    assert sound(job, comparison)
    right = comparison.compiled
    comparison.compiled, name = writing(comparison, value)
    wrong = verified(job, comparison)
    assert wrong.status == "failed"
    assert f"wrote over the parameter {name}, which the model only reads" in wrong.detail
    comparison.compiled = right
    assert sound(job, comparison), "the next bucket is judged for itself"


def test_a_parameter_that_eager_changes_too_is_the_model_s_own(compared: tuple[VerifyJob, Comparison]) -> None:
    job, comparison = compared
    comparison.compiled, name = writing(comparison, 0.125)

    def also(_module: nn.Module, _args: Any, _output: Any) -> None:
        comparison.eager.get_parameter(name).data[3] = 0.125

    comparison.eager.register_forward_hook(also)
    assert sound(job, comparison)


@pytest.mark.parametrize(("added", "status"), [(0.125, "ok"), (0.5, "failed"), (0.0, "failed")])
def test_what_eager_writes_to_a_parameter_the_compiled_code_must_write_too(
    compared: tuple[VerifyJob, Comparison], added: float, status: str
) -> None:
    job, comparison = compared
    compiled = comparison.compiled

    def add(model: nn.Module, value: float) -> None:
        model.get_parameter("linear.bias").data[3] += value

    def call(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        add(comparison.module, added)
        return result

    comparison.compiled = call
    for model in (comparison.eager, comparison.reference):
        model.register_forward_hook(lambda own, *_: add(own, 0.125))
    report = verified(job, comparison)
    assert report.status == status
    assert status == "ok" or "rms error" in report.detail


def test_tied_parameters_and_views_that_the_model_writes_are_its_own(
    compared: tuple[VerifyJob, Comparison],
) -> None:
    """One tensor under two names, and two parameters in one memory, of which a copy of the module has two memories."""
    _, comparison = compared
    comparison.module.flat = comparison.module.again = nn.Parameter(torch.zeros(8))
    comparison.module.part = nn.Parameter(comparison.module.flat.data[:4])
    comparison.eager, comparison.reference = copy.deepcopy(comparison.module), copy.deepcopy(comparison.module)
    comparison.module.flat.data[1] = 1.0
    changed = comparison._changed_parameters()
    assert set(changed) == {"flat", "part"}
    comparison.eager.flat.data[1] = comparison.reference.flat.data[1] = 1.0
    comparison._check_parameters(changed)
    assert comparison.module.part[1] == 1.0


@pytest.mark.parametrize("added", [torch.rand_like, torch.randn_like, lambda output: torch.full(output.shape, 0.5)])
def test_of_a_failure_it_is_said_that_the_model_draws_random_numbers(
    compared: tuple[VerifyJob, Comparison], added: Callable[[Tensor], Tensor]
) -> None:
    """Also where what float64 draws is as far from eager's as the compiled code's output is."""
    job, comparison = compared

    def add(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output + added(output)

    for model in (comparison.eager, comparison.reference):
        model.register_forward_hook(add)
    report = verified(job, comparison)
    assert report.status == "failed"
    assert ("the model draws random numbers" in report.detail) is (added in (torch.rand_like, torch.randn_like))


@pytest.mark.parametrize(("finite_seeds", "status"), [((), "failed"), ((1,), "ok")])
def test_an_output_without_any_finite_element_proves_nothing(
    compared: tuple[VerifyJob, Comparison], finite_seeds: tuple[int, ...], status: str
) -> None:
    job, comparison = compared
    assert job.seeds == 2
    parameters = [part.get_parameter("linear.bias") for part in (comparison.module, comparison.eager)]
    right, compare = parameters[0].detach().clone(), comparison.compare

    def with_nan(dims: dict[str, int], seed: int) -> Any:
        for bias in (*parameters, comparison.reference.get_parameter("linear.bias")):
            bias.data.copy_(right if seed in finite_seeds else torch.full_like(right, float("nan")))
        return compare(dims, seed)

    comparison.compare = with_nan  # type: ignore[method-assign]
    report = verified(job, comparison)
    assert report.status == status
    if status == "failed":
        assert "output has no finite element" in report.detail and "`init`" in report.detail


# -- weights ----------------------------------------------------------------------------------------------------------


def with_others(job: VerifyJob, comparison: Comparison, weights: Any) -> VerifyReport | None:
    return _verify_weights(comparison, job, "batch=4", {"batch": 4}, VerifyStep(1, weights))


def test_other_weights_are_served_by_the_same_code(compared: tuple[VerifyJob, Comparison]) -> None:
    job, comparison = compared
    before = comparison.eager.get_parameter("linear.bias").detach().clone()
    for weights in ("other", "swapped"):
        assert with_others(job, comparison, weights) is None
        now = comparison.eager.get_parameter("linear.bias").detach()
        assert not torch.allclose(now, before, rtol=0.01)
        before = now.clone()
    assert not comparison.overflows


@pytest.mark.parametrize("name", ["linear.weight", "linear.bias"])
def test_a_weight_that_is_held_by_the_compiled_code_is_found_by_other_weights(
    compared: tuple[VerifyJob, Comparison], name: str
) -> None:
    job, comparison = compared
    compiled, module = comparison.compiled, comparison.module
    held = module.get_parameter(name).detach().clone()

    def call(*args: Any, **kwargs: Any) -> Any:
        given = module.get_parameter(name).data
        module.get_parameter(name).data = held
        try:
            return compiled(*args, **kwargs)
        finally:
            module.get_parameter(name).data = given

    comparison.compiled = call
    assert sound(job, comparison)
    report = with_others(job, comparison, "other")
    assert report is not None and report.status == "failed"
    assert "with other weights, after module.load_state_dict: rms error" in report.detail
    assert report.weights == "other" and "(absolute, of values of rms" in report.detail


@pytest.mark.parametrize("ends", ["raises", "overflows"])
def test_other_weights_that_the_model_itself_does_not_bear_say_nothing(
    compared: tuple[VerifyJob, Comparison], ends: str
) -> None:
    job, comparison = compared
    assert sound(job, comparison)

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        if ends == "raises":
            raise ValueError("no such weights")
        return output / 0

    comparison.eager.register_forward_hook(hook)
    assert with_others(job, comparison, "other") is None


# -- results ----------------------------------------------------------------------------------------------------------


def models(comparison: Comparison) -> list[nn.Module]:
    return [comparison.module, comparison.eager, comparison.reference]


@pytest.mark.parametrize("eager_too", [False, True])
def test_a_result_that_the_next_call_changes_is_found_unless_eager_s_is_too(
    compared: tuple[VerifyJob, Comparison], eager_too: bool
) -> None:
    job, comparison = compared
    compiled, memory = comparison.compiled, torch.empty(4, 8)
    comparison.compiled = lambda *args, **kwargs: memory.copy_(compiled(*args, **kwargs))
    if eager_too:
        own = torch.empty(4, 8)
        comparison.eager.register_forward_hook(lambda _module, _args, output: own.copy_(output))
    report = verified(job, comparison)
    assert report.status == ("ok" if eager_too else "failed")
    assert eager_too or "output of one call is changed by the next call" in report.detail


@pytest.mark.parametrize("eager_too", [False, True])
def test_a_result_that_is_the_module_s_state_is_found_at_the_first_call_unless_eager_s_is_too(
    compared: tuple[VerifyJob, Comparison], eager_too: bool
) -> None:
    job, comparison = compared
    for model in models(comparison):
        dtype = next(model.parameters()).dtype
        model.register_buffer("kept", torch.zeros(4, 8, dtype=dtype))
    compiled = aotc.load(f"{job.store}#linear", comparison.module, ignore=["attributes"])
    comparison.compiled = lambda *args, **kwargs: comparison.module.kept.copy_(compiled(*args, **kwargs))
    for model in models(comparison)[1:]:
        model.register_forward_hook(
            lambda module, _args, output: module.kept.copy_(output) if eager_too else module.kept.copy_(output).clone()
        )
    report = _verify_sizes(comparison, job, "batch=4", {"batch": 4}, 1)
    assert report.status == ("ok" if eager_too else "failed")
    assert eager_too or "output lies in the memory of the module's `kept`, unlike in eager" in report.detail


class Cache:
    """Equal to itself alone, like those of transformers."""

    def __init__(self, keys: Tensor, scale: float = 1.0) -> None:
        self.layers = [{"keys": keys, "scale": scale}]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (lambda output: Cache(output), ""),
        (lambda output: Cache(output * 1.01), "rms error"),
        (lambda output: Cache(output, 2.0), "output.cache.layers[0].scale: rms error 1.0"),
        (lambda output: Cache(output, 1), "eager gives 1.0 as output.cache.layers[0].scale, compiled gives 1"),
        (lambda output: (output,), "eager gives 2 outputs, compiled gives 1"),
    ],
    ids=["right", "tensor", "attribute", "kind", "container"],
)
def test_objects_in_a_result_are_compared_by_what_they_hold(
    compared: tuple[VerifyJob, Comparison], result: Callable[[Tensor], Any], problem: str
) -> None:
    job, comparison = compared
    compiled = comparison.compiled
    comparison.compiled = lambda *args, **kwargs: {"cache": result(compiled(*args, **kwargs))}
    for model in models(comparison)[1:]:
        model.register_forward_hook(lambda _module, _args, output: {"cache": Cache(output)})
    report = verified(job, comparison)
    assert report.status == ("failed" if problem else "ok"), report.detail
    assert problem in report.detail


def test_a_result_whose_size_depends_on_its_numbers_is_judged_by_eager_s(
    compared: tuple[VerifyJob, Comparison],
) -> None:
    """In float64 there may be others."""
    job, comparison = compared
    compiled = comparison.compiled
    comparison.compiled = lambda *args, **kwargs: compiled(*args, **kwargs).flatten()[:20]
    for model, size in ((comparison.eager, 20), (comparison.reference, 21)):
        model.register_forward_hook(lambda _module, _args, output, size=size: output.flatten()[:size])
    assert sound(job, comparison)


# -- what cannot be run -----------------------------------------------------------------------------------------------


def fail(*_: Any) -> None:
    raise ValueError("not today")


def test_what_fails_in_eager_could_not_run_and_says_where(compared: tuple[VerifyJob, Comparison]) -> None:
    job, comparison = compared
    handle = comparison.eager.register_forward_hook(fail)
    report = verified(job, comparison)
    assert report.status == "could not run"
    assert "ValueError: not today (" in report.detail and "test_verified_parameters.py:" in report.detail
    handle.remove()
    assert sound(job, comparison), "the next size is judged for itself"


def test_what_fails_in_compiled_code_alone_has_failed(compared: tuple[VerifyJob, Comparison]) -> None:
    job, comparison = compared
    right, comparison.compiled = comparison.compiled, fail
    report = verified(job, comparison)
    assert report.status == "failed" and "ValueError: not today (" in report.detail
    comparison.compiled = right
    assert sound(job, comparison)


def test_a_model_that_runs_in_no_other_precision_is_its_own_reference(compared: tuple[VerifyJob, Comparison]) -> None:
    job, comparison = compared
    original = comparison._wide_copy

    def failing() -> nn.Module:
        model = original()
        if model is not comparison.eager:
            model.register_forward_hook(fail)
        return model

    comparison._wide_copy = failing  # type: ignore[method-assign]
    comparison.reference.register_forward_hook(fail)
    assert sound(job, comparison)
    assert comparison.reference is comparison.eager
    compiled = comparison.compiled
    comparison.compiled = lambda *args, **kwargs: compiled(*args, **kwargs) * 1.001
    assert not sound(job, comparison)


def test_a_module_that_cannot_be_copied_is_made_again(
    compared: tuple[VerifyJob, Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, comparison = compared
    comparison.module.get_parameter("linear.bias").data += 1.0

    def refuse(_module: nn.Module) -> nn.Module:
        raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")

    monkeypatch.setattr(comparison_module.copy, "deepcopy", refuse)
    made = comparison.copy_of(comparison.module)
    assert made is not comparison.module and type(made) is type(comparison.module)
    assert all(map(torch.equal, made.parameters(), comparison.module.parameters()))


@pytest.mark.parametrize(
    "tensor",
    [torch.rand(3, 4), torch.rand(3, 4).t(), torch.tensor(2.5), torch.tensor([float("nan"), -0.0])]
    + [torch.rand(4, dtype=torch.complex64).conj(), torch.rand(4, dtype=torch.complex64).imag]
    + [torch.rand(4).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool)],
)
def test_equal_bits_are_the_same_whatever_they_are(tensor: Tensor) -> None:
    assert same_bits(tensor, tensor.clone())
    other = tensor.contiguous().resolve_conj().resolve_neg().clone()
    other.view(-1).view(torch.uint8)[0] ^= 1
    assert not same_bits(tensor, other)
