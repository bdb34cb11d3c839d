"""Each condition of a call, alone and together: what does not hold is a miss that names both values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
import pytest
import torch
from hand_built import ambient_now, attach_fakes, make_artifact, make_compiled, specs_of, tensor
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.dlpack import from_dlpack
from torch.utils.flop_counter import FlopCounterMode

from aotc.errors import BindError, Issue, LibraryError, MissError
from aotc.reads.modes import mode_readers
from aotc.records import Ambient, ConstantLeaf, Output, SizeRange
from aotc.runtime.checkpoints.checkpoint_files import open_weights


def miss(compiled: Any, *args: Any, **kwargs: Any) -> tuple[Issue, ...]:
    """The reasons of a call that must miss and must run nothing."""
    with pytest.raises(MissError) as caught:
        compiled(*args, **kwargs)
    assert not any(library.seen for library in compiled.libraries)
    explained = compiled.explain(*args, **kwargs)
    assert explained.kind == "miss"
    assert explained.reasons == caught.value.issues
    return caught.value.issues


def one(compiled: Any, *args: Any, **kwargs: Any) -> Issue:
    (issue,) = miss(compiled, *args, **kwargs)
    return issue


def plain(shape: tuple[int, ...] = (2, 3), **fields: Any) -> Any:
    names = {"ambient", "module", "make_contiguous", "mutated_leaves"}
    leaf = {name: value for name, value in fields.items() if name not in names}
    rest = {name: value for name, value in fields.items() if name in names}
    return make_compiled(lambda x: x, [tensor("x", *shape, **leaf)], **rest)


class Subclass(torch.Tensor):
    pass


# -- tensors ----------------------------------------------------------------------------------------------------------


def test_a_call_that_meets_every_guard_runs() -> None:
    compiled = plain()
    x = torch.ones(2, 3)
    assert compiled(x) is x
    assert compiled(nn.Parameter(x, requires_grad=False)) is not None
    assert compiled.explain(x).kind == "exact"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool])
def test_another_dtype(dtype: torch.dtype) -> None:
    issue = one(plain(), torch.ones(2, 3, dtype=dtype))
    assert (issue.where, issue.expected, issue.actual) == ("x", "float32", str(dtype).removeprefix("torch."))
    assert issue.hint


def test_another_device() -> None:
    issue = one(plain(), torch.ones(2, 3, device="meta"))
    assert (issue.where, issue.expected, issue.actual) == ("x", "cpu", "meta")


def test_another_shape() -> None:
    issue = one(plain(), torch.ones(2, 4))
    assert (issue.where, issue.expected, issue.actual) == ("x", "[2, 3]", "[2, 4]")


def test_another_number_of_axes() -> None:
    issue = one(plain(), torch.ones(6))
    assert (issue.where, issue.expected, issue.actual) == ("x", "[2, 3]", "[6]")


@pytest.mark.parametrize("x", [torch.ones(3, 2).t(), torch.ones(2, 6)[:, ::2], torch.ones(1, 3).expand(2, 3)])
def test_another_layout_than_contiguous(x: Tensor) -> None:
    issue = one(plain(), x)
    assert (issue.where, issue.expected, issue.actual) == ("x", "contiguous", str(list(x.stride())))
    assert "make_contiguous" in issue.hint


def test_channels_last_where_contiguous_was_compiled_and_the_reverse() -> None:
    x = torch.ones(2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    assert one(plain((2, 3, 4, 5)), last).expected == "contiguous"
    compiled = plain((2, 3, 4, 5), layout="channels_last")
    assert one(compiled, x).expected == "channels_last"
    assert compiled(last) is last


@pytest.mark.parametrize("copies", [False, True], ids=["refusing", "copying"])
def test_strides_of_axes_of_size_1_are_as_in_the_layout_for_the_library(copies: bool) -> None:
    """Convolutions look at them; the caller's tensor is what the library reads and writes all the same."""
    x = torch.zeros(2, 1, 3).as_strided((2, 1, 3), (3, 99, 1))
    compiled = plain((2, 1, 3), mutated_leaves=(0,), make_contiguous=copies)
    given = compiled(x)
    assert (x.stride(), given.stride()) == ((3, 99, 1), (3, 3, 1))
    given += 1
    assert bool((x == 1).all())
    assert compiled.stats().contiguous_copies == 0
    y = torch.zeros(2, 1, 3)
    assert compiled(y) is y


