"""The calling convention of a forward is read alike from a manifest, from a call to a region, and by `aotc init`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotc.call_table.bind import make_binder
from aotc.errors import BuildError, ManifestError
from aotc.manifest.types import ModelSpec
from aotc.models.calls import arguments_of
from aotc.models.regions import read_call
from aotc.models.signature import make_signature
from aotc.records import Parameter
from aotc.tools.recording.seen_calls import bound_arguments


def positions(self: Any, x: Tensor, /, y: Tensor, scale: float = 2.0) -> Tensor:
    return x + y * scale


def left_out(self: Any, x: Tensor, state: Any = object, y: Tensor | None = None, *, flip: bool = False) -> Tensor:
    return x if y is None else x + y


def extras(self: Any, x: Tensor, **more: Tensor) -> Tensor:
    return x + sum(more.values())


def variadic(self: Any, *tensors: Tensor) -> Tensor:
    return sum(tensors)  # type: ignore[return-value]


def module_of(forward: Callable[..., Tensor]) -> nn.Module:
    return type("Model", (nn.Module,), {"forward": forward})()


X = torch.zeros(2)
FORMS: dict[Callable[..., Tensor], tuple[list[Any], dict[str, Any], list[tuple[str, str]]]] = {
    positions: ([X, X], {}, [("x", "positional"), ("y", "either"), ("scale", "either")]),
    # What comes behind a parameter that no record can hold has no position any more.
    left_out: ([X], {"y": X}, [("x", "either"), ("y", "keyword"), ("flip", "keyword")]),
    extras: ([X], {"a": X, "b": X}, [("x", "either"), ("a", "extra"), ("b", "extra")]),
}


def passed(parameters: tuple[Parameter, ...]) -> list[tuple[str, str]]:
    return [(parameter.name, parameter.kind) for parameter in parameters]


def writing(self: Any, x: Tensor, use_cache: bool | None = None) -> Tensor:
    return x


def test_a_call_may_leave_out_that_it_wants_no_cache() -> None:
    def optional(value: Any) -> list[bool]:
        spec = ModelSpec("model", "m:f", {"x": {"shape": [2]}, "use_cache": value}, ({},))
        return [parameter.optional for parameter in make_signature(spec, module_of(writing)).parameters]

    assert (optional(False), optional(True), optional(None)) == ([False, True], [False, False], [False, False])


def test_a_call_of_a_library_model_may_say_what_its_configuration_says() -> None:
    """`generate` of transformers gives an encoder `return_dict=True`, `output_attentions=False` and so on."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=9, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2)
    signature = make_signature(
        ModelSpec("model", "m:f", {"input_ids": {"shape": [1, 4], "dtype": "int64"}}, ({},)),
        transformers.T5EncoderModel(config),
    )
    bind, ids = make_binder(signature), torch.zeros(1, 4)
    said = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
    assert bind((ids,), {}) == bind((ids,), said) == bind((), {**said, "input_ids": ids})
    assert bind((ids,), {"return_dict": False}) != bind((ids,), {})
    assert arguments_of(signature, bind((ids,), {})) == ((ids,), {})


@pytest.mark.parametrize("forward", FORMS)
def test_three_readers_agree(forward: Callable[..., Tensor]) -> None:
    args, kwargs, expected = FORMS[forward]
    module = module_of(forward)
    call = read_call("part", module.forward, args, kwargs)
    inputs = bound_arguments(module, args, kwargs)
    spec = ModelSpec("model", "m:f", {name: {"shape": [2]} for name in inputs}, ({},))
    signature = make_signature(spec, module)
    assert passed(signature.parameters) == passed(call.parameters) == expected
    assert [leaf.path for leaf in signature.leaves] == [*call.paths]
    assert {*inputs} == {"x", *kwargs} | ({"y"} if forward is positions else set())


def test_a_call_without_names_is_refused_by_who_reads_it() -> None:
    module = module_of(variadic)
    with pytest.raises(BuildError, match="arguments that have no name as `\\*tensors`"):
        read_call("part", module.forward, [X], {})
    with pytest.raises(ManifestError, match="passes `\\*tensors`"):
        bound_arguments(module, [X], {})


def test_an_input_may_be_called_as_the_mapping_of_extras_is() -> None:
    spec = ModelSpec("model", "m:f", {name: {"shape": [2]} for name in ("more", "x")}, ({},))
    assert passed(make_signature(spec, module_of(extras)).parameters) == [("x", "either"), ("more", "extra")]


def dropping(decorated: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(decorated)
    def wrapper(self: Any, ids: Tensor, position: Tensor | None = None, **more: Tensor) -> Tensor:
        return decorated(self, ids, more.get("mask"), position)

    return wrapper


def passing(decorated: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(decorated)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return decorated(self, *args, **kwargs)

    return wrapper


def decode(self: Any, ids: Tensor, mask: Tensor | None = None, position: Tensor | None = None) -> Tensor:
    return ids if position is None else ids + position


@pytest.mark.parametrize(
    ("forward", "second"),
    [
        (decode, "mask"),
        (passing(decode), "mask"),
        (dropping(decode), "position"),
        (passing(dropping(passing(decode))), "position"),
    ],
)
def test_an_argument_has_the_place_that_the_outermost_wrapper_gives_it(
    forward: Callable[..., Tensor], second: str
) -> None:
    module = module_of(forward)
    assert {*bound_arguments(module, [X, X + 1], {})} == {"ids", second}
    spec = ModelSpec("model", "m:f", {name: {"shape": [2]} for name in ("ids", "position")}, ({},))
    bind = make_binder(signature := make_signature(spec, module))
    leaves = dict(zip((leaf.path for leaf in signature.leaves), bind((X, X + 1), {}), strict=True))
    assert leaves[second].equal(X + 1)
    args, kwargs = arguments_of(signature, bind((X,), {"position": X + 1}))
    assert torch.equal(module(*args, **kwargs), module(X, position=X + 1))
