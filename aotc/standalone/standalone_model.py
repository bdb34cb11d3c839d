"""A loaded model. `aotc.core._cpu` makes its calls, by the rows of the call table; here is what it is asked, and why a
call is a miss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from aotc.call_table.bind import StructureMismatch, make_binder
from aotc.call_table.dispatch import Dispatcher, Plan
from aotc.call_table.misses import Explanation, error_of, fixed_size_issues, pads_told
from aotc.call_table.obstacles import nearest, obstacles, unexplained
from aotc.call_table.refusals import constant_hint, equal_constant, expected_issue, shape_hint, shape_issue
from aotc.call_table.values import describe
from aotc.errors import BindError, CorruptError, Issue
from aotc.machine.forks import renew_in_child
from aotc.records import Artifact, ConstantLeaf, TensorLeaf, bucket_name
from aotc.standalone.array_views import NoTensor, giving_like, tensor_of
from aotc.standalone.call_results import ResultMaker, RunCall
from aotc.standalone.call_rows import call_rows
from aotc.standalone.cpu_environment import open_cpu
from aotc.standalone.shim_library import ShimLibrary
from aotc.standalone.state_tensors import StandaloneWeights, with_weights
from aotc.standalone.written_memory import WrittenMemory
from aotc.tensors.strides import strides_in

StandaloneOnMiss = Literal["error"] | Callable[..., Any]

_SHOWN = 3
"""The nearest variants that a miss explains."""
_OTHER_ARGUMENTS = (
    "give the call what the manifest's `inputs` name, and no others; or name those there, and build again"
)


class BucketCalls(NamedTuple):
    """Since the load: `calls` that ran, by bucket in `buckets`, `misses`, inputs that were copied into the compiled
    layout, and calls that were padded."""

    calls: int
    buckets: Mapping[str, int]
    misses: int
    contiguous_copies: int
    padded_calls: int


class _Bound(NamedTuple):
    """A call's arguments: the leaves as they came, and with tensors in the place of arrays."""

    given: list[Any]
    leaves: list[Any]
    issues: list[Issue]
    """Problems of leaves that should be tensors, and are not."""