@pytest.mark.parametrize(
    "convert", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn], ids=["coo", "csr", "mkldnn"]
)
def test_a_tensor_that_is_not_dense(convert: Callable[[Tensor], Tensor]) -> None:
    x = convert(torch.eye(3))
    issue = one(plain((3, 3)), x)
    assert (issue.expected, issue.actual) == ("torch.strided", str(x.layout))
    assert one(plain((3, 3), make_contiguous=True), x).actual == str(x.layout)


def test_a_lazily_conjugated_or_negated_view_whose_memory_holds_other_values() -> None:
    z = torch.ones(2, dtype=torch.complex64) * 1j
    assert one(plain((2,), dtype="complex64"), z.conj()).actual == "lazily conjugated"
    imaginary = torch.ones(1, dtype=torch.complex64).conj().imag
    assert imaginary.is_contiguous()
    assert one(plain((1,)), imaginary).actual == "lazily negated"
    resolving = plain((2,), dtype="complex64", make_contiguous=True)
    resolving(z.conj())
    assert not resolving.libraries[0].seen[0][0].is_conj()


def test_an_input_that_requires_a_gradient_while_gradients_are_on() -> None:
    compiled, x = plain(), torch.ones(2, 3, requires_grad=True)
    issue = one(compiled, x)
    assert issue.where == "x"
    assert "gradient" in issue.message
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert compiled(x) is x


@pytest.mark.parametrize(
    ("value", "came"),
    [
        (torch.ones(2, 3).as_subclass(Subclass), "Subclass"),
        ([[1.0]], "a list of 1"),
        (3.0, "float 3.0"),
        (None, "None"),
        ("abc", "str 'abc'"),
    ],
    ids=["subclass", "list", "float", "none", "text"],
)
def test_something_else_than_a_plain_tensor(value: Any, came: str) -> None:
    issue = one(plain(), value)
    assert issue.where == "x"
    assert came in issue.message


def test_something_that_only_has_a_shape_is_no_tensor() -> None:
    class Shaped:
        shape = (2, 3)

    assert "Shaped" in one(plain(), Shaped()).message


# -- constants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "came"),
    [
        (True, 1),
        (1, True),
        (1, 1.0),
        (1.0, 1),
        (0.0, -0.0),
        (None, False),
        ("a", "b"),
        (2, 3),
        (2.0, 2.5),
        (2, torch.tensor(2)),
        ("a", b"a"),
        (None, torch.ones(2)),
    ],
)
def test_a_constant_of_another_value_or_type(built: Any, came: Any) -> None:
    compiled = make_compiled(lambda x: x, [tensor("x", 2), ConstantLeaf("flag", built)])
    x = torch.ones(2)
    assert compiled(x, built) is x
    with pytest.raises(MissError) as caught:
        compiled(x, came)
    (issue,) = caught.value.issues
    assert (issue.where, issue.expected) == ("flag", repr(built))
    assert type(came).__name__ in issue.actual or repr(came) in issue.actual
    if isinstance(came, torch.Tensor):  # no values: they are a request's
        assert issue.actual == f"Tensor of {str(came.dtype).removeprefix('torch.')} and shape {list(came.shape)}"


def test_a_tensor_in_the_place_of_an_optional_input_that_was_left_out_is_told_what_to_build() -> None:
    compiled = make_compiled(lambda x: x, [tensor("x", 2), ConstantLeaf("mask", None)])
    issue = one(compiled, torch.ones(2), torch.ones(2))
    assert (issue.where, issue.hint) == ("mask", "it was left out at build: name it in the manifest's `inputs`")


