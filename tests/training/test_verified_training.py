"""`aotc verify` trains the model for ten steps, compiled and in eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from open_libraries import libraries_of
from processes import ROOT
from torch import Tensor

from aotc.machine.native_target import resolve_target
from aotc.manifest import read_manifest
from aotc.models.calls import signature_leaves
from aotc.models.tolerance import judge_gradients
from aotc.records import PadRule
from aotc.runtime.training.step import TrainingStep
from aotc.store.reference import parse_reference
from aotc.tools.doctor.bundle_checks import check_bundle
from aotc.verify.cases import VerifyStep
from aotc.verify.compare_worker import _RANDOM, _verify_weights, measured_launches
from aotc.verify.comparison import Comparison, VerifyJob
from aotc.verify.training import _descend, compare_training

HERE = ROOT / "tests" / "training"


def comparison_of(name: str, store: Path) -> Comparison:
    spec = read_manifest(HERE / "training.yaml").models[name]
    return Comparison(VerifyJob(f"{store}#{name}", str(store), spec, str(HERE), resolve_target("native"), 1))


@pytest.mark.every_torch
@pytest.mark.parametrize("name", ["mixed", "stack"])
def test_ten_steps_as_users_run_them_are_right_and_leave_everything_as_before(
    stepped_store: Path, models: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    steps: list[Any] = []

    class Counted(TrainingStep):
        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            steps.append(args)
            return super().__call__(*args, **kwargs)

    monkeypatch.setattr("aotc.verify.training.TrainingStep", Counted)
    comparison = comparison_of(name, stepped_store)
    before = {key: tensor.clone() for key, tensor in comparison.module.state_dict().items()}
    found = compare_training(comparison, {"batch": 6})
    assert all(each.ok for each in found), [each.detail for each in found]
    assert len(steps) == 10
    torch.testing.assert_close(comparison.module.state_dict(), before, rtol=0, atol=0)


def test_eager_has_no_old_casts_of_parameters_under_autocast(training_store: Path, models: Any) -> None:
    """Within one `torch.autocast`, torch keeps them from step to step."""
    comparison = comparison_of("stack", training_store)
    leaves = signature_leaves(comparison.spec, comparison.signature, {"batch": 6}, comparison.device, 0, HERE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, _ = _descend(comparison, comparison.eager, comparison.eager, leaves, 0.5, 3)
    assert losses[2] < losses[1] < losses[0]


def test_a_wrong_gradient_is_found_by_its_name(training_store: Path, models: Any) -> None:
    comparison = comparison_of("mixed", training_store)
    for library in libraries_of(comparison.compiled):
        names = dict(zip(library._names, range(len(library._names)), strict=True))
        norm = names["norm.weight"], names["norm.bias"]
        for place, other in zip(norm, [library.gradients[each] for each in reversed(norm)], strict=True):
            library.gradients[place] = other
    failed = [each.detail for each in compare_training(comparison, {"batch": 6}) if not each.ok]
    assert any("the gradient of `norm.weight`" in each for each in failed)
    assert any("`norm.weight` after 10 steps" in each for each in failed)


def test_gradients_of_padded_calls_are_compared(training_store: Path, models: Any) -> None:
    """A result may be right where a gradient is not finite: that of a norm at a row of zeros."""
    comparison = comparison_of("padded", training_store)
    assert all(each.ok for each in compare_training(comparison, {"batch": 5}, steps=0))
    comparison.signature.leaves[0].pad["batch"] = PadRule(0.0)
    assert all(each.ok for each in comparison.compare({"batch": 3}, 0).all())
    failed = [each.detail for each in compare_training(comparison, {"batch": 3}, steps=0) if not each.ok]
    assert any("the gradient of `enter.weight`" in each for each in failed)


def test_a_model_that_draws_as_eager_does_is_compared(training_store: Path, models: Any) -> None:
    """Built with torch's own random numbers: the float64 reference draws them, too."""
    comparison = comparison_of("random_as_eager", training_store)
    assert all(each.ok for each in comparison.compare({"batch": 16}, 0).all())
    found = compare_training(comparison, {"batch": 16})
    assert comparison.draws
    assert [each.ok for each in found] == [True] * 3, [each.detail for each in found]


