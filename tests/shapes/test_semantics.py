"""What people trip on, each against eager on a compiled model: what is written to, given back, random, empty or odd."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

import aotc

Loaded = tuple[aotc.Compiled, Any]


@pytest.fixture
def load(zoo: Any, zoo_store: Path) -> Any:
    """A compiled model, and an eager one with equal weights of its own."""
    import shape_models

    def load(name: str, model: str, **kwargs: Any) -> Loaded:
        torch.manual_seed(1)
        module = getattr(zoo if hasattr(zoo, model) else shape_models, model)().eval()
        return aotc.load(f"{zoo_store}#{name}", module, **kwargs), copy.deepcopy(module)

    return load


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def semantics_inputs() -> dict[str, Any]:
    return {"batch": {"x": torch.randn(2, 4), "flags": torch.tensor([True, False])}, "state": torch.arange(3)}


# -- inputs that the model writes to ----------------------------------------------------------------------------------


def test_an_input_that_is_mutated_is_mutated_for_the_caller(load: Any) -> None:
    compiled, _ = load("semantics", "Semantics")
    inputs = semantics_inputs()
    compiled(**inputs)
    compiled(**inputs)
    assert inputs["state"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("rows", [0, 1, 3, 4])
@pytest.mark.parametrize("contiguous", [True, False])
def test_it_is_mutated_through_padding_and_through_a_copy_into_the_compiled_layout(
    load: Any, rows: int, contiguous: bool
) -> None:
    compiled, eager = load("accumulating", "Accumulating")

    def make() -> Tensor:
        return torch.randn(rows, 6) if contiguous else torch.randn(6, rows).t()

    total, x = make(), make()
    expected_total = total.clone()
    result, expected = compiled(total, x), eager(expected_total, x)
    assert torch.equal(total, expected_total)
    assert result["total"] is total, "an output that is an input is the caller's own tensor"
    for name in expected:
        assert result[name].shape == expected[name].shape
        assert torch.equal(result[name], expected[name])


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_an_inference_tensor_is_mutated_too_in_any_mode(load: Any, rows: int, mode: Any) -> None:
    """Through padding and without."""
    compiled, _ = load("accumulating", "Accumulating")
    with torch.inference_mode():
        total = torch.ones(rows, 6)
    with mode():
        assert compiled(total, torch.ones(rows, 6))["total"] is total
    assert torch.equal(total, torch.full((rows, 6), 2.0))


def test_only_the_callers_part_of_a_larger_tensor_is_written(load: Any) -> None:
    """A narrow view of a buffer is padded to the bucket; what lies behind it in the buffer is not touched."""
    compiled, _ = load("accumulating", "Accumulating")
    buffer = torch.zeros(8, 6)
    compiled(buffer[:3], torch.ones(3, 6))
    assert buffer.sum(1).tolist() == [6.0, 6.0, 6.0, 0, 0, 0, 0, 0]


def test_an_input_that_shares_memory_with_a_mutated_one_is_refused(load: Any) -> None:
    """Eager would add a tensor to itself; the compiled code was made for two."""
    compiled, _ = load("accumulating", "Accumulating")
    x = torch.randn(4, 6)
    with pytest.raises(aotc.MissError, match="shares memory with `total`"):
        compiled(x, x)


# -- outputs that are inputs, views, constants, None ------------------------------------------------------------------


def test_outputs_have_the_models_own_structure_identities_and_constants(load: Any) -> None:
    compiled, eager = load("semantics", "Semantics")
    inputs = semantics_inputs()
    result, expected = compiled(**inputs), eager(**copy.deepcopy(inputs))
    assert list(result) == list(expected)
    assert result["same"] is inputs["batch"]["x"]
    assert (result["nothing"], result["name"], result["number"]) == (None, "semantics", 7)
    assert type(result["halves"]) is tuple and type(result["flags"]) is list
    assert torch.allclose(result["y"], expected["y"])
    assert [half.dtype for half in result["halves"]] == [torch.bfloat16, torch.float16]
    assert result["flags"][0].tolist() == [False, True] and result["flags"][1].dtype is torch.int64
    assert result["flags"][1].dim() == 0 and result["flags"][1].item() == 1


def test_an_output_that_is_a_view_of_an_input_shares_its_memory(load: Any) -> None:
    """As in eager: written to later, both change; also where the code ran with a padded copy of the input."""
    compiled, _ = load("semantics", "Semantics")
    inputs = semantics_inputs()
    view = compiled(**inputs)["view"]
    inputs["batch"]["x"].fill_(5)
    assert view.tolist() == [5.0] * 8
    compiled, _ = load("accumulating", "Accumulating")
    total, x = torch.zeros(4, 6), torch.ones(4, 6)
    assert compiled(total, x)["first"].data_ptr() == x.data_ptr()
    assert compiled(total[:3], x[:3])["first"].data_ptr() == x.data_ptr()


def test_outputs_of_two_calls_do_not_share_memory(load: Any) -> None:
    compiled, eager = load("ranged", "Block")
    inputs = [torch.randn(1, 8, 32) for _ in range(3)]
    results = [compiled(x) for x in inputs]
    assert all(torch.allclose(result, eager(x), atol=1e-5) for result, x in zip(results, inputs, strict=True))


# -- buffers ----------------------------------------------------------------------------------------------------------


def test_a_counter_counts_in_the_modules_own_buffer(load: Any) -> None:
    compiled, _ = load("semantics", "Semantics")
    counts = [compiled(**semantics_inputs())["calls"] for _ in range(3)]
    assert [int(count) for count in counts] == [1, 2, 3]
    assert int(compiled.module.calls) == 3


def test_a_cache_is_written_at_a_position_step_by_step(load: Any) -> None:
    """A KV cache: the buffer is the module's own, the position a 0-d tensor; eager may go on from there."""
    compiled, eager = load("cache", "KeyValueCache")
    module, position, expected_position = compiled.module, torch.tensor(0), torch.tensor(0)
    for step in range(4):
        x = torch.randn(1, 4)
        result, position, keys = compiled(x, position)
        expected, expected_position, _ = eager(x, expected_position)
        assert torch.allclose(result, expected, atol=1e-6)
        assert keys is module.keys, "an output that is a buffer is that very buffer"
        assert position.dim() == 0 and int(position) == int(expected_position) == step + 1
    assert torch.allclose(module.keys, eager.keys, atol=1e-6) and int(module.steps) == 4
    x = torch.randn(1, 4)
    assert torch.allclose(module(x, position)[0], eager(x, expected_position)[0], atol=1e-6)