# -- modes of the process ---------------------------------------------------------------------------------------------


@contextmanager
def switched(setter: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(back)


def other_threads() -> AbstractContextManager[None]:
    now = torch.get_num_threads()
    return switched(torch.set_num_threads, now + 1, now)


MODES: dict[str, tuple[dict[str, Any], Callable[[], AbstractContextManager[Any]], str, str]] = {
    "autocast on": (
        {},
        lambda: torch.autocast("cpu", torch.bfloat16),
        "off",
        "bfloat16",
    ),
    "autocast to another dtype": (
        {"autocast": "bfloat16"},
        lambda: torch.autocast("cpu", torch.float16),
        "bfloat16",
        "float16",
    ),
    "default dtype": (
        {},
        lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
        "float32",
        "float64",
    ),
    "matmul precision": (
        {"float32_matmul_precision": "highest"},
        lambda: switched(torch.set_float32_matmul_precision, "high", "highest"),
        "highest",
        "high",
    ),
    "deterministic": (
        {},
        lambda: switched(torch.use_deterministic_algorithms, True, False),
        "False",
        "True",
    ),
}


@pytest.mark.parametrize("name", list(MODES))
def test_a_mode_of_the_process_that_is_not_the_builds(name: str) -> None:
    built, mode, expected, actual = MODES[name]
    compiled, x = plain(ambient=ambient_now(**built)), torch.ones(2, 3)
    with mode():
        issue = one(compiled, x)
    assert (issue.expected, issue.actual) == (expected, actual)
    assert issue.hint


def test_an_artifact_built_under_autocast_runs_under_it_and_not_without() -> None:
    compiled, x = plain(ambient=ambient_now(autocast="bfloat16")), torch.ones(2, 3)
    issue = one(compiled, x)
    assert (issue.expected, issue.actual) == ("bfloat16", "off")
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x) is x
        with (
            torch.autocast("cpu", enabled=False),
            pytest.raises(MissError, match=r"call under torch\.autocast\('cpu', dtype=torch\.bfloat16\)"),
        ):
            compiled(x)


def test_another_number_of_threads_matters_only_where_the_code_holds_it() -> None:
    threads = torch.get_num_threads()
    fixed, free, x = plain(ambient=ambient_now(num_threads=threads)), plain(), torch.ones(2, 3)
    with other_threads():
        issue = one(fixed, x)
        assert (issue.expected, issue.actual) == (str(threads), str(threads + 1))
        assert free(x) is x
    assert fixed(x) is x


def test_a_matmul_precision_that_torch_itself_cannot_name_is_a_miss_and_no_crash() -> None:
    """torch.get_float32_matmul_precision raises after torch.backends.….fp32_precision was set for one backend."""
    compiled, x = plain(ambient=ambient_now(float32_matmul_precision="highest")), torch.ones(2, 3)
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        assert one(compiled, x).actual == "mixed"
    finally:
        backend.fp32_precision = before


def test_the_modules_training_flag() -> None:
    module = nn.Identity().eval()
    compiled, x = plain(module=module), torch.ones(2, 3)
    assert compiled(x) is x
    compiled.libraries[0].seen.clear()
    module.train()
    issue = one(compiled, x)
    assert (issue.expected, issue.actual, issue.hint) == ("False", "True", "call module.eval()")


# -- aliasing ---------------------------------------------------------------------------------------------------------


def mutating(**fields: Any) -> Any:
    return make_compiled(lambda x, y: x.add_(1) + y, [tensor("x", 2), tensor("y", 2)], mutated_leaves=(0,), **fields)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x[:], lambda x: x.detach()])
def test_an_input_that_shares_memory_with_one_that_the_model_writes_to(make: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2)
    issue = one(mutating(), x, make(x))
    assert issue.where == "y"
    assert "`x`" in issue.message


def test_distinct_inputs_and_shared_ones_of_a_model_that_writes_to_none_are_fine() -> None:
    x = torch.ones(2)
    assert mutating()(torch.ones(2), x).tolist() == [3, 3]
    compiled = make_compiled(lambda x, y: x + y, [tensor("x", 2), tensor("y", 2)])
    assert compiled(x, x).tolist() == [2, 2]


