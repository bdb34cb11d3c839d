"""Calls of a model by regions whose inputs are padded: the axes of its result that are cropped, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ZOO
from torch import Tensor, nn

from aotc.compiler.capture.regions.padded_calls import padded_calls
from aotc.errors import BuildError
from aotc.manifest import ModelSpec
from aotc.records import Bucket, SizeRange, Variant

X = {"shape": ["n", "seq", 8], "pad": {"n": 0, "seq": 0}}
MASK = {"shape": ["n", "seq"], "dtype": "bool", "pad": {"n": False, "seq": False}, "init": "ones"}
BUCKET: Bucket = {"n": 1, "seq": 8}


def calls(
    module: nn.Module, inputs: dict[str, Any], bucket: Bucket = BUCKET, crop: Any = ("n", "seq")
) -> list[Variant]:
    spec = ModelSpec("model", "package:factory", inputs, (bucket,), regions=("layers.*",), crop=crop)
    return list(padded_calls(spec, module.eval(), Path()))


def dims(found: list[Variant]) -> list[tuple[str, ...]]:
    (call,) = found
    return [output.dims for output in call.outputs]


class Counting(nn.Module):
    """It returns what it is told to of its input, and counts its calls."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if x.shape[1] > 8:
            raise ValueError("more than the manifest promises")
        return self.result(x)


def test_axes_that_change_with_a_dim_have_it_whatever_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width of `x` is that of the bucket's `seq`."""
    monkeypatch.syspath_prepend(str(ZOO))
    import region_models

    pooled = region_models.Pooled()
    assert dims(calls(pooled, {"x": X, "mask": MASK})) == [("n", "seq", ""), ("n", ""), ()]
    assert dims(calls(pooled, {"x": X, "mask": MASK}, crop=("seq",))) == [("", "seq", ""), (), ()]
    assert dims(calls(pooled, {"x": X, "mask": MASK}, crop={"['x']": ["n", None, None]})) == [("n", "", ""), (), ()]
    plain = {name: {**form, "pad": {}} for name, form in (("x", X), ("mask", MASK))}
    assert calls(pooled, plain) == []


def test_sizes_that_follow_a_dim_are_cropped_too_and_the_model_is_left_as_it_was() -> None:
    module = Counting(lambda x: (torch.cat([x, x], 1), x.sum()))
    found = calls(module, {"x": {**X, "shape": [3, "seq", 8], "pad": {"seq": 0}}}, {"seq": 8}, ("seq",))
    assert dims(found) == [("", "2*seq+0", ""), ()]
    assert module.calls.item() == 0


def test_a_range_is_padded_where_it_has_gaps() -> None:
    bucket: Bucket = {"n": 2, "seq": SizeRange(2, 8, multiple_of=2, tune_at=4)}
    (call,) = calls(Counting(lambda x: x + 1), {"x": X}, bucket)
    assert (call.padded, call.outputs[0].dims) == (("n", "seq"), ("n", "seq", ""))
    assert calls(Counting(lambda x: x + 1), {"x": X}, {"n": 2, "seq": SizeRange(1, 8, tune_at=4)})[0].padded == ("n",)


class Opaque:
    pass


@pytest.mark.parametrize(
    ("result", "crop", "message"),
    [
        (lambda x: x.add_(1), ("n",), "the model writes to its input `x`, which is padded"),
        (lambda x: (x, Opaque()), ("n",), "returns a test_padded_calls.Opaque at `[1]`, which cannot be cropped"),
        (lambda x: x, {"['y']": ["n"]}, "the manifest crops the output `['y']`; the model's outputs are ''"),
        (
            lambda x: x.flatten(0, 1),
            ("n", "seq"),
            "axis 0 of output 0 depends on `seq` in a way that cannot be cropped",
        ),
    ],
)
def test_what_cannot_be_cropped_is_refused(result: Any, crop: Any, message: str) -> None:
    with pytest.raises(BuildError) as caught:
        calls(Counting(result), {"x": X}, crop=crop)
    assert message in caught.value.message and caught.value.hint
