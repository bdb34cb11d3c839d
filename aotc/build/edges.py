"""The sizes 0 and 1 of a range, tried before it is compiled.

torch.export assumes that an axis with a range is neither 0 nor 1 long, says so nowhere, and leaves those sizes in the
range: a model that branches on `x.shape[0] == 1` gets the other branch. So the captured graph is run beside the model
at these sizes, and must give the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.build.capture import Capture
from aotc.build.proposals import split_proposal
from aotc.errors import BuildError
from aotc.expressions import Expression
from aotc.manifest.calls import arguments_of
from aotc.records import Bucket, Dims, Signature, SizeRange, TensorLeaf, tuned_dims
from aotc.snapshot import named_state


class LeavesAt(Protocol):
    """Example leaves of a model or region at these sizes, new ones each time."""

    def __call__(self, dims: Mapping[str, int], seed: int = 0) -> list[Any]: ...


TOLERANCE = 0.05
"""Another branch gives another result altogether; rounding does not matter here."""


def check_edges(
    module: nn.Module, signature: Signature, bucket: Bucket, captured: Capture, leaves_at: LeavesAt
) -> None:
    """Raises BuildError where the graph and the model differ, or the model fails, at a size of 0 or 1."""
    for dim, sizes, size in edge_sizes(signature, bucket):
        dims = {**tuned_dims(bucket), dim: size}
        problem = _difference(module, signature, captured, dims, leaves_at)
        if problem:
            proposal = split_proposal(dim, sizes, lambda other, edge=size: other > edge)  # type: ignore[misc]
            raise BuildError(
                f"{size} is a special size of `{dim}: {sizes}`: {problem}",
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
    """How the graph's result differs from the model's at these sizes; "" if it does not."""
    state = named_state(module)
    before = {name: state[name].detach().clone() for name in captured.mutated_state}

    def restore() -> None:
        for name, saved in before.items():
            state[name].detach().copy_(saved)

    args, kwargs = arguments_of(signature, leaves_at(dims))
    try:
        torch.manual_seed(0)
        expected = pytree.tree_leaves(module(*args, **kwargs))
    except Exception as error:
        return f"the model itself fails there ({type(error).__name__}: {error})"
    finally:
        restore()
    try:
        torch.manual_seed(0)
        actual = _run_graph(captured, leaves_at(dims), state)
    except Exception as error:
        return f"the captured graph fails there ({type(error).__name__}: {error})"
    finally:
        restore()
    if len(expected) != len(captured.outputs):
        return f"the model gives {len(expected)} values there, the captured graph {len(captured.outputs)}"
    pairs = (
        (want, actual[output.index])
        for want, output in zip(expected, captured.outputs, strict=True)
        if output.index is not None
    )
    return next((found for want, got in pairs if (found := _unlike(want, got))), "")


def _run_graph(captured: Capture, leaves: Sequence[Any], state: dict[str, Tensor]) -> Sequence[Any]:
    values = [
        state[argument.state].detach() if argument.state is not None else leaves[argument.leaf or 0]
        for argument in captured.arguments
    ]
    result: Sequence[Any] = captured.graph(*values)
    return result


def _unlike(want: Any, got: Any) -> str:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return "" if want is got else f"the model gives {want!r:.40} there, the captured graph {got!r:.40}"
    if (want.shape, want.dtype) != (got.shape, got.dtype):
        return (
            f"the model gives {list(want.shape)} {want.dtype} there, the captured graph {list(got.shape)} {got.dtype}"
        )
    exact = not (want.is_floating_point() or want.is_complex())
    tolerance = 0.0 if exact else TOLERANCE
    same = torch.allclose(want, got, rtol=tolerance, atol=tolerance, equal_nan=True)
    return "" if same else "the captured graph computes something else there"
