"""What torch.export is told of a model's arguments, however forward takes them, and what it fails at. Nothing is
compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotc.compiler.capture.checks.captured_graph import run_graph
from aotc.compiler.capture.export import capture, model_fails
from aotc.compiler.capture.lifting.lift import lift
from aotc.compiler.capture.ranges.dynamic_shapes import conditions, constraints_explained, dynamic_shapes
from aotc.compiler.explain_failure import explain_failure
from aotc.errors import BuildError
from aotc.models.calls import arguments_of
from aotc.reads.tensors import named_state
from aotc.records import ConstantLeaf, Output, Parameter, Signature, SizeRange, TensorLeaf


class Keywords(nn.Module):
    """Takes through **kwargs a tensor, and a tensor within containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.linear(x) * kwargs["scale"] + kwargs["extra"]["pair"][1].sum(0)


SIGNATURE = Signature(
    (
        Parameter("x", 0, "either"),
        Parameter("scale", 1, "keyword"),
        Parameter("extra", {"pair": [2, 3]}, "keyword"),  # type: ignore[arg-type]
    ),
    (
        TensorLeaf("x", "float32", ("n", 4)),
        TensorLeaf("scale", "float32", ("n", 1)),
        TensorLeaf("extra.pair[0]", "float32", (2,)),
        TensorLeaf("extra.pair[1]", "float32", ("2*n", 4)),
    ),
)


def leaves(n: int) -> list[Tensor]:
    return [torch.randn(n, 4), torch.randn(n, 1), torch.randn(2), torch.randn(2 * n, 4)]


def test_tensors_through_keyword_arguments_may_have_ranges() -> None:
    module = Keywords().eval()
    bucket = {"n": SizeRange(2, 64, 1, 8)}
    with torch.no_grad():
        found = capture(module, SIGNATURE, leaves(8), dynamic_shapes(SIGNATURE, bucket), frozen=False)
        assert conditions(found.guards, SIGNATURE, bucket) == ()
        state = named_state(module)
        for n in (2, 9, 64):
            given = leaves(n)
            args, kwargs = arguments_of(SIGNATURE, given)
            values = [state[each.state] if each.state else given[each.leaf or 0] for each in found.arguments]
            (result,) = found.graph(*values)
            assert torch.equal(result, module(*args, **kwargs))
    assert "forward" not in vars(module)


def test_a_condition_on_such_a_tensor_is_one_on_the_manifests_dim() -> None:
    class Halves(Keywords):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            scale = kwargs["scale"]
            if scale.shape[0] > 16:
                return x * 2 + scale
            return x + scale

    bucket = {"n": SizeRange(2, 64, 1, 32)}
    signature = Signature(SIGNATURE.parameters[:2], SIGNATURE.leaves[:2])
    with pytest.raises(BuildError, match=r"does not take all of `n: 2\.\.64") as raised, torch.no_grad():
        with constraints_explained(Halves(), signature, bucket):
            found = capture(Halves().eval(), signature, leaves(32)[:2], dynamic_shapes(signature, bucket), frozen=False)
        conditions(found.guards, signature, bucket)
    assert raised.value.fields["refused"] == [2, 3, 4]
    assert "17" in str(raised.value.hint)