def test_copying_into_the_compiled_layout_does_not_hide_that_inputs_share_memory() -> None:
    whole = torch.zeros(4)
    compiled = mutating(make_contiguous=True)
    with pytest.raises(MissError):
        compiled(whole[::2], whole[:2])


def with_numpy(memory: bytearray, first: int, end: int) -> Tensor:
    numpy = pytest.importorskip("numpy")
    return torch.from_numpy(numpy.frombuffer(memory, numpy.float32)[first:end])


def with_dlpack(memory: bytearray, first: int, end: int) -> Tensor:
    return from_dlpack(with_torch(memory, first, end))


def with_torch(memory: bytearray, first: int, end: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.float32, offset=4 * first, count=end - first)


@pytest.mark.parametrize("view", [with_numpy, with_dlpack, with_torch])
def test_tensors_over_one_buffer_of_others_share_memory_where_their_addresses_do(view: Any) -> None:
    """Each has a storage of its own."""
    memory = bytearray(4 * 8)
    issue = one(mutating(), view(memory, 0, 2), view(memory, 1, 3))
    assert (issue.where, "`x`" in issue.message) == ("y", True)
    assert mutating()(view(memory, 0, 2), view(memory, 2, 4)).tolist() == [1, 1]
    assert mutating()(view(memory, 6, 8), view(memory, 4, 6)).tolist() == [1, 1]


def test_disjoint_parts_of_one_tensor_are_distinct_inputs() -> None:
    whole = torch.zeros(4)
    assert mutating()(whole[:2], whole[2:]).tolist() == [1, 1]
    rows, columns = torch.zeros(2, 2), torch.zeros(2, 2)
    assert mutating(make_contiguous=True)(rows[0], rows[1]).tolist() == [1, 1]
    assert mutating(make_contiguous=True)(columns[:, 0], columns[:, 1]).tolist() == [1, 1]
    assert columns.tolist() == [[1, 0], [1, 0]]
    empty = make_compiled(lambda x, y: x.add_(1), [tensor("x", 0), tensor("y", 0)], mutated_leaves=(0,))
    assert empty(whole[:0], whole[:0]).tolist() == []


def test_an_input_that_overlaps_itself_is_none_to_write_to() -> None:
    """Eager refuses it, too."""
    repeated = torch.zeros(1).expand(2)
    compiled = mutating(make_contiguous=True)
    issue = one(compiled, repeated, torch.ones(2))
    assert (issue.where, issue.hint) == ("x", "pass a clone")
    assert compiled(torch.ones(2), repeated).tolist() == [2, 2]


def without_memory(kind: str) -> Tensor:
    if kind == "lazy zeros":
        return torch._efficientzerotensor((2,))
    if kind == "functional":
        return torch._to_functional_tensor(torch.ones(2))
    emptied = torch.ones(2)
    emptied.untyped_storage().resize_(0)
    return emptied


WITHOUT_MEMORY = ["lazy zeros", "functional", "emptied"]


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
@pytest.mark.parametrize("copies", [False, True])
def test_an_input_without_memory_is_a_miss(kind: str, copies: bool) -> None:
    """A library would read at address 0."""
    issue = one(mutating(make_contiguous=copies), torch.ones(2), without_memory(kind))
    assert (issue.where, issue.hint) == ("y", "call .clone()")
    assert one(mutating(make_contiguous=copies), without_memory(kind), torch.ones(2)).where == "x"


