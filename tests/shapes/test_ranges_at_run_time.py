"""Ranges and padding on compiled models against eager: at the sizes that tend to be special, and at drawn ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import aotc

drawn = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("seq", [1, 2, 7, 8, 9, 127, 128, 511, 512])
def test_one_variant_of_a_transformer_takes_lengths_1_to_512(zoo: Any, zoo_store: Path, seq: int) -> None:
    module = zoo.Block().eval()
    compiled = aotc.load(f"{zoo_store}#ranged", module)
    assert compiled.buckets == ["seq=1..512"]
    x = torch.randn(1, seq, 32)
    assert torch.allclose(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert compiled.explain(x).kind == "range"


@pytest.mark.parametrize("batch", [1, 2, 15, 16])
def test_a_convolution_takes_every_size_of_a_range_that_is_tuned_at_its_end(
    zoo: Any, zoo_store: Path, batch: int
) -> None:
    """torch has other code for 16 images and more: by the question whether, no other size was left."""
    import shape_models

    module = shape_models.Convolution().eval()
    compiled = aotc.load(f"{zoo_store}#convolution", module)
    x = torch.randn(batch, 3, 8, 8)
    assert torch.allclose(compiled(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("height", [5, 8, 13, 20])
def test_adaptive_pooling_takes_images_of_every_height(zoo: Any, zoo_store: Path, height: int) -> None:
    """Their windows are wider in higher images; Inductor has them as wide as in those that are tuned at."""
    import shape_models

    compiled = _once(f"{zoo_store}#pooling", shape_models.Pooling().eval())
    x = torch.randn(2, 3, height, 9)
    torch.testing.assert_close(compiled(x), shape_models.Pooling()(x))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 1), (1, 2), (2, 37), (3, 300)])
def test_recurrent_layers_run_torchs_kernels_over_any_length(
    zoo: Any, zoo_store: Path, batch: int, length: int
) -> None:
    """Bit for bit, on the module's own weights: compiled code calls the operators that eager calls."""
    import shape_models

    module = shape_models.Recurrent().eval()
    compiled = aotc.load(f"{zoo_store}#recurrent", module)
    x, state = torch.randn(batch, length, 6), torch.randn(4, batch, 8)
    torch.testing.assert_close(compiled(x, state), module(x, state), rtol=0, atol=0)
    module.second.weight_hh_l0.data.mul_(2)
    torch.testing.assert_close(compiled(x, state), module(x, state), rtol=0, atol=0)


@pytest.mark.parametrize("seq", [0, 513, 10_000])
def test_it_refuses_what_lies_outside_with_both_values(zoo: Any, zoo_store: Path, seq: int) -> None:
    compiled = aotc.load(f"{zoo_store}#ranged", zoo.Block().eval())
    with pytest.raises(aotc.MissError) as caught:
        compiled(torch.randn(1, seq, 32))
    assert f"seq is {seq}, the bucket takes 1..512" in str(caught.value)
    assert "hint: add a bucket to the manifest" in str(caught.value)