def test_old_values_that_are_kept_elsewhere_are_those_before_the_call(load: Any) -> None:
    """Of a buffer in two others, one of which takes a part, and of two inputs that change places."""
    compiled, eager = load("history", "History")
    for _ in range(3):
        x, *pair = (torch.randn(4) for _ in range(3))
        others = [tensor.clone() for tensor in pair]
        assert torch.equal(compiled(x, *pair), eager(x, *others))
        assert all(map(torch.equal, pair, others))
        assert all(map(torch.equal, compiled.module.buffers(), eager.buffers()))


def test_what_was_assigned_over_is_what_it_was(load: Any) -> None:
    """In an output, in a view of it, and in another buffer."""
    compiled, eager = load("assigned", "Assigned")
    for _ in range(3):
        x = torch.randn(4)
        assert all(map(torch.equal, compiled(x), eager(x)))
        assert all(map(torch.equal, compiled.module.buffers(), eager.buffers()))


@pytest.mark.parametrize("times", [0, 1, 3])
def test_what_a_loop_returns_is_its_own(load: Any, times: int) -> None:
    """Also without an iteration: memory that nothing else writes to, no weight, and no other result."""
    compiled, eager = load("looping", "Looping")
    inputs = torch.randn(4, 4), torch.tensor(times)
    outputs = compiled(*inputs)
    assert all(map(torch.allclose, outputs, eager(*inputs)))
    assert len({tensor.data_ptr() for tensor in (*outputs, compiled.module.step)}) == 4


def test_loading_and_explaining_run_nothing(load: Any) -> None:
    compiled, _ = load("cache", "KeyValueCache")
    compiled.explain(torch.randn(1, 4), torch.tensor(3))
    assert int(compiled.module.steps) == 0 and not compiled.module.keys.any()


def test_a_buffer_that_is_replaced_is_the_one_that_is_written(load: Any) -> None:
    compiled, _ = load("cache", "KeyValueCache")
    old = compiled.module.keys
    compiled.module.keys = torch.zeros(16, 4)
    compiled(torch.randn(1, 4), torch.tensor(2))
    assert compiled.module.keys[2].any() and not old.any()


# -- sizes of zero, 0-d tensors, dtypes -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 2, 63, 64])
def test_a_range_from_zero_takes_an_empty_batch(load: Any, rows: int) -> None:
    compiled, _ = load("noisy", "Noisy")
    x = torch.randn(rows, 4)
    noised, doubled, _ = compiled(x)
    assert noised.shape == doubled.shape == (rows, 4)
    assert torch.equal(doubled, x * 2)