@pytest.mark.parametrize("kind", [*WITHOUT_MEMORY, "nested", "sparse", "mkldnn", "meta"])
@pytest.mark.parametrize("weights", ["live", "frozen"])
def test_weights_without_dense_memory_are_refused(kind: str, weights: str) -> None:
    made = {
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "sparse": lambda: torch.ones(2).to_sparse(),
        "mkldnn": lambda: torch.ones(2).to_mkldnn(),
        "meta": lambda: torch.ones(2, device="meta"),
    }
    module = Recurrent().eval()
    state = specs_of(module, digests=weights == "frozen")
    artifact = make_artifact([tensor("x", 2)], state=state, weights=weights)
    module._buffers["h"] = odd = made[kind]() if kind in made else without_memory(kind)
    with pytest.raises(BindError) as caught:
        attach_fakes(artifact, lambda x, *h: x, module=module)
    assert caught.value.issues[0].where == "h"
    with pytest.raises(BindError):
        open_weights({"h": odd})


# -- versions ---------------------------------------------------------------------------------------------------------


def raises_in_backward(write: Callable[[Tensor], Any], saved: Tensor) -> bool:
    """Whether a backward pass that needs what `saved` was raises after `write(saved)`, as in eager."""
    parameter = nn.Parameter(torch.ones(2))
    result = (parameter * saved).sum()
    with torch.no_grad():
        write(saved)
    try:
        result.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


def test_a_backward_pass_through_what_compiled_code_wrote_to_raises_as_in_eager() -> None:
    y = torch.ones(2)
    assert raises_in_backward(lambda x: mutating()(x, y), torch.ones(2))
    assert raises_in_backward(lambda x: mutating(make_contiguous=True)(x, y), torch.ones(4)[::2])
    assert not raises_in_backward(lambda x: mutating()(y, x), torch.ones(2))
    module = Recurrent().eval()
    artifact = make_artifact([tensor("x", 2)], state=specs_of(module))
    written = msgspec.structs.replace(artifact.variants[0], mutated_state=("h",))
    stateful = attach_fakes(msgspec.structs.replace(artifact, variants=(written,)), lambda x, h: x, module=module)
    assert raises_in_backward(lambda _: stateful(y), module.h)
    assert raises_in_backward(lambda h: stateful(y), module.h[:])


def test_a_call_that_fails_may_have_written_too_and_inference_tensors_have_no_version() -> None:
    def fail(x: Tensor, y: Tensor) -> Tensor:
        raise LibraryError("amid the writes")

    compiled = make_compiled(fail, [tensor("x", 2), tensor("y", 2)], mutated_leaves=(0,))
    x = torch.ones(2)
    with pytest.raises(LibraryError):
        compiled(x, torch.ones(2))
    assert x._version == 1
    with torch.inference_mode():
        assert mutating()(torch.ones(2), torch.ones(2)).tolist() == [3, 3]


# -- several at once --------------------------------------------------------------------------------------------------


def test_every_reason_is_listed_not_the_first() -> None:
    ambient = Ambient(None, "float32", "highest", False)
    compiled = make_compiled(
        lambda x, y: x,
        [tensor("x", 2, 3), tensor("y", 2), ConstantLeaf("flag", True)],
        ambient=ambient,
        module=nn.Identity().train(),
    )
    with torch.autocast("cpu", torch.bfloat16):
        issues = miss(compiled, torch.ones(3, 2, dtype=torch.float64, requires_grad=True).t(), [1], False)
    found = [(issue.where, issue.expected, issue.actual) for issue in issues]
    assert ("x", "float32", "float64") in found
    assert ("x", "contiguous", "[1, 2]") in found
    assert ("flag", "True", "bool False") in found
    assert ("", "off", "bfloat16") in found
    assert ("", "False", "True") in found
    assert [issue.where for issue in issues] == ["y", "x", "x", "x", "flag", "", ""]
    assert any("gradient" in issue.message for issue in issues)


def test_a_wrong_number_of_axes_does_not_hide_the_other_reasons() -> None:
    compiled = make_compiled(lambda x, y: x, [tensor("x", 2, 3), tensor("y", "seq")], [{"seq": 4}])
    issues = miss(compiled, torch.ones(6, dtype=torch.float64), torch.ones(4, 1))
    assert [(issue.where, issue.actual) for issue in issues] == [("x", "[6]"), ("y", "[4, 1]"), ("x", "float64")]


