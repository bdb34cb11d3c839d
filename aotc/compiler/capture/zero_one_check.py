"""The sizes 0 and 1 of a range, tried before it is compiled.

torch.export assumes that an axis with a range is neither 0 nor 1 long, says so nowhere, and leaves those sizes in the
range: a model that branches on `x.shape[0] == 1` gets the other branch. So the captured graph is run beside the model
at these sizes, and must give the same.

Run so, its operators see the sizes that there are. Inductor compiles for those that torch.export has noted: two rows of
`x[:2]`. So these must be the same, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from aotc.compiler.capture.bucket_proposals import sizes_of, split_proposal
from aotc.compiler.capture.dynamic_shapes import holds
from aotc.compiler.capture.lifting import Capture
from aotc.compiler.failure import line_named
from aotc.errors import BuildError
from aotc.expressions import Expression
from aotc.models.calls import call_model
from aotc.records import Bucket, Dims, Output, Signature, SizeRange, TensorLeaf, tuned_dims
from aotc.snapshot import named_state
from aotc.tensors.comparison import Result, first_difference


class LeavesAt(Protocol):
    """Example leaves of a model or region at these sizes, new ones each time."""

    def __call__(self, dims: Mapping[str, int], seed: int = 0) -> list[Any]: ...


def check_edges(
    module: nn.Module,
    signature: Signature,
    bucket: Bucket,
    captured: Capture,
    leaves_at: LeavesAt,
    conditions: Sequence[str] = (),
) -> None:
    """Raises BuildError where the graph and the model differ, or the model fails, at a size of 0 or 1.

    Each is tried with the other dims where they are tuned and at their smallest: `x.flatten()[:4]` of 1 × 2 is shorter.
    Sizes that do not meet the `conditions`, which no call can have either, are left out.
    """
    tuned, needed = tuned_dims(bucket), [Expression(text) for text in conditions]
    smallest = {**tuned, **{name: sizes_of(size)[0] for name, size in bucket.items() if isinstance(size, SizeRange)}}
    for others in (tuned, smallest):
        for dim, sizes, size in edge_sizes(signature, bucket):
            dims, at_tuned = {**others, dim: size}, {**tuned, dim: size}
            if (others is smallest and dims == at_tuned) or not all(holds(condition, dims) for condition in needed):
                continue
            if problem := _difference(module, signature, captured, dims, leaves_at):
                proposal = split_proposal(dim, sizes, lambda other, edge=size: other > edge)  # type: ignore[misc]
                small = " and ".join(f"`{name}` of {dims[name]}" for name in dims if dims[name] != at_tuned[name])
                raise BuildError(
                    f"{size} is a special size of `{dim}: {sizes}`{small and f' with {small}'}: {problem}",
                    hint=f"edit the manifest's buckets: {proposal}",
                    stage="export",
                    dim=dim,
                    refused=[size],
                )


def edge_sizes(signature: Signature, bucket: Bucket) -> Iterator[tuple[str, SizeRange, int]]:
    """The sizes of each range at which an axis of an input is 0 or 1 long."""
    leaves = [leaf for leaf in signature.leaves if isinstance(leaf, TensorLeaf)]
    entries = [Expression(entry) for leaf in leaves for entry in leaf.shape if isinstance(entry, str)]
    tuned = tuned_dims(bucket)
    for dim, sizes in bucket.items():
        if not isinstance(sizes, SizeRange):
            continue
        axes = [entry for entry in entries if dim in entry.names]
        for size in range(sizes.min, min(sizes.max, sizes.min + 3 * sizes.multiple_of) + 1, sizes.multiple_of):
            if any(entry.evaluate({**tuned, dim: size}) in (0, 1) for entry in axes):
                yield dim, sizes, size


def _difference(module: nn.Module, signature: Signature, captured: Capture, dims: Dims, leaves_at: LeavesAt) -> str:
    """How what the graph gives and writes differs from what the model does at these sizes; "" if it does not."""
    state = named_state(module)

    def run(seed: int) -> Result:
        return call_model(module, signature, captured.mutated_state, leaves_at(dims), seed=seed)

    try:
        expected = run(0)
    except Exception as error:
        return f"the model itself fails there ({type(error).__name__}: {error})"
    values = leaves_at(dims)
    before = {name: state[name].detach().clone() for name in captured.mutated_state}
    try:
        computed, other_size = run_graph(captured, values, state)
        actual = results_of(captured, computed, values, state)
    except Exception as error:
        return f"the captured graph fails there ({type(error).__name__}: {error})"
    finally:
        for name, saved in before.items():
            state[name].detach().copy_(saved)
    if other_size:
        return other_size
    written = len(values) + len(captured.mutated_state)
    if len(expected) != len(actual):
        there, graphs = len(expected) - written, len(actual) - written
        return f"the model gives {there} values there, the captured graph {graphs}"
    position = first_difference(expected, actual, run)
    return "" if position is None else _told(expected[position], actual[position])


def results_of(
    captured: Capture, computed: Sequence[Any], values: Sequence[Any], state: Mapping[str, Tensor]
) -> Result:
    """What the graph gives for these leaves, laid out as `call_model` does, in tensors that nobody writes to."""
    outputs = (_output(output, computed, values, state) for output in captured.outputs)
    found = (*outputs, *values, *(state[name] for name in captured.mutated_state))
    return [item.detach().clone() if isinstance(item, Tensor) else item for item in found]


def _output(output: Output, computed: Sequence[Any], values: Sequence[Any], state: Mapping[str, Tensor]) -> Any:
    if output.index is not None:
        return computed[output.index]
    if output.leaf is not None:
        return values[output.leaf]
    return output.constant if output.state is None else state[output.state]


def run_graph(captured: Capture, leaves: Sequence[Any], state: Mapping[str, Tensor]) -> tuple[Sequence[Any], str]:
    """The graph's result, and what of it has another size than torch.export has noted; "" if nothing has. It writes to
    the leaves and the state as the model does."""
    values = [
        state[argument.state].detach() if argument.state is not None else leaves[argument.leaf or 0]
        for argument in captured.arguments
    ]
    torch.manual_seed(0)
    run = _ComparingSizes(captured.graph)
    result: Sequence[Any] = run.run(*values)
    return result, run.found


class _ComparingSizes(fx.Interpreter):
    """Compares the shape of each tensor with the one that torch.export has noted; `found` says of the first other one.

    The symbols of the noted sizes get their values from the placeholders, which come first.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._symbols: dict[Any, Any] = {}
        self.found = ""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        noted = n.meta.get("val")
        if isinstance(value, Tensor) and isinstance(noted, Tensor):
            if n.op == "placeholder":
                self._bind(noted.shape, value.shape)
            sizes = [self._evaluate(size) for size in noted.shape]
            alike = [size in (None, actual) for size, actual in zip(sizes, value.shape, strict=False)]
            if not self.found and (len(sizes) != value.ndim or not all(alike)):
                line = line_named(n.meta.get("stack_trace") or "")
                where = f" of {line}" if line else ""
                self.found = f"{n.name}{where} is {list(value.shape)} there, the code would be for {sizes}"
        return value

    def _bind(self, noted: Sequence[Any], actual: Sequence[int]) -> None:
        for size, value in zip(noted, actual, strict=True):
            if isinstance(size, torch.SymInt):
                expression = size.node.expr
                for symbol in expression.free_symbols:  # one, and linear, as the manifest's dims are
                    self._symbols[symbol] = (value - expression.subs(symbol, 0)) / expression.coeff(symbol)

    def _evaluate(self, size: Any) -> int | None:
        """None for a size that the values of the inputs decide.

        torch's compiler makes a number of one that is the same at all sizes of two and more, as min(1, n - 1) is.
        """
        if isinstance(size, int):
            return size
        bounds = size.node.shape_env.bound_sympy(size.node.expr)
        value = bounds.lower if bounds.is_singleton() else size.node.expr.xreplace(self._symbols)
        return int(value) if value.is_Integer else None


def _told(want: Any, got: Any) -> str:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return f"the model gives {want!r:.40} there, the captured graph {got!r:.40}"
    if (want.shape, want.dtype) != (got.shape, got.dtype):
        return (
            f"the model gives {list(want.shape)} {want.dtype} there, the captured graph {list(got.shape)} {got.dtype}"
        )
    return "the captured graph computes something else there"