@drawn
@given(seq=st.integers(-1, 80), twice=st.integers(-2, 2))
def test_a_range_with_a_multiple_and_a_derived_size(zoo: Any, zoo_store: Path, seq: int, twice: int) -> None:
    """`x: [2, seq]`, `twice: [2, 2*seq]`, seq 8 to 64 in steps of 8: all else is a miss, and the rest is as eager."""
    module = zoo.Derived().eval()
    compiled = _once(f"{zoo_store}#derived", module)
    sizes = max(seq, 0), max(2 * seq + twice, 0)
    x, other = torch.randn(2, sizes[0]), torch.randn(2, sizes[1])
    fits = 8 <= sizes[0] <= 64 and sizes[0] % 8 == 0 and sizes[1] == 2 * sizes[0]
    if fits:
        assert torch.allclose(compiled(x, other), module(x, other), rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(aotc.MissError):
            compiled(x, other)
    assert (compiled.explain(x, other).kind == "range") is fits


@drawn
@given(first=st.integers(0, 10), second=st.integers(1, 71), more=st.sampled_from([0, 0, 1, -1]))
def test_a_size_that_is_the_sum_of_two_dims(zoo: Any, zoo_store: Path, first: int, second: int, more: int) -> None:
    """`x: [2, first]`, `y: [2, second]`, `mask: [2, first + second]`."""
    module = zoo.Joined().eval()
    compiled = _once(f"{zoo_store}#joined", module)
    given = torch.randn(2, first), torch.randn(2, second), torch.randn(2, max(first + second + more, 0))
    if 1 <= first <= 9 and 2 <= second <= 70 and more == 0:
        assert torch.allclose(compiled(*given), module(*given), rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(aotc.MissError):
            compiled(*given)


@drawn
@given(seq=st.integers(0, 600))
def test_any_length_of_a_range_is_as_eager_and_any_other_a_miss(zoo: Any, zoo_store: Path, seq: int) -> None:
    torch.manual_seed(seq)
    compiled = _once(f"{zoo_store}#ranged", zoo.Block().eval())
    x = torch.randn(1, seq, 32)
    if 1 <= seq <= 512:
        assert torch.allclose(compiled(x), compiled.module(x), rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(aotc.MissError):
            compiled(x)


@drawn
@given(batch=st.integers(0, 6), seq=st.integers(1, 18), data=st.data())
def test_any_request_that_pads_into_the_bucket_is_as_eager_on_the_unpadded_input(
    zoo: Any, zoo_store: Path, batch: int, seq: int, data: st.DataObject
) -> None:
    compiled = _once(f"{zoo_store}#pooled", zoo.Pooled().eval())
    torch.manual_seed(batch * 100 + seq)
    ids = torch.randint(0, 32, (batch, seq))
    mask = _mask(batch, seq, data)
    if batch > 4 or seq > 16:
        with pytest.raises(aotc.MissError):
            compiled(ids, mask)
        return
    explanation = compiled.explain(ids, mask)
    assert explanation.kind == ("exact" if (batch, seq) == (4, 16) else "padded")
    for got, want in zip(compiled(ids, mask), compiled.module(ids, mask), strict=True):
        assert got.shape == want.shape
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)


@drawn
@given(batch=st.integers(0, 5), seq=st.integers(1, 34), data=st.data())
def test_any_request_that_pads_into_a_range_is_as_eager_on_the_unpadded_input(
    zoo: Any, zoo_store: Path, batch: int, seq: int, data: st.DataObject
) -> None:
    compiled = _once(f"{zoo_store}#stepped", zoo.Pooled().eval())
    torch.manual_seed(batch * 100 + seq)
    ids = torch.randint(0, 32, (batch, seq))
    mask = _mask(batch, seq, data)
    if batch > 4 or seq > 32:
        with pytest.raises(aotc.MissError):
            compiled(ids, mask)
        return
    assert compiled.explain(ids, mask).kind == ("range" if batch == 4 and seq % 8 == 0 else "padded")
    for got, want in zip(compiled(ids, mask), compiled.module(ids, mask), strict=True):
        assert got.shape == want.shape
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def _mask(batch: int, seq: int, data: st.DataObject) -> Tensor:
    """Rows whose real part is a prefix of any length but zero, as a tokenizer gives it."""
    lengths = data.draw(st.lists(st.integers(1, seq), min_size=batch, max_size=batch))
    return torch.arange(seq)[None, :] < torch.tensor(lengths, dtype=torch.int64)[:, None]


_loaded: dict[str, Any] = {}


def _once(ref: str, module: Any) -> Any:
    """hypothesis calls a test many times: one load serves all of them."""
    if ref not in _loaded:
        _loaded[ref] = aotc.load(ref, module)
    return _loaded[ref]