def test_a_miss_lists_the_nearest_buckets_and_why_not_each() -> None:
    leaf = tensor("x", "batch", "seq")
    compiled = make_compiled(lambda x: x, [leaf], [{"batch": 1, "seq": s} for s in (1, 8, 64, 512, 4096)])
    with pytest.raises(MissError) as caught:
        compiled(torch.ones(1, 70))
    error = caught.value
    assert [issue.where for issue in error.issues] == [f"bucket batch=1,seq={s}" for s in (64, 8, 1)]
    assert [(issue.expected, issue.actual) for issue in error.issues] == [("64", "70"), ("8", "70"), ("1", "70")]
    assert error.model == "handmade"
    assert error.buckets == compiled.buckets
    assert isinstance(error, LookupError)
    assert all(bucket in str(error) for bucket in compiled.buckets)


# -- make_contiguous --------------------------------------------------------------------------------------------------


def test_make_contiguous_copies_counts_each_copy_and_leaves_the_caller_alone() -> None:
    compiled = make_compiled(lambda x, y, z: x + y + z, [tensor(name, 2, 3) for name in "xyz"], make_contiguous=True)
    x, y, z = torch.randn(3, 2).t(), torch.randn(1, 3).expand(2, 3), torch.randn(2, 3)
    assert torch.equal(compiled(x, y, z), x + y + z)
    ran = compiled.libraries[0].seen[0]
    assert all(tensor.is_contiguous() for tensor in ran)
    assert ran[2] is z
    assert compiled.stats().contiguous_copies == 2
    assert not x.is_contiguous()
    compiled(z, z, z)
    assert compiled.stats().contiguous_copies == 2


def test_make_contiguous_copies_into_channels_last_too() -> None:
    compiled = plain((2, 3, 4, 5), layout="channels_last", make_contiguous=True)
    compiled(torch.randn(2, 3, 4, 5))
    assert compiled.libraries[0].seen[0][0].is_contiguous(memory_format=torch.channels_last)


def test_make_contiguous_writes_what_the_model_wrote_into_the_callers_tensor_and_gives_that_one_back() -> None:
    compiled = make_compiled(
        lambda x: x.add_(1).sum(),
        [tensor("x", 2, 3)],
        mutated_leaves=(0,),
        make_contiguous=True,
        outputs=(Output(index=0), Output(leaf=0)),
        output_sample=(0, 0),
    )
    x = torch.zeros(3, 2).t()
    total, same = compiled(x)
    assert x.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert float(total) == 6
    assert same is x


def layout_hints(action: Callable[[], Any]) -> list[str]:
    with pytest.raises(MissError) as caught:
        action()
    return [issue.hint for issue in caught.value.issues if "contiguous" in issue.hint or "resolve" in issue.hint]


LYING_OTHERWISE = {
    "transposed": (lambda: torch.ones(3, 2).t(), {}, "call .contiguous()"),
    "negated": (lambda: torch.ones(2, 3, dtype=torch.complex64).conj().imag, {}, "call .resolve_conj().resolve_neg()"),
    "channels last": (
        lambda: torch.ones(2, 3, 4, 5),
        {"layout": "channels_last"},
        "call .contiguous(memory_format=torch.channels_last)",
    ),
}


@pytest.mark.parametrize("name", list(LYING_OTHERWISE))
def test_a_miss_names_make_contiguous_where_it_would_solve_it(name: str) -> None:
    make, fields, call = LYING_OTHERWISE[name]
    shape = tuple(make().shape)
    (hint,) = layout_hints(lambda: plain(shape, **fields)(make()))
    assert hint == f"{call}, or set `make_contiguous: true` in the manifest"
    plain(shape, make_contiguous=True, **fields)(make())