class StandaloneModel:
    """Compiled code with the calling convention of the model's forward. `aotc.standalone.load` makes it.

    A call takes arrays of numpy and whatever has a buffer or speaks DLPack (torch, JAX, …), on a CPU, and reads them
    where they lie. It gives arrays of the library that made the first one. Many threads may call.

    As in eager: what the model writes to an input is written to the caller's array, through padding and copies too; an
    output that is an input is that very object, one that is a view of an input shares its memory. Buffers that the
    model writes to are this object's own, and the next call finds what was written.

    Attributes: `artifact`, the record; `digest` of the bundle; `buckets`, their names.
    """

    def __init__(
        self,
        artifact: Artifact,
        digest: str,
        libraries: Sequence[ShimLibrary],
        state: Sequence[Any],
        on_miss: StandaloneOnMiss = "error",
    ) -> None:
        self.artifact, self.digest, self.on_miss = artifact, digest, on_miss
        variants, self._signature = artifact.variants, artifact.signature
        self._bind = make_binder(
            self._signature,
            any_sequence=all(variant.any_sequence for variant in variants),
            any_order=all(variant.any_order for variant in variants),
            empty_is_none=[
                name for name in variants[0].empty_is_none if all(name in each.empty_is_none for each in variants)
            ],
        )
        self._dispatcher = Dispatcher(self._signature, variants, artifact.model)
        self._libraries, self._state = libraries, list(state)
        names = {spec.name: index for index, spec in enumerate(artifact.state)}
        self._results = [ResultMaker(variant, names, self._dispatcher.dims) for variant in variants]
        self._written = WrittenMemory(artifact)
        lines = "".join(f"{line}\n" for line in call_rows(artifact, self._dispatcher))
        leaves = self._signature.leaves
        places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, TensorLeaf))
        constants = tuple((index, leaf.value) for index, leaf in enumerate(leaves) if isinstance(leaf, ConstantLeaf))
        self._first = next(iter(places), None)
        opened = tuple(library.opened for library in libraries)
        try:
            self._table = open_cpu().Table(lines, places, constants, opened)
        except ValueError as error:
            raise CorruptError(f"the record's calls cannot be decided: {error}", hint="build it again") from error
        self._renew()
        renew_in_child(self, StandaloneModel._renew)
        self._calls, self._misses, self._copies, self._padded = [0] * len(variants), 0, 0, 0

    def _renew(self) -> None:
        self._counting, self._updating = threading.RLock(), threading.RLock()

    def __repr__(self) -> str:
        return f"<aotc.standalone {self.artifact.model} for {self.artifact.target}, {len(self._libraries)} buckets>"

    @property
    def buckets(self) -> list[str]:
        """The names of the buckets."""
        return [bucket_name(variant.bucket) for variant in self.artifact.variants]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result. Raises MissError for a call that no bucket takes, TypeError where arguments do not bind,
        and LibraryError."""
        try:
            given = self._bind(args, kwargs)
        except StructureMismatch:
            return self._miss(args, kwargs)
        state = self._state
        try:
            done = self._table.call(given, state)
        except ValueError as error:
            raise CorruptError(f"the record's rows cannot be kept: {error}", hint="build it again") from error
        if done is None:
            return self._miss(args, kwargs)
        variant, leaves, ran, outputs, copies, padded = done
        if outputs is None:
            raise self._libraries[variant].failed()
        with self._counting:
            self._calls[variant] += 1
            self._copies += copies
            self._padded += padded
        give = giving_like(None if self._first is None else given[self._first])
        return self._results[variant](RunCall(given, leaves, ran, state, outputs, give))

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Which bucket this call would run and why, or why it is a miss. Raises TypeError as a call."""
        try:
            bound = self._read(args, kwargs)
        except StructureMismatch as error:
            came = describe(error.came)
            words = f"`{error.path}` must be {error.expected}, {came} came"
            reason = Issue(words, error.path, error.expected, came, error.hint or _OTHER_ARGUMENTS)
            return Explanation("miss", "", reasons=(reason,), for_module=False)
        return self._explain_leaves(bound)

    def update_weights(self, weights: StandaloneWeights) -> None:
        """Put other weights in the place of those that are served, all or nothing, while calls go on.

        Calls that have begun finish on the old weights; each later one uses the new ones; none sees a mixture. The old
        ones are let go when the calls that use them have ended. A buffer is reset by its name, with its first values.

        Args:
            weights: a safetensors file, a shard index, a folder that holds either, or a mapping of names to arrays. It
                may name some of the tensors only; the others stay. Arrays of a mapping are copied.

        Raises:
            BindError: with everything that is wrong (unknown names, shapes, dtypes), or the artifact's weights are
                frozen. The old weights are served on.

        Example:
            >>> model.update_weights({"norm.weight": numpy.ones(256, numpy.float32)})  # doctest: +SKIP
        """
        if self._updating._is_owned():  # type: ignore[attr-defined]
            raise BindError(
                f"`{self.artifact.model}` is being updated by this very thread, as where a signal interrupts it",
                hint="let a signal's handler set a flag, and update where the flag is read",
            )
        with self._updating:
            self._state = with_weights(self.artifact, self._state, weights)

    def stats(self) -> BucketCalls:
        with self._counting:
            buckets = {name: calls for name, calls in zip(self.buckets, self._calls, strict=True) if calls}
            return BucketCalls(sum(self._calls), buckets, self._misses, self._copies, self._padded)

    # -- from arguments to a plan -------------------------------------------------------------------------------------

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Bound:
        given = self._bind(args, kwargs)
        leaves, issues = list(given), []
        for index, leaf in enumerate(self._signature.leaves):
            if not isinstance(leaf, TensorLeaf) or (given[index] is None and leaf.default is not None):
                continue
            try:
                leaves[index] = tensor_of(given[index], leaf.path, describe)
            except NoTensor as error:
                leaves[index] = None
                issues.append(error.issue)
        return _Bound(given, self._table.filled(leaves), issues)

    def _rank_issues(self, leaves: Sequence[Any]) -> Iterator[Issue]:
        for value, leaf in zip(leaves, self._signature.leaves, strict=True):
            if isinstance(leaf, TensorLeaf) and value is not None and len(value.shape) != len(leaf.shape):
                yield shape_issue(leaf, value)

    def _differences(self, bound: _Bound, plan: Plan | None, state: Sequence[Any]) -> Iterator[Issue]:
        """Every row that the call breaks. Sizes are left out where no bucket was chosen."""
        found = [*bound.issues]
        for index, leaf in enumerate(self._signature.leaves):
            value = bound.leaves[index]
            if isinstance(leaf, ConstantLeaf):
                if not equal_constant(value, leaf.value):
                    built, came = repr(leaf.value), describe(value)
                    hint = constant_hint(leaf.value, value, is_tensor=hasattr(value, "__dlpack__"))
                    found.append(Issue(f"built for {built}, {came} came", leaf.path, built, came, hint))
            elif value is not None:
                shape = plan.shapes[index] if plan else None
                found += _tensor_issues(leaf, value, shape, self._signature.make_contiguous)
        yield from found
        if plan and not found and self._written.anything:
            yield from self._written.issues(bound.leaves, state)
        built_threads = self.artifact.ambient.num_threads
        if built_threads is not None and (now := open_cpu().threads()) != built_threads:
            hint = "call aotc.standalone.set_num_threads, or drop the option `cpp.dynamic_threads: false`"
            said = f"built with num threads {built_threads}, it is {now} now"
            yield Issue(said, "", str(built_threads), str(now), hint)

    # -- in words -----------------------------------------------------------------------------------------------------

    def _miss(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._counting:
            self._misses += 1
        # No frame may hold the error: its traceback holds the frames, and they hold the inputs.
        if callable(self.on_miss):
            return self.on_miss(error_of(self.artifact, self.explain(*args, **kwargs)), *args, **kwargs)
        raise error_of(self.artifact, self.explain(*args, **kwargs))

    def _explain_leaves(self, bound: _Bound) -> Explanation:
        dispatcher, variants, state = self._dispatcher, self.artifact.variants, self._state
        if without_sizes := [*bound.issues, *self._rank_issues(bound.leaves)]:
            found = dict.fromkeys([*without_sizes, *self._differences(bound, None, state)])
            return Explanation("miss", "", reasons=tuple(found), for_module=False)
        sizes = dispatcher.dims.read(bound.leaves)
        if odd := unexplained(dispatcher, sizes, bound.leaves):
            return Explanation("miss", "", reasons=(*odd, *self._differences(bound, None, state)), for_module=False)
        plan = dispatcher.plan(sizes)
        rejected = {
            bucket_name(variants[index].bucket): tuple(obstacles(dispatcher, index, sizes))
            for index in nearest(dispatcher, sizes, _SHOWN)
            if plan is None or index != plan.variant
        }
        if plan is None:
            reasons = (*fixed_size_issues(self._signature, bound.leaves), *self._differences(bound, None, state))
            if not reasons and not any(rejected.values()):
                reasons = (Issue(f"no bucket takes {dispatcher.dims.named(sizes)}"),)
            return Explanation("miss", "", reasons=reasons, rejected=rejected, for_module=False)
        bucket = bucket_name(variants[plan.variant].bucket)
        if reasons := tuple(self._differences(bound, plan, state)):
            return Explanation("miss", bucket, reasons=reasons, rejected=rejected, for_module=False)
        return Explanation(plan.kind, bucket, pads=pads_told(self._signature, plan), rejected=rejected)


def _tensor_issues(leaf: TensorLeaf, tensor: Any, shape: Sequence[int] | None, copies: bool) -> Iterator[Issue]:
    if tensor.dtype != leaf.dtype:
        hint = "convert it, or build the model for that dtype"
        yield expected_issue("dtype", leaf.dtype, tensor.dtype, leaf, hint)
    if shape is not None and tensor.shape != tuple(shape):
        yield expected_issue("shape", str(list(shape)), str(list(tensor.shape)), leaf, shape_hint(leaf, tensor))
    elif 0 not in tensor.shape and not tensor.address:
        yield Issue("a tensor with values in memory is expected, one without came", where=leaf.path)
    elif 0 not in tensor.shape and tensor.address % tensor.itemsize:
        said = f"its address is not aligned to {tensor.itemsize} bytes, the size of an element"
        yield Issue(said, where=leaf.path, hint="pass a copy of it")
    if not copies and not _lies_as(tensor, strides_in(leaf.layout, tensor.shape)):
        strides = str(list(tensor.strides))
        hint = "pass a copy in that layout (numpy.ascontiguousarray), or set `make_contiguous: true` in the manifest"
        yield Issue(
            f"the layout {leaf.layout} is expected, strides {strides} came", leaf.path, leaf.layout, strides, hint
        )


def _lies_as(tensor: Any, strides: Sequence[int]) -> bool:
    """Whether the elements lie so: the stride of an axis of one element is any."""
    axes = zip(tensor.shape, tensor.strides, strides, strict=True)
    return 0 in tensor.shape or all(size == 1 or here == built for size, here, built in axes)
