"""Results that are caches of keys and values, or sizes of inputs: captured, and made again by what a record holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotc.compiler.capture.checks.captured_graph import run_graph
from aotc.compiler.capture.export import capture
from aotc.compiler.explain_failure import hint_for
from aotc.errors import BuildError, CorruptError
from aotc.records import Parameter, ResultContainer, Signature, TensorLeaf, Variant
from aotc.runtime.conversions.result_containers import maker
from aotc.runtime.variant import make_assembler
from aotc.tensors.caches import register_caches
from aotc.tensors.contents import contents, same_values

RANGE = {"x": {1: torch.export.Dim("seq", min=8, max=32)}}
SIGNATURE = Signature((Parameter("x", 0, "either"),), (TensorLeaf("x", "float32", (2, "seq", 8)),))


class Caching(nn.Module):
    """Two layers of keys and values of what it is given, in the cache that `make` makes."""

    def __init__(self, make: Any, finish: Any = lambda cache: cache) -> None:
        super().__init__()
        self.make, self.finish = make, finish

    def forward(self, x: Tensor) -> Any:
        cache = self.make()
        for index in range(2):
            cache.update(x[:, None] + index, x[:, None] * 2, index)
        return {"cache": self.finish(cache), "sum": x.sum()}


def result_of(module: nn.Module, x: Tensor, *, plain: bool = False) -> Any:
    """What a loaded artifact gives for `x`, captured at another size."""
    captured = capture(module, SIGNATURE, [torch.randn(2, 10, 8)], RANGE, frozen=False)
    variant = Variant({}, "", (), captured.arguments, captured.outputs, captured.output_tree)
    assemble = make_assembler(variant, {name: index for index, name in enumerate(captured.state)}, plain=plain)
    raw, other_size = run_graph(captured, [x], {})
    assert not other_size
    return assemble(list(raw), [x], [])


def assert_equal(actual: Any, expected: Any) -> None:
    actual, expected = contents(actual), contents(expected)
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        same = torch.equal(actual[path], value) if isinstance(value, Tensor) else same_values(actual[path], value)
        assert same, path


@pytest.fixture
def library() -> Any:
    """transformers' module of caches, whose classes torch can take apart."""
    caches = pytest.importorskip("transformers.cache_utils")
    register_caches(nn.Module())
    return caches


@pytest.mark.parametrize("kind", ["dynamic", "layered", "static", "encoder-decoder"])
def test_a_cache_is_what_eager_gives_at_every_size(library: Any, kind: str) -> None:
    layers = [library.DynamicLayer, lambda: library.DynamicSlidingWindowLayer(sliding_window=6)]

    def make() -> Any:
        if kind == "static":
            return library.Cache(layers=[library.StaticLayer(max_cache_len=40) for _ in range(2)])
        return library.Cache(layers=[each() for each in layers]) if kind == "layered" else library.DynamicCache()

    def finish(cache: Any) -> Any:
        return library.EncoderDecoderCache(cache, library.DynamicCache()) if kind == "encoder-decoder" else cache

    module, x = Caching(make, finish), torch.randn(2, 17, 8)
    actual, expected = result_of(module, x), module(x)
    assert_equal(actual, expected)
    assert actual["cache"].get_seq_length() == 17
    for cache in (actual["cache"], expected["cache"]):  # it works on, as the library's own does
        getattr(cache, "self_attention_cache", cache).update(x[:, None, :3], x[:, None, :3], 1)
    assert_equal(actual, expected)


def test_a_cache_is_a_dict_where_its_class_is_not_imported(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotc.runtime.conversions.result_containers.find_cache", lambda name: None)
    x = torch.randn(2, 9, 8)
    monkeypatch.setattr("aotc.runtime.conversions.result_containers.pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE", {})
    cache = result_of(Caching(library.DynamicCache), x, plain=True)["cache"]
    assert torch.equal(cache["layers"][1]["keys"], x[:, None] + 1)


def test_a_cache_with_a_stream_fails_at_export_with_what_to_do(library: Any) -> None:
    class Offloaded(library.DynamicCache):
        def __init__(self) -> None:
            super().__init__()
            self.prefetch_stream = object()

    Offloaded.__module__ = "transformers.cache_utils"
    register_caches(nn.Module())
    with pytest.raises(TypeError, match="whose `prefetch_stream` is a object") as caught:
        result_of(Caching(Offloaded), torch.randn(2, 9, 8))
    assert "without offloading" in hint_for(str(caught.value))


@pytest.mark.parametrize("name", ["subprocess.Popen", "torch.nn.Linear", "builtins.dict", "transformers.Pipeline"])
def test_a_record_cannot_have_another_class_made(name: str) -> None:
    with pytest.raises(CorruptError, match="output structure"):
        maker(ResultContainer(f"cache:{name}", (), (), [[], []]), plain=False)


class Sized(nn.Module):
    def __init__(self, number: Any) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Any:
        return x * 2, self.number(x), 3


def test_the_size_of_an_input_is_a_result() -> None:
    doubled, size, constant = result_of(Sized(lambda x: x.shape[1]), torch.ones(2, 9, 8))
    assert (doubled.shape[1], size, constant) == (9, 9, 3)


def test_another_number_fails_at_export_with_what_to_do() -> None:
    with pytest.raises(BuildError, match="computed from the inputs' sizes") as caught:
        result_of(Sized(lambda x: 2 * x.shape[1]), torch.ones(2, 9, 8))
    assert "torch.tensor" in caught.value.hint
    with pytest.raises(BuildError, match=r"computed from values \(`\.item\(\)`\)") as caught:
        result_of(Sized(lambda x: x.sum().item()), torch.ones(2, 9, 8))
    assert "return the tensor" in caught.value.hint