class Padded(nn.Module):
    """As Pegasus-X: its operators compare the lengths of both inputs only after they are padded to blocks."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        missing = 512 - x.shape[1] % 512
        x, mask = (nn.functional.pad(each, (0, missing)) for each in (x, mask))
        return x + mask


def test_axes_of_one_dim_have_one_symbol_though_forward_never_compares_them() -> None:
    signature = Signature(
        (Parameter("x", 0, "either"), Parameter("mask", 1, "either")),
        (TensorLeaf("x", "float32", (2, "n")), TensorLeaf("mask", "float32", (2, "n"))),
    )
    shapes = dynamic_shapes(signature, {"n": SizeRange(8, 64, 1, 16)})
    found = capture(Padded(), signature, [torch.randn(2, 16), torch.randn(2, 16)], shapes, frozen=False)
    x, mask = (node.meta["val"] for node in found.graph.graph.find_nodes(op="placeholder"))
    assert isinstance(x.shape[1], torch.SymInt) and x.shape[1].node.expr == mask.shape[1].node.expr


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + mask[:, None]  # type: ignore[index]


def test_a_model_that_fails_without_export_too_is_told_so_with_its_line() -> None:
    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (4,)),))
    with pytest.raises(BuildError, match=r"the model itself fails .*\(x\): TypeError: 'NoneType' object") as raised:
        capture(Masked(), signature, [torch.ones(4)], None, frozen=False)
    assert raised.value.fields["source"].endswith("in forward: return x + mask[:, None]  # type: ignore[index]")
    assert "inputs" in raised.value.hint


def test_a_model_whose_sizes_do_not_fit_fails_by_itself_whatever_words_export_has_for_it() -> None:
    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (2, 5)),))
    with pytest.raises(BuildError, match=r"the model itself fails .*mat1 and mat2 shapes cannot be multiplied"):
        capture(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), signature, [torch.ones(2, 5)], None, frozen=False)


class Greedy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty(2**50, dtype=torch.uint8)[: len(x)]


def test_a_model_that_the_memory_does_not_hold_is_told_to_need_less() -> None:
    with pytest.raises(RuntimeError) as raised:
        Greedy()(torch.ones(4))
    said = model_fails(Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (4,)),)), raised.value)
    assert "2**50" in said.fields["source"] and "--jobs 1" in said.hint


def test_windows_that_leave_gaps_are_not_written_to() -> None:
    """torch's compiler has zeros in the gaps."""

    class Doubles(nn.Module):
        def forward(self, x: Tensor, size: int = 2, step: int = 2) -> Tensor:
            rows = x.clone()
            rows.view(2, 3, 6).unfold(2, size, step)[0].mul_(2)
            return rows

    signature = Signature(
        (Parameter("x", 0), Parameter("size", 1), Parameter("step", 2)),
        (TensorLeaf("x", "float32", (6, 6)), ConstantLeaf("size", 0), ConstantLeaf("step", 0)),
    )
    for size, step in ((1, 2), (4, 4)):
        with pytest.raises(BuildError, match="windows of `unfold`") as raised:
            capture(Doubles(), signature, [torch.ones(6, 6), size, step], None, frozen=False)
        assert raised.value.fields["source"].startswith("test_captured_arguments.py:")
    capture(Doubles(), signature, [torch.ones(6, 6), 3, 3], None, frozen=False)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_that_uses_no_input_is_a_constant(frozen: bool) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * 2 if frozen else torch.arange(4) * 2

    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (4,)),))
    with pytest.raises(BuildError, match="depends on none of its inputs"):
        capture(Table(), signature, [torch.ones(4)], None, frozen)


def test_an_expanded_tensor_is_not_written_to() -> None:
    """torch's compiler adds up what is written to the elements that are one."""

    class Fills(nn.Module):
        def forward(self, x: Tensor, part: str) -> Tensor:
            rows = x.clone().unsqueeze(1).expand(-1, 2, -1)
            (rows[..., -1] if part == "all" else rows[:, 0]).fill_(4)
            return rows

    signature = Signature(
        (Parameter("x", 0), Parameter("part", 1)), (TensorLeaf("x", "float32", (3, 3)), ConstantLeaf("part", "all"))
    )
    with pytest.raises(BuildError, match="forward writes to an expanded tensor") as raised:
        capture(Fills(), signature, [torch.ones(3, 3), "all"], None, frozen=False)
    assert raised.value.fields["source"].startswith("test_captured_arguments.py:")
    capture(Fills(), signature, [torch.ones(3, 3), "one"], None, frozen=False)


class Halves(nn.Module):
    """Writes to its buffer by parts of it, and to both of its inputs by a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.total.chunk(2)[1].add_(x[:2])
        torch._foreach_add_([x[0], y], 1.0)
        return x * 2


def test_what_is_written_to_in_one_of_several_parts_or_in_a_list_is_known() -> None:
    signature = Signature(
        (Parameter("x", 0), Parameter("y", 1)), (TensorLeaf("x", "float32", (4,)), TensorLeaf("y", "float32", (4,)))
    )
    found = capture(Halves(), signature, [torch.ones(4), torch.ones(4)], None, frozen=False)
    assert found.mutated_state == ("total",)
    assert found.mutated_leaves == (0, 1)
    with pytest.raises(BuildError, match="writes to its own buffer `total`; frozen weights cannot"):
        capture(Halves(), signature, [torch.ones(4), torch.ones(4)], None, frozen=True)


class WritesToAll(nn.Module):
    """Computes nothing: it writes to its inputs, by an operator that returns nothing."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        torch._foreach_add_([x, y], 1.0)
        return y