def test_a_miss_does_not_name_make_contiguous_where_it_would_not_solve_it() -> None:
    x, whole = torch.ones(3, 2).t(), torch.zeros(4)
    for action in (
        lambda: plain((2, 3))(x.double()),
        lambda: plain((2, 4))(x),
        lambda: plain((2, 3))(x.detach().requires_grad_()),
        lambda: mutating()(whole[::2], whole[:2]),
    ):
        assert layout_hints(action) == ["call .contiguous()"]
    with pytest.raises(MissError) as caught:
        mutating(make_contiguous=True)(whole[::2], whole[:2])
    assert ["shares memory" in issue.message for issue in caught.value.issues] == [True]
    with torch.autocast("cpu", torch.bfloat16):
        assert layout_hints(lambda: plain((2, 3), make_contiguous=True)(x)) == []


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(3, 2, dtype=torch.float64).t(),
        torch.ones(3, 2, device="meta").t(),
        torch.ones(3, 2).as_subclass(Subclass).t(),
    ],
    ids=["dtype", "device", "subclass"],
)
def test_make_contiguous_forgives_nothing_but_the_layout(x: Tensor) -> None:
    miss(plain(make_contiguous=True), x)


# -- what eager takes, and was not built for --------------------------------------------------------------------------


class Open(nn.Module):
    """Takes keywords that no artifact was built with."""

    def forward(self, x: Tensor, **more: Any) -> Any:
        return x + more.get("k", 0)


def test_a_keyword_that_only_the_module_takes_is_a_miss() -> None:
    x = torch.ones(2)
    eager = make_compiled(lambda x: x, [tensor("x", 2)], module=Open().eval(), on_miss="eager")
    assert torch.equal(eager(x, k=2), x + 2)
    assert eager(x) is x
    refusing = make_compiled(lambda x: x, [tensor("x", 2)], module=Open().eval())
    with pytest.raises(MissError, match="keyword argument 'k': it was not built with that"):
        refusing(x, k=2)
    with pytest.raises(TypeError):
        refusing(k=2)
    with pytest.raises(TypeError):
        make_compiled(lambda x: x, [tensor("x", 2)])(x, k=2)


def test_a_nested_tensor_is_a_miss() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    refusing = make_compiled(lambda x: x, [tensor("x", 2, 2)])
    with pytest.raises(MissError, match="x: a tensor of one shape is expected, a nested one came"):
        refusing(nested)


def test_a_call_within_a_transform_is_a_miss() -> None:
    x = torch.ones(3, 2)
    eager = make_compiled(lambda x: x, [tensor("x", 2)], module=Open().eval(), on_miss="eager")
    assert torch.equal(torch.vmap(lambda row: eager(row, k=1))(x), x + 1)
    assert torch.equal(torch.vmap(eager)(x), x)
    assert eager.stats().calls == 0
    refusing = make_compiled(lambda x: x, [tensor("x", 2)])
    with pytest.raises(MissError, match=r"within torch\.compile or within a transform of torch\.func"):
        torch.vmap(refusing)(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(MissError, match="x: it has a tangent"):
            refusing(dual)
        assert refusing(plain_x := torch.ones(2)) is plain_x


def test_a_copy_is_told_to_load_again() -> None:
    compiled = make_compiled(lambda x: x, [tensor("x", 2)])
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"1 bucket> .*state_dict, and call aotc\.load again"):
            copying(compiled)


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


FOLLOWED: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "jit.trace": lambda call, x: torch.jit.trace(lambda x: call(x), x, check_trace=False)(x + 1),
    "make_fx": lambda call, x: make_fx(lambda x: call(x))(x)(x + 1),
    "make_fx, symbolic": lambda call, x: make_fx(lambda x: call(x), tracing_mode="symbolic")(x)(x + 1),
}


@pytest.mark.parametrize("name", list(FOLLOWED))
def test_a_call_that_is_traced_is_a_miss(name: str) -> None:
    """What compiled code gives is a constant to who follows the operators."""
    x = torch.ones(2, 3)
    leaf = tensor("x", "n", 3)
    buckets = [{"n": SizeRange(1, 8, tune_at=8)}]
    eager = make_compiled(lambda x: x * 2, [leaf], buckets, module=Doubling().eval(), on_miss="eager")
    assert torch.equal(FOLLOWED[name](eager, x), (x + 1) * 2)
    assert eager.stats().calls == 0
    refusing = make_compiled(lambda x: x * 2, [leaf], buckets)
    with pytest.raises(MissError, match="which cannot look into compiled code"):
        FOLLOWED[name](refusing, x)
    assert torch.equal(refusing(x), x * 2)