def test_an_empty_batch_is_padded_into_a_bucket(load: Any) -> None:
    compiled, _ = load("pooled", "Pooled")
    tokens, pooled = compiled(torch.zeros(0, 5, dtype=torch.int64), torch.ones(0, 5, dtype=torch.bool))
    assert tokens.shape == (0, 5, 8) and pooled.shape == (0, 8)


def test_an_empty_batch_that_no_bucket_takes_is_a_miss(load: Any) -> None:
    compiled, _ = load("ranged", "Block")
    with pytest.raises(aotc.MissError, match=r"seq is 0, the bucket takes 1\.\.512"):
        compiled(torch.zeros(1, 0, 32))


def mixed_inputs(a: int, b: int) -> dict[str, Tensor]:
    return {
        "signal": torch.randn(a, 4, dtype=torch.complex64),
        "half": torch.randn(a, 4).to(torch.float16),
        "brain": torch.randn(b, 4).to(torch.bfloat16),
        "flags": torch.rand(b) > 0.5,
        "ids": torch.randint(0, 8, (b,)),
    }


@pytest.mark.parametrize(("a", "b"), [(1, 1), (8, 8), (2, 31), (32, 8)])
def test_bool_int64_fp16_bf16_and_complex(load: Any, a: int, b: int) -> None:
    compiled, eager = load("mixed", "Mixed")
    inputs = mixed_inputs(a, b)
    result, expected = compiled(**inputs), eager(**inputs)
    for name, want in expected.items():
        got = result[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        exact = want.dtype in (torch.bool, torch.int64)
        assert torch.equal(got, want) if exact else torch.allclose(got, want, rtol=2e-2, atol=2e-2), name


def test_a_condition_that_export_found_is_a_guard_on_every_call(load: Any) -> None:
    """The ranges allow 32 and 32; the code holds for sizes up to 40 together, and says so in the manifest's names."""
    compiled, eager = load("mixed", "Mixed")
    assert compiled.artifact.variants[0].conditions == ("b + a <= 40",)
    inputs = mixed_inputs(8, 32)
    assert torch.equal(compiled(**inputs)["joined"], eager(**inputs)["joined"])
    with pytest.raises(aotc.MissError, match=r"the compiled code needs b \+ a <= 40"):
        compiled(**mixed_inputs(9, 32))
    issue = compiled.explain(**mixed_inputs(9, 32)).rejected["a=1..32,b=1..32"][0]
    assert (issue.expected, issue.actual) == ("b + a <= 40", "{'a': 9, 'b': 32}")


# -- random operators -------------------------------------------------------------------------------------------------


def test_random_operators_follow_torchs_seed_and_never_repeat_without_it(load: Any) -> None:
    """Promised: the generator of torch decides, so the same seed gives the same numbers and the next call others."""
    compiled, _ = load("noisy", "Noisy")
    x = torch.randn(8, 4)
    torch.manual_seed(7)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(7)
    again = compiled(x)
    assert torch.equal(first[0], again[0]) and torch.equal(first[2], again[2])
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[2], second[2])


def test_random_numbers_have_eagers_distribution_and_not_its_values(load: Any) -> None:
    """Not promised: that a seed gives the numbers that eager would have drawn. Inductor's generator is another."""
    compiled, eager = load("noisy", "Noisy")
    x = torch.zeros(64, 4)
    torch.manual_seed(7)
    noise, _, thousand = compiled(x)
    torch.manual_seed(7)
    assert not torch.equal(thousand, eager(x)[2])
    assert noise.min() >= 0 and noise.max() < 1 and 0.4 < thousand.mean() < 0.6


@pytest.mark.parametrize("where", ["an operator of torch's", "fused code"])
def test_a_library_s_error_says_what_was_raised(load: Any, where: str) -> None:
    compiled, eager = load("bag", "Bag")
    good = bags, ids = torch.zeros(2, 3).long(), torch.zeros(2).long()
    bad = (bags, ids + 9) if where == "fused code" else (bags + 9, ids)
    reason = {
        "fused code": "index out of bounds: 0 <= ",
        # torch has two loops for it, which say it in two ways
        "an operator of torch's": "(Index 0 of input takes value 9 which is not in|Expected i < index_size)",
    }[where]
    with pytest.raises((RuntimeError, IndexError)):
        eager(*bad)
    if TorchVersion(torch.__version__) < (2, 13):
        reason = "it wrote its reason to standard error"
    for _ in range(2):
        with pytest.raises(aotc.LibraryError, match=f"the library failed: {reason}"):
            compiled(*bad)
        assert torch.allclose(compiled(*good), eager(*good), atol=1e-6)