def test_a_model_that_only_writes_by_an_operator_that_returns_nothing_is_captured() -> None:
    signature = Signature(
        (Parameter("x", 0), Parameter("y", 1)), (TensorLeaf("x", "float32", (4,)), TensorLeaf("y", "float32", (4,)))
    )
    found = capture(WritesToAll(), signature, [torch.zeros(4), torch.zeros(4)], None, frozen=False)
    assert found.mutated_leaves == (0, 1) and found.outputs == (Output(leaf=1),)
    x, y = torch.zeros(4), torch.ones(4)
    returned = found.graph(x, y)
    assert len(returned) == 1 and isinstance(returned[0], Tensor)  # a library returns at least one
    assert x.tolist() == [1.0] * 4 and y.tolist() == [2.0] * 4


class BranchesOnViews(nn.Module):
    """Its branches return a tensor, and a part of that."""

    def forward(self, x: Tensor) -> Any:
        def added(x: Tensor) -> tuple[Tensor, Tensor]:
            z = x + 1
            return z, z[1:]

        def doubled(x: Tensor) -> tuple[Tensor, Tensor]:
            z = x * 2
            return z, z[1:]

        return torch.cond(x.sum() > 0, added, doubled, (x,))


def test_a_branch_that_returns_a_tensor_and_a_view_of_it_is_refused_with_its_line() -> None:
    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (4,)),))
    with pytest.raises(BuildError, match=r"a branch of `torch\.cond` returns two tensors that share memory") as raised:
        capture(BranchesOnViews(), signature, [torch.ones(4)], None, frozen=False)
    assert raised.value.fields["source"].startswith("test_captured_arguments.py:")
    assert "z[1:].clone()" in raised.value.hint


VIEWS: dict[str, Any] = {
    "chunk": lambda x: x.chunk(1)[0],
    "atleast_1d": torch.atleast_1d,
    "type_as": lambda x: x.type_as(x),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:1])[0],
    "meshgrid": lambda x: torch.meshgrid(x, x[:1], indexing="ij")[0].flatten(),
    "float": lambda x: x.float(),
    "dropout": lambda x: nn.functional.dropout(x, training=False),
    "dropout of none": lambda x: nn.functional.dropout(x, p=0.0),
}
"""Of a tensor of 4 float32, what is all of it in its own memory; the schemas of most do not say so."""

ONE = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (4,)),))


class Viewed(nn.Module):
    """Makes a view of its buffer, and then does something with it."""

    def __init__(self, view: Any) -> None:
        super().__init__()
        self.view = view
        self.register_buffer("last", torch.zeros(4))


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_what_a_buffer_was_before_it_is_assigned_to_is_kept(view: str) -> None:
    class Shifts(Viewed):
        def forward(self, x: Tensor) -> Tensor:
            before = self.last
            self.last = self.last + x
            return self.view(before)

    module = Shifts(VIEWS[view])
    found = capture(module, ONE, [torch.ones(4)], None, frozen=False)
    values = [module.last if argument.state else torch.ones(4) for argument in found.arguments]
    (before,) = found.graph(*values)
    assert before.tolist() == [0.0] * 4
    assert module.last.tolist() == [1.0] * 4


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_written_to_as_a_view_is_known(view: str) -> None:
    class Counts(Viewed):
        def forward(self, x: Tensor) -> Tensor:
            self.view(self.last).add_(1)
            return x * self.last

    module = Counts(VIEWS[view])
    found = capture(module, ONE, [torch.ones(4)], None, frozen=False)
    assert found.mutated_state == ("last",)
    values = [module.last if argument.state else torch.ones(4) for argument in found.arguments]
    found.graph(*values)
    (seen,) = found.graph(*values)
    assert seen.tolist() == [2.0] * 4 == module.last.tolist()
    with pytest.raises(BuildError, match="writes to its own buffer `last`; frozen weights cannot"):
        capture(Counts(VIEWS[view]), ONE, [torch.ones(4)], None, frozen=True)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_copy_may_be_written_to(frozen: bool) -> None:
    """In another dtype, or of numbers that forward makes a tensor of."""

    class Masks(Viewed):
        def forward(self, x: Tensor) -> Tensor:
            mask = self.last.bool().float()
            numbers = torch.tensor([1.0, 2.0, 3.0, 4.0])
            numbers[0] = 5
            return x + mask.sub_(1).mul_(9) + numbers

    found = capture(Masks(None), ONE, [torch.ones(4)], None, frozen=frozen)
    assert found.mutated_state == ()