def test_a_call_within_a_dispatch_mode_is_a_miss_and_one_within_other_contexts_is_none() -> None:
    compiled, x = plain(), torch.ones(2, 3)
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False)):
        with mode:
            assert one(compiled, x).hint
    with torch.inference_mode(), torch.device("cpu"), torch.profiler.profile():
        assert compiled(x) is x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        return x


def test_an_input_that_is_a_buffer_which_the_model_writes_to_is_a_miss() -> None:
    """Where such a buffer was returned and is given back, eager sees the input change under its hands."""
    module = Recurrent().eval()
    artifact = make_artifact([tensor("x", 2)], state=specs_of(module))
    written = msgspec.structs.replace(artifact.variants[0], mutated_state=("h",))
    compiled = attach_fakes(
        msgspec.structs.replace(artifact, variants=(written,)), lambda x, h: x, module=module, on_miss="error"
    )
    compiled(torch.ones(2))
    for given in (module.h, module.h[:2], module.h.view(2)):
        with pytest.raises(MissError, match="x: shares memory with the buffer `h`, which the model writes to"):
            compiled(given)
    assert compiled.explain(module.h).kind == "miss"
    compiled(module.h.clone())
    only_read = attach_fakes(artifact, lambda x, h: x, module=module)
    only_read(module.h)


def test_an_input_that_the_model_writes_to_and_that_lies_in_the_modules_memory_is_a_miss() -> None:
    """Eager reads what it has written; compiled code may have read before."""
    module = Recurrent().eval()
    artifact = make_artifact([tensor("x", 2), tensor("y", 2)], state=specs_of(module), mutated_leaves=(0,))
    compiled = attach_fakes(artifact, lambda x, y, h: x.add_(1) + h, module=module)
    for given in (module.h, module.h[:2], module.h.view(2)):
        with pytest.raises(MissError, match="x: is written to by the model, and shares memory with the module's `h`"):
            compiled(given, torch.ones(2))
    assert module.h.tolist() == [1, 1]
    assert compiled.explain(module.h, torch.ones(2)).kind == "miss"
    assert compiled(torch.ones(2), module.h).tolist() == [3, 3]
    module.h = torch.ones(2)
    with pytest.raises(MissError):
        compiled(module.h, torch.ones(2))


class Wrapped(Tensor):
    """A tensor of another kind, as quantised ones are: of the dtype and shape that it stands for."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.inner if isinstance(arg, Wrapped) else arg for arg in args), **(kwargs or {}))


def test_weights_of_another_kind_are_refused_at_load() -> None:
    module = nn.Linear(2, 2).eval()
    artifact = make_artifact([tensor("x", 2)], state=specs_of(module))
    module._parameters["weight"] = Wrapped(torch.ones(2, 2))  # type: ignore[assignment]
    with pytest.raises(BindError, match="weight: a plain tensor is expected, the module's is a Wrapped"):
        attach_fakes(artifact, lambda x, *_: x, module=module)


@pytest.mark.parametrize("name", Ambient.__struct_fields__)
def test_each_mode_of_a_record_is_read_compared_and_explained(name: str) -> None:
    assert name in mode_readers("cpu")
    other = {
        "autocast": "float16",
        "default_dtype": "float64",
        "float32_matmul_precision": "medium",
        "deterministic": True,
        "num_threads": torch.get_num_threads() + 1,
    }[name]
    compiled = make_compiled(lambda x: x, [tensor("x", 1)], ambient=ambient_now(**{name: other}))
    with pytest.raises(MissError) as caught:
        compiled(torch.zeros(1))
    (issue,) = caught.value.issues
    assert issue.message.startswith(f"built with {name.replace('_', ' ')} {other}, it is ")
    assert issue.hint
