"""Check the sizes 0 and 1 of a range, before the graph is compiled.

torch.export silently assumes that an axis with a range is neither 0 nor 1 long, and leaves these sizes in the range: a
model that branches on `x.shape[0] == 1` gets the other branch. So the captured graph and the model are run at these
sizes, and must give the same result.

In this run operators see the real sizes, but Inductor compiles for the exported ones: two rows of `x[:2]`. So the sizes
of all tensors must be the exported ones, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from aotc.compiler.capture.checks.captured_graph import call_captured
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.ranges.bucket_proposals import proposal, sizes_of, with_edges_apart
from aotc.compiler.capture.ranges.dynamic_shapes import holds
from aotc.errors import BuildError
from aotc.expressions import Expression
from aotc.models.calls import call_model, names_of, writable_buffers
from aotc.records import Bucket, Dims, Signature, SizeRange, TensorLeaf, tuned_dims
from aotc.tensors.rounding import Result, first_difference

_FAILS = "the model itself fails there"


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

    Each is tried with the other dims at their sizes of autotuning and at their smallest: `x.flatten()[:4]` of 1 × 2 is
    shorter. Sizes that violate the `conditions`, which calls may not have either, are left out.
    """
    tuned, needed = tuned_dims(bucket), [Expression(text) for text in conditions]
    smallest = {**tuned, **{name: sizes_of(size)[0] for name, size in bucket.items() if isinstance(size, SizeRange)}}
    for others in (tuned, smallest):
        for dim, sizes, size in edge_sizes(signature, bucket):
            dims, at_tuned = {**others, dim: size}, {**tuned, dim: size}
            if (others is smallest and dims == at_tuned) or not all(holds(condition, dims) for condition in needed):
                continue
            if problem := _difference(module, signature, captured, dims, leaves_at):
                instead = with_edges_apart(sizes, size, takes_edge=not problem.startswith(_FAILS))
                small = " and ".join(f"`{name}` of {dims[name]}" for name in dims if dims[name] != at_tuned[name])
                raise BuildError(
                    f"{size} is a special size of `{dim}: {sizes}`{small and f' with {small}'}: {problem}",
                    hint=f"edit the manifest's buckets: {proposal(dim, instead)}",
                    stage="export",
                    dim=dim,
                    refused=[size],
                    instead=instead,
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
    """The first difference between the graph's and the model's results and writes at these sizes; "" for none.

    All writable buffers are compared: at these sizes the model may write to one that the graph does not.
    """
    written = tuple(dict.fromkeys((*captured.mutated_state, *writable_buffers(module))))

    def run(seed: int) -> Result:
        return call_model(module, signature, written, leaves_at(dims), seed=seed)

    try:
        expected = run(0)
    except Exception as error:
        return f"{_FAILS} ({type(error).__name__}: {error})"
    try:
        actual, other_size = call_captured(module, captured, leaves_at(dims), written, dims)
    except Exception as error:
        return f"the captured graph fails there ({type(error).__name__}: {error})"
    if other_size:
        return other_size
    if len(expected) != len(actual):
        behind = len(signature.leaves) + len(written)
        return f"the model returns {len(expected) - behind} values there, the captured graph {len(actual) - behind}"
    position = first_difference(expected, actual, run)
    if position is None:
        return ""
    return _told(names_of(expected, signature, written)[position], expected[position], actual[position])


def _told(what: str, want: Any, got: Any) -> str:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        return f"the model gives {want!r:.40} there, the captured graph {got!r:.40}"
    if (want.shape, want.dtype) != (got.shape, got.dtype):
        return (
            f"the model gives {list(want.shape)} {want.dtype} there, the captured graph {list(got.shape)} {got.dtype}"
        )
    return f"{what} differs there from the captured graph's"