def test_a_model_that_only_export_refuses_is_not_called_broken() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (4,)),))
    with pytest.raises(Exception, match="data-dependent") as raised:
        capture(Branches(), signature, [torch.ones(4)], None, frozen=False)
    assert not isinstance(raised.value, BuildError)


class Shares(nn.Module):
    """Two buffers that lie in one memory, overlapping or between one another."""

    def __init__(self, columns: bool, writes: bool) -> None:
        super().__init__()
        whole = torch.zeros(4, 4)
        self.register_buffer("keys", whole[:, :2] if columns else whole[:3])
        self.register_buffer("values", whole[:, 2:] if columns else whole[2:])
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.keys.add_(x.sum())
        return x + self.keys.sum() + self.values.sum()


@pytest.mark.parametrize(("columns", "writes"), [(False, True), (True, True), (False, False)])
def test_buffers_in_one_memory_of_which_one_is_written_are_refused_at_export(columns: bool, writes: bool) -> None:
    signature = Signature((Parameter("x", 0, "either"),), (TensorLeaf("x", "float32", (2,)),))
    module = Shares(columns, writes)
    if columns or not writes:  # no element is both
        assert capture(module, signature, [torch.ones(2)], None, frozen=False).state == ("keys", "values")
        return
    with pytest.raises(BuildError, match="`keys` and `values` share memory") as caught:
        capture(module, signature, [torch.ones(2)], None, frozen=False)
    assert caught.value.stage == "export" and caught.value.hint


def test_an_error_that_only_export_meets_has_its_line_and_something_to_do() -> None:
    class Tracing(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x + mask[:, None] if torch.compiler.is_exporting() else x  # type: ignore[index]

    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (4,)),))
    with pytest.raises(TypeError) as raised:
        capture(Tracing(), signature, [torch.ones(4)], None, frozen=False)
    told = explain_failure(raised.value, "export")
    assert told.message.startswith("export: torch.export fails where eager does not: TypeError: ")
    assert told.fields["source"].startswith("test_captured_arguments.py:")
    assert "return x + mask[:, None] if" in told.fields["source"]
    assert "aotc build MANIFEST --suggest-regions" in told.hint


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda x: x if torch.equal(x, x.t()) else -x, "a number or a bool from what `aten.equal` computes"),
        (lambda x: torch.linalg.lstsq(x, x)[0], "what `aten.linalg_lstsq` returns depend on values"),
        (
            lambda x: nn.functional.gaussian_nll_loss(x, x, x.exp()),
            "forward takes a branch by `Eq(u0, 1)`, which is data-dependent",
        ),
    ],
)
def test_what_depends_on_values_is_told_in_words_of_the_model(compute: Callable[[Tensor], Tensor], said: str) -> None:
    class Computes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return compute(x)

    with pytest.raises(Exception) as raised:
        capture(Computes(), ROWS, [torch.randn(4, 4)], None, frozen=False)
    told = explain_failure(raised.value, "export")
    assert said in told.message and "Exception" not in told.message and "Node" not in told.message
    assert "dependent)" not in told.message
    assert "test_captured_arguments.py:" in told.fields["source"]
    assert "torch.where" in told.hint and "--suggest-regions" in told.hint


class KeepsKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> None:
        self.keys[torch.tensor([2])] = x[:1]


class WritesToView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.view(2, 8).add_(1)
        return x