def test_dropout_in_eval_is_the_identity(load: Any) -> None:
    compiled, _ = load("noisy", "Noisy")
    x = torch.randn(8, 4)
    assert torch.equal(compiled(x)[1], x * 2)


# -- gradients and modes ----------------------------------------------------------------------------------------------


def test_an_input_that_requires_a_gradient_is_refused_while_gradients_are_on(load: Any) -> None:
    compiled, eager = load("linear", "Linear")
    x = torch.randn(2, 8, requires_grad=True)
    with torch.enable_grad(), pytest.raises(aotc.MissError, match="requires a gradient") as caught:
        compiled(x)
    assert "torch.no_grad()" in str(caught.value)
    assert torch.allclose(compiled(x), eager(x), atol=1e-6), "under no_grad it runs"
    with torch.inference_mode():
        assert torch.allclose(compiled(x), eager(x), atol=1e-6)


def test_weights_that_require_gradients_are_fine_and_outputs_never_do(load: Any) -> None:
    """This is inference: a call with gradients on runs if no input asks for one, and its result has none."""
    compiled, _ = load("linear", "Linear")
    with torch.enable_grad():
        assert not compiled(torch.randn(2, 8)).requires_grad


def test_inference_tensors_in_and_out(load: Any) -> None:
    compiled, eager = load("linear", "Linear")
    with torch.inference_mode():
        x = torch.randn(2, 8)
    assert torch.allclose(compiled(x), eager(x), atol=1e-6)


def test_an_artifact_built_under_autocast_refuses_a_call_without_and_the_reverse(load: Any) -> None:
    """The state at the call counts, after a load from the store too: code cannot follow it."""
    under, eager = load("autocast", "Linear")
    without, _ = load("linear", "Linear")
    x = torch.randn(2, 8)
    with pytest.raises(aotc.MissError, match="built with autocast bfloat16, it is off now"):
        under(x)
    with torch.autocast("cpu", torch.bfloat16):
        result, expected = under(x), eager(x)
        assert result.dtype == expected.dtype == torch.bfloat16
        assert torch.allclose(result, expected, atol=2e-2)
        with pytest.raises(aotc.MissError, match="built with autocast off, it is bfloat16 now"):
            without(x)
    with torch.autocast("cpu", torch.float16), pytest.raises(aotc.MissError, match="it is float16 now"):
        under(x)


# -- arguments --------------------------------------------------------------------------------------------------------


def test_defaults_keywords_and_nesting_in_any_order_that_python_accepts(load: Any) -> None:
    compiled, eager = load("semantics", "Semantics")
    inputs = semantics_inputs()
    batch, state = inputs["batch"], inputs["state"]
    expected = eager(copy.deepcopy(batch), state.clone())["y"]
    swapped = {"flags": batch["flags"], "x": batch["x"]}
    calls = (
        lambda: compiled(batch, state),
        lambda: compiled(batch, state, 2.0),
        lambda: compiled(batch, state, scale=2.0, flip=False),
        lambda: compiled(state=state, flip=False, batch=batch),
        lambda: compiled(swapped, state=state),
    )
    for call in calls:
        assert torch.allclose(call()["y"], expected)


@pytest.mark.parametrize(
    ("argument", "shown"), [({"scale": 3.0}, "built for 2.0"), ({"flip": True}, "built for False")]
)
def test_a_constant_of_another_value_is_a_miss_with_both_values(load: Any, argument: Any, shown: str) -> None:
    compiled, _ = load("semantics", "Semantics")
    with pytest.raises(aotc.MissError, match=shown):
        compiled(**semantics_inputs(), **argument)


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: inputs.pop("state"),
        lambda inputs: inputs.update(other=1),
    ],
)
def test_arguments_that_do_not_bind_are_pythons_own_type_error(load: Any, change: Any) -> None:
    compiled, _ = load("semantics", "Semantics")
    inputs = semantics_inputs()
    change(inputs)
    with pytest.raises(TypeError, match="argument"):
        compiled(**inputs)


def test_a_mapping_without_its_keys_is_a_miss_that_names_it(load: Any) -> None:
    compiled, _ = load("semantics", "Semantics")
    inputs = semantics_inputs()
    inputs["batch"].pop("flags")
    with pytest.raises(aotc.MissError, match="`batch` must be a dict of"):
        compiled(**inputs)
