"""`method:` in a manifest: a method of the module is what is captured, called and compared."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hand_built import attach_fakes, make_artifact, specs_of, tensor
from torch import Tensor, nn

from aotc.compiler.capture.export import capture
from aotc.errors import ManifestError
from aotc.manifest.types import ModelSpec
from aotc.models.auto_inputs import auto_inputs
from aotc.models.calls import call_model
from aotc.models.factory import enter_by
from aotc.models.signature import make_signature
from aotc.reads.attributes import module_attributes, read_attributes


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def encode(self, x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        return {"own": self(x), "scaled": x * self.weight * scale}


INPUTS = {"x": {"shape": ["n", 4]}}
X = torch.ones(2, 4)


def entered() -> Coder:
    module = Coder().eval()
    enter_by(module, "encode")
    return module


def test_calls_run_the_method_which_may_call_the_forward() -> None:
    module = entered()
    for each in (module, copy.deepcopy(module)):
        assert list(each(X)) == ["own", "scaled"]
        assert torch.equal(each(X)["own"], X * each.weight)
    moved = copy.deepcopy(module)
    moved.weight.data.zero_()
    assert moved(X)["own"].sum() == 0 and module(X)["own"].sum() > 0
    assert inspect.signature(module.forward) == inspect.signature(module.encode)


def test_a_module_that_is_entered_by_a_method_has_the_attributes_of_one_that_is_not() -> None:
    assert module_attributes(entered()) == module_attributes(Coder().eval())


def test_the_method_is_captured_by_its_own_signature() -> None:
    module = entered()
    signature = make_signature(ModelSpec("coder", "m:f", INPUTS, ({"n": 2},), method="encode"), module)
    assert [parameter.name for parameter in signature.parameters] == ["x", "scale"]
    captured = capture(module, signature, [X, 2.0], None, False)
    assert set(captured.state) == {"weight"}
    assert len(call_model(module, signature, (), [X, 2.0])) == 4


def test_a_method_that_there_is_not_is_named_with_the_nearest() -> None:
    with pytest.raises(ManifestError, match="Coder has no method `encod`") as caught:
        enter_by(Coder(), "encod")
    assert caught.value.hint == "did you mean `encode`?"


def test_a_miss_of_a_method_runs_the_method_and_the_signature_is_its_own() -> None:
    module = Coder().eval()
    artifact = make_artifact([tensor("x", "n", 4)], [{"n": 2}], state=specs_of(module))
    artifact = msgspec.structs.replace(artifact, method="encode")
    compiled = attach_fakes(artifact, lambda x, weight: x + weight, module=module, on_miss="eager")
    with torch.no_grad():
        assert torch.equal(compiled(X), X + module.weight)
        assert list(compiled(torch.ones(3, 4))) == ["own", "scaled"]
    assert inspect.signature(compiled) == inspect.signature(module.encode)
    module.encode = compiled
    with torch.no_grad():
        assert torch.equal(module.encode(X), X + module.weight)
        assert list(module.encode(torch.ones(3, 4))) == ["own", "scaled"]
    assert "encode" not in module_attributes(module)[""]


def test_automatic_inputs_are_those_that_the_method_takes() -> None:
    class Both(nn.Module):
        main_input_name = "input_ids"

        def forward(self, input_ids: Any, pixel_values: Any) -> Any:
            return input_ids

        def get_image_features(self, pixel_values: Tensor) -> Tensor:
            return pixel_values

    module = Both()
    module.config = SimpleNamespace(vocab_size=9, vision_config=SimpleNamespace(image_size=8))  # type: ignore[assignment]
    enter_by(module, "get_image_features")
    assert auto_inputs(module) == {"pixel_values": {"shape": ["batch", 3, 8, 8]}}


def test_a_forward_that_is_read_is_the_class_s_in_the_build_too() -> None:
    """As of a VAE of diffusers, where accelerate is installed: its load was refused."""
    entered, names = Coder(), {"Coder.forward"}
    enter_by(entered, "encode")
    assert read_attributes(entered, names) == read_attributes(Coder(), names) != {}