@pytest.mark.parametrize("model", [KeepsKeys, WritesToView])
def test_a_model_that_only_writes_has_a_graph_that_returns_one_tensor_which_is_no_result(
    model: type[nn.Module],
) -> None:
    """AOTInductor compiles no graph without results."""
    module, eager = model(), model()
    captured = capture(module, ROWS, [torch.ones(4, 4)], None, frozen=False)
    assert all(output.index is None for output in captured.outputs)
    x, of_eager = torch.ones(4, 4), torch.ones(4, 4)
    eager(of_eager)
    state = dict(module.named_buffers())
    given = [x if argument.leaf is not None else state[argument.state] for argument in captured.arguments]
    assert len(captured.graph(*given)) == 1
    torch.testing.assert_close((x, state), (of_eager, dict(eager.named_buffers())))


def test_what_torch_cannot_trace_is_named_without_its_words_for_that() -> None:
    class Jagged(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4])).values()

    with pytest.raises(Exception) as raised:
        capture(Jagged(), ROWS, [torch.randn(4, 4)], None, frozen=False)
    told = explain_failure(raised.value, "export")
    assert told.message == "export: `torch.nested.nested_tensor_from_jagged` cannot be captured"
    assert "pad the sequences" in told.hint and "in forward" in told.fields["source"]


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("Node.meta invoke_quant is missing val field.", "cannot hold the operator `invoke_quant`"),
        (
            "Operator '<function proxy_mode_key.<locals>.call_local_map at 0x7fc9146f5f80>' is not an allowed operator "
            "type: (<class 'torch._ops.OpOverload'>,)\nValid builtin ops: [<built-in function getitem>]",
            "cannot hold the function `call_local_map`",
        ),
    ],
)
def test_operators_that_a_graph_cannot_hold_are_named(said: str, named: str) -> None:
    """As torch 2.13 says it."""
    error = type("SpecViolationError", (Exception,), {})(said)
    message = explain_failure(error, "export").message
    assert named in message and "Violation" not in message and "Valid builtin" not in message


class Indirect(nn.Module):
    """Tensors of its own, which forward reaches otherwise than by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.register_buffer("total", torch.zeros(4, 4))
        self.register_buffer("seen", torch.zeros(4), persistent=False)
        self.linear = nn.Linear(4, 4)
        weight = self.weight
        self.listed, self.keyed, self.scaled = [weight, self.linear], {"bias": self.bias}, lambda x: x @ weight
        self.held, self.given = SimpleNamespace(seen=self.seen), partial(torch.mul, self.bias)
        self.views = [self.weight[:2], self.weight.t(), self.weight.data[:, 1], *self.bias.detach().chunk(2)]
        self.rows, self._last = (self.total[1:], self.total), [self.total[3]]

    def forward(self, x: Tensor) -> Tensor:
        self.rows[0].add_(x[1:])
        self.total.mul_(2)
        self._last[0].sub_(1)
        y = self.listed[1](x @ self.listed[0]) + self.keyed["bias"] + self.given(self.scaled(x))
        y = y @ self.views[1] + self.views[0].sum(0) * self.views[2] + torch.cat(self.views[3:]) + self.held.seen
        return y + self.rows[1]


ROWS = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (4, 4)),))


def test_a_tensor_of_the_module_is_an_argument_however_forward_comes_by_it() -> None:
    module, x = Indirect().eval(), torch.randn(4, 4)
    with torch.no_grad():
        captured = capture(module, ROWS, [x], None, frozen=False)
        assert set(captured.state) == set(named_state(module))
        assert captured.mutated_state == ("total",)
        state = named_state(module)
        for tensor in state.values():
            tensor.copy_(torch.randn_like(tensor))
        before = module.total.clone()
        wanted, wanted_total = module(x), module.total.clone()
        module.total.copy_(before)
        (given, *_), _ = run_graph(captured, [x], state)
        torch.testing.assert_close(given, wanted)
        torch.testing.assert_close(module.total, wanted_total)


@pytest.mark.parametrize(
    ("reached", "said"),
    [
        (lambda module: [nn.Linear(4, 4)][0].weight, "not registered"),
        (lambda module: nn.Parameter(torch.randn(4, 4)), "not registered"),
        (lambda module: module.weight * 2, "not registered"),
        (lambda module: module.weight.data.view(torch.int32), "shares memory with the module's `weight`"),
    ],
)
def test_a_weight_that_no_name_leads_to_is_no_constant(reached: Any, said: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self._held = [reached(self)]

        def forward(self, x: Tensor) -> Tensor:
            return x + self._held[0]

    with pytest.raises(BuildError, match=said) as error:
        capture(Model().eval(), ROWS, [torch.randn(4, 4)], None, frozen=False)
    assert error.value.fields["source"].startswith("test_captured_arguments.py:")


def test_a_region_does_not_take_the_weights_of_the_model_around_it_for_constants() -> None:
    class Head(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.tied = (weight.data,)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.tied[0]

    model = nn.ModuleDict({"first": nn.Linear(4, 4)})
    head = model["head"] = Head(model["first"].weight)  # type: ignore[arg-type]
    with pytest.raises(BuildError, match=r"the region uses the model's `first.weight`"):
        capture(head.eval(), ROWS, [torch.randn(4, 4)], None, frozen=False, outside=named_state(model))


class Data(nn.Module):
    """Reads a parameter, an input and a view of one through `.data`, and writes to a buffer and to an input so."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(8, 4))
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.data.add_(1)
        x.data[1:].mul_(2)
        nearest = torch.cdist(x, self.codes.data.t().data.t()).argmin(-1)
        return nearest, self.codes.data[nearest] + self.calls