def test_of_other_numbers_than_eagers_it_is_said_what_to_build(training_store: Path, models: Any) -> None:
    """With other weights, too: they are not what is wrong."""
    comparison = comparison_of("random", training_store)
    report = _verify_weights(comparison, comparison.job, "batch=16", {"batch": 16}, VerifyStep(0, "other"))
    assert report is not None
    assert report.detail.endswith(_RANDOM)
    assert "fallback_random: true" in _RANDOM


def test_noise_in_place_of_a_gradient_of_0_is_right_and_a_missing_gradient_is_not() -> None:
    true: list[Tensor | None] = [torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)]
    eager: list[Tensor | None] = [torch.ones(4), torch.full((4,), 1e-9)]
    noise: list[Tensor | None] = [torch.ones(4), torch.full((4,), 9e-8)]
    wrong: list[Tensor | None] = [torch.ones(4), torch.full((4,), 1e-3)]
    names = ["a", "b"]
    assert [each.ok for each in judge_gradients(names, noise, eager, true)] == [True, True]
    assert [each.ok for each in judge_gradients(names, wrong, eager, true)] == [True, False]
    assert [each.ok for each in judge_gradients(names, [eager[0], None], eager, true)] == [True, False]


def test_a_gradient_of_half_the_size_is_found(training_store: Path, models: Any) -> None:
    comparison = comparison_of("mixed", training_store)
    (library,) = libraries_of(comparison.compiled)
    run = library.backward
    for index in sorted({each for each in library.gradients if each is not None})[::3]:

        def tampered(arguments: list[Tensor], index: int = index) -> list[Tensor]:
            results = run(arguments)
            results[index].mul_(0.5).add_(1e-3)
            return results

        library.backward = tampered
        assert not all(each.ok for each in compare_training(comparison, {"batch": 6}, steps=0)), library._names


def test_a_buffer_that_is_written_wrongly_is_found(training_store: Path, models: Any) -> None:
    comparison = comparison_of("mixed", training_store)
    (library,) = libraries_of(comparison.compiled)
    forward = library.forward

    class Tampered:
        def run(self, arguments: Any) -> list[Tensor]:
            outputs = forward.run(arguments)
            comparison.module.norm.running_var.mul_(0.99)
            return outputs

    library.forward = Tampered()
    assert not all(each.ok for each in comparison.compare({"batch": 6}, 0).written)


def test_another_dropout_mask_in_the_backward_is_found(training_store: Path, models: Any) -> None:
    comparison = comparison_of("random_as_eager", training_store)
    (library,) = libraries_of(comparison.compiled)
    run = library.backward

    def tampered(arguments: list[Tensor]) -> list[Tensor]:
        return run([each.flip(0) if each.dtype is torch.bool else each for each in arguments])

    library.backward = tampered
    failed = [each.detail for each in compare_training(comparison, {"batch": 16}) if not each.ok]
    assert any("the gradient of `enter.weight`" in each for each in failed), failed


def test_a_small_gradient_that_is_wrong_is_no_rounding_of_a_large_one() -> None:
    true: list[Tensor | None] = [
        torch.full((4,), 1e3, dtype=torch.float64),
        torch.full((4,), 1e-2, dtype=torch.float64),
    ]
    eager: list[Tensor | None] = [torch.full((4,), 1e3 + 2e-2), torch.full((4,), 1e-2)]
    near, wrong = torch.full((4,), 1.1e-2), torch.full((4,), 2e-2)
    assert [each.ok for each in judge_gradients(["a", "b"], [eager[0], near], eager, true)] == [True, True]
    assert [each.ok for each in judge_gradients(["a", "b"], [eager[0], wrong], eager, true)] == [True, False]


def test_doctor_opens_the_libraries_of_both_halves(training_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AOTC_TRUSTED_KEYS", raising=False)
    found = {check.name: check for check in check_bundle(parse_reference("mixed"), str(training_store))}
    assert found["training"].status == found["loads"].status == "ok"


def test_the_launch_of_the_halves_is_not_measured(training_store: Path, models: Any) -> None:
    """Of code that was built for a GPU that the build lacked, `aotc verify --attest` measures other launches."""
    comparison = comparison_of("random", training_store)
    comparison.device = torch.device("cuda")
    assert measured_launches(comparison) == (None,)
