"""`aotc verify` notices code that writes to memory that is not its own, where that is a parameter's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from processes import ZOO
from torch import Tensor

from aotc.manifest import ModelSpec
from aotc.store import Reference, open_readable, read_artifact, read_trust, read_trusted
from aotc.verify.worker import Comparison, VerifyJob, _same_bits, _verify_sizes


@pytest.fixture
def compared(zoo_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[VerifyJob, Comparison]:
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "hot"))
    store = open_readable(str(zoo_store))
    bundle = read_trusted(store, Reference(None, "linear", tag="latest"), read_trust())
    artifact = read_artifact(store, bundle.artifacts[0].digest)
    spec = msgspec.convert(artifact.manifest, ModelSpec)
    job = VerifyJob("linear", str(zoo_store), spec, str(ZOO), artifact.target, seeds=2)
    return job, Comparison(job)


def writing(comparison: Comparison, value: float) -> Any:
    """The compiled code, and after each call a value over one element of a bias."""
    compiled, (name, bias) = (
        comparison.compiled,
        next(item for item in comparison.module.named_parameters() if item[0].endswith("bias")),
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        bias.data[3] = value
        return result

    return call, name


@pytest.mark.parametrize("value", [float("nan"), 0.125])
def test_a_parameter_that_is_written_over_fails_and_is_named(
    compared: tuple[VerifyJob, Comparison], value: float
) -> None:
    job, comparison = compared
    right = _verify_sizes(comparison, job, "batch=4", {"batch": 4})
    assert right.status == "ok"
    comparison.compiled, name = writing(comparison, value)
    wrong = _verify_sizes(comparison, job, "batch=4", {"batch": 4})
    assert wrong.status == "failed"
    assert f"wrote over the parameter {name}, which it only reads" in wrong.detail


def test_a_parameter_that_the_model_writes_to_may_change(compared: tuple[VerifyJob, Comparison]) -> None:
    job, comparison = compared
    comparison.compiled, name = writing(comparison, 0.125)
    comparison.written = {name}
    assert "parameter" not in _verify_sizes(comparison, job, "batch=4", {"batch": 4}).detail


@pytest.mark.parametrize(
    "tensor",
    [torch.rand(3, 4), torch.rand(3, 4).t(), torch.tensor(2.5), torch.tensor([float("nan"), -0.0])]
    + [torch.rand(4).to(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool)],
)
def test_equal_bits_are_the_same_whatever_they_are(tensor: Tensor) -> None:
    assert _same_bits(tensor, tensor.clone())
    other = tensor.contiguous().clone()
    other.view(-1).view(torch.uint8)[0] ^= 1
    assert not _same_bits(tensor, other)