def test_data_of_a_tensor_lies_in_its_memory() -> None:
    module, x = Data().eval(), torch.randn(4, 4)
    with torch.no_grad():
        captured = capture(module, ROWS, [x.clone()], None, frozen=False)
        assert captured.mutated_state == ("calls",) and captured.mutated_leaves == (0,)
        module.codes.copy_(torch.randn(8, 4))
        module.calls.zero_()
        ours, eagers = x.clone(), x.clone()
        given, _ = run_graph(captured, [ours], named_state(module))
        module.calls.zero_()
        for got, wanted in zip((*given, ours), (*module(eagers), eagers), strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_what_torch_jit_made_is_refused_by_its_name(kind: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            part = nn.Linear(4, 4).eval()
            self.part = torch.jit.script(part) if kind == "scripted" else torch.jit.trace(part, torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x)

    with pytest.raises(BuildError, match="`part`") as error:
        capture(Model().eval(), ROWS, [torch.randn(4, 4)], None, frozen=False)
    assert "the original module" in error.value.hint


class Forces(nn.Module):
    """Gives the gradient of an energy, as interatomic potentials do."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.functional, self.net = functional, nn.Linear(4, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.net(x).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        if self.functional:
            return torch.func.grad(self.energy)(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return -torch.autograd.grad(self.energy(x), [x])[0]


class TracedForces(nn.Module):
    """As the hint says."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.model = model
        call = lambda weights, x: torch.func.functional_call(model, weights, (x,))  # noqa: E731
        self.traced = torch.fx.experimental.proxy_tensor.make_fx(call)(dict(model.named_parameters()), x)

    def forward(self, x: Tensor) -> Any:
        return self.traced(dict(self.model.named_parameters()), x)


@pytest.mark.parametrize("functional", [True, False])
def test_a_gradient_in_forward_is_refused_with_its_line_and_a_way_out(functional: bool) -> None:
    model, x = Forces(functional).eval(), torch.randn(4, 4)
    with pytest.raises(Exception) as raised:
        capture(model, ROWS, [x], None, frozen=False)
    told = explain_failure(raised.value, "export")
    assert "test_captured_arguments.py:" in told.fields["source"] and "make_fx" in told.hint
    with torch.no_grad():
        captured = capture(TracedForces(model, x), ROWS, [x], None, frozen=False)
        model.net.weight.add_(1)
        (given, *_), _ = run_graph(captured, [x], {f"model.{name}": each for name, each in named_state(model).items()})
        torch.testing.assert_close(given, model(x))


def test_a_batch_norm_that_counts_its_batches_is_named_in_training() -> None:
    with pytest.raises(Exception) as raised:
        capture(nn.BatchNorm1d(4, momentum=None), ROWS, [torch.randn(4, 4)], None, frozen=False, train=True)
    told = explain_failure(raised.value, "export")
    assert "give it a momentum" in told.hint
    assert "forward takes `u0` for a Python number, which is data-dependent" in told.message


def test_a_write_in_what_torch_func_differentiates_is_named() -> None:
    class Slope(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def scaled(y: Tensor) -> Tensor:
                z = y * 2
                z[:, :2] = y[:, :2] * 3
                return z.sum()

            return torch.func.grad(scaled)(x)

    with pytest.raises(RuntimeError) as raised:
        capture(Slope(), ROWS, [torch.randn(4, 4)], None, frozen=False)
    told = explain_failure(raised.value, "export")
    assert "what torch.func differentiates" in told.hint and "test_captured_arguments.py:" in told.fields["source"]


def test_a_write_into_zeros_in_what_torch_func_differentiates_is_named() -> None:
    """torch.export gives a graph of this one, with a constant that is a fake tensor."""

    class Slope(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def squared(y: Tensor) -> Tensor:
                z = torch.zeros_like(y)
                z[:, 2:] = y[:, 2:]
                return (z**2).sum()

            return torch.func.grad(squared)(x)

    with pytest.raises(BuildError, match="which has no values") as raised:
        capture(Slope(), ROWS, [torch.randn(4, 4)], None, frozen=False)
    assert "what torch.func differentiates" in raised.value.hint
    assert "test_captured_arguments.py:" in raised.value.fields["source"]


def test_a_kernel_that_takes_an_address_is_told_to_be_an_operator() -> None:
    class Launched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.data_ptr()
            return x * 2

    with pytest.raises(RuntimeError) as raised:
        capture(Launched(), ROWS, [torch.randn(4, 4)], None, frozen=False)
    assert "torch.library.wrap_triton(kernel)[grid]" in explain_failure(raised.value, "export").hint


def test_checks_that_torch_distributions_are_told_to_make_are_named() -> None:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.distributions.Normal(x, torch.ones(4), validate_args=True).log_prob(x)

    with pytest.raises(RuntimeError) as raised:
        capture(Scores(), ROWS, [torch.randn(4, 4)], None, frozen=False)
    assert "leave out `validate_args=True`" in explain_failure(raised.value, "export").hint


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("aot_export is not currently supported with traceable tensor subclass.", "return plain tensors"),
        ("KeyError: torch.float8_e8m0fnu", "weights: frozen"),
        ("Constant tensor 0.lifted_tensor_0 is not in the constants dictionary.", "weights: frozen"),
        ("LinearPackedParamsBase does not have a field with name '__obj_flatten__'", "torchao"),
    ],
)
def test_quantized_models_are_told_what_to_do(said: str, hint: str) -> None:
    """As torch 2.13 says it."""
    assert hint in explain_failure(RuntimeError(said), "compile").hint


class Params8bit(nn.Parameter):
    """As bitsandbytes keeps the scales of its weights: in an attribute that torch.export loses."""

    scales: Tensor


def test_parameters_that_torch_export_cannot_look_into_are_named_with_a_way_out() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Params8bit(torch.ones(4, 4))
            self.weight.scales = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight * self.weight.scales

    with pytest.raises(BuildError, match=r"`weight` is a \S*Params8bit, whose Python attributes are lost") as raised:
        capture(Linear(), ROWS, [torch.randn(4, 4)], None, frozen=False)
    assert "torchao" in raised.value.hint and "regions" in raised.value.hint


def test_guards_of_a_torch_that_calls_them_otherwise_are_not_taken_for_none() -> None:
    x = torch.ones(2)
    program = torch.export.export(nn.ReLU(), (x,))
    vars(program)["_guards_by_another_name"] = vars(program).pop("_guards_code")
    with pytest.raises(AttributeError, match="_guards_code"):
        lift(
            program,
            nn.ReLU(),
            Signature((Parameter("input", 0, "either"),), (TensorLeaf("input", "float32", (2,)),)),
            [x],
            False,
            {},
        )


class Catching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            if x.sum() > 0:
                return x * 2
        except Exception:
            pass
        return x


def test_a_branch_on_data_that_forward_s_own_try_drops_is_refused_with_its_line() -> None:
    """torch.export's refusal is an exception like any other: caught, the branch would be gone without a word."""
    signature = Signature((Parameter("x", 0, "either"),), (TensorLeaf("x", "float32", (4,)),))
    with torch.no_grad(), pytest.raises(BuildError, match="catches the error by which torch") as caught:
        capture(Catching().eval(), signature, [torch.ones(4)], None, frozen=False)
    assert "if x.sum() > 0:" in caught.value.fields["source"]
