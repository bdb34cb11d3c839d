"""`aotc verify` notices code that writes to memory that is not its own, where that is a parameter's; and outputs that
prove nothing."""

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

from aotc.manifest import ModelSpec
from aotc.snapshot import same_bits
from aotc.store import Reference, open_readable, read_artifact, read_trust, read_trusted
from aotc.verify.worker import Comparison, VerifyJob, _verify_sizes


@pytest.fixture
def compared(zoo_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[VerifyJob, Comparison]:
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "hot"))
    store = open_readable(str(zoo_store))
    bundle = read_trusted(store, Reference(None, "linear", tag="latest"), read_trust())
    artifact = read_artifact(store, bundle.artifacts[0].digest)
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


def sound(job: VerifyJob, comparison: Comparison) -> bool:
    return _verify_sizes(comparison, job, "batch=4", {"batch": 4}).status == "ok"


@pytest.mark.parametrize("value", [float("nan"), 0.125])
def test_a_parameter_that_is_written_over_fails_and_is_named(
    compared: tuple[VerifyJob, Comparison], value: float
) -> None:
    job, comparison = compared
    assert sound(job, comparison)
    right = comparison.compiled
    comparison.compiled, name = writing(comparison, value)
    wrong = _verify_sizes(comparison, job, "batch=4", {"batch": 4})
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
    report = _verify_sizes(comparison, job, "batch=4", {"batch": 4})
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
    report = _verify_sizes(comparison, job, "batch=4", {"batch": 4})
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
    report = _verify_sizes(comparison, job, "batch=4", {"batch": 4})
    assert report.status == status
    if status == "failed":
        assert "output 0 has no finite element" in report.detail and "`init`" in report.detail


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
