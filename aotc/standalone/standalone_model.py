"""A loaded model. `aotc.core._cpu` makes its calls, by the rows of the call table, and says why one is a miss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from aotc.call_table.bind import StructureMismatch, make_binder
from aotc.call_table.dispatch import Dispatcher
from aotc.call_table.misses import Explanation, error_of, pads_told
from aotc.call_table.refusals import constant_hint, equal_constant
from aotc.call_table.values import describe
from aotc.errors import BindError, CorruptError, Issue, LibraryError
from aotc.machine.forks import renew_in_child
from aotc.records import Artifact, ConstantLeaf, TensorLeaf, bucket_name
from aotc.standalone.array_views import NoTensor, giving_copies, giving_like, lies_on_gpu, tensor_of
from aotc.standalone.call_results import ResultMaker, RunCall
from aotc.standalone.call_rows import call_rows
from aotc.standalone.cpu_environment import open_cpu
from aotc.standalone.gpu_environment import failure_of, gpu_errors, on_the_gpu
from aotc.standalone.shim_library import OpenedLibrary
from aotc.standalone.state_tensors import StandaloneWeights, with_weights

StandaloneOnMiss = Literal["error"] | Callable[..., Any]

_OTHER_ARGUMENTS = (
    "give the call what the manifest's `inputs` name, and no others; or name those there, and build again"
)


class BucketCalls(NamedTuple):
    """Since the load: `calls` that ran, by bucket in `buckets`, `misses`, inputs that were copied into the compiled
    layout, and calls that were padded; on a GPU, calls that were launched as CUDA graphs, the bytes that this process
    holds of its memory, and those of them that are free for calls."""

    calls: int
    buckets: Mapping[str, int]
    misses: int
    contiguous_copies: int
    padded_calls: int
    graph_launches: int = 0
    gpu_bytes: int = 0
    free_gpu_bytes: int = 0


class StandaloneModel:
    """Compiled code with the calling convention of the model's forward. `aotc.standalone.load` makes it.

    A call takes arrays of numpy and whatever has a buffer or speaks DLPack (torch, JAX, …), on a CPU, and reads them
    where they lie. It gives arrays of the library that made the first one. Many threads may call.

    On a GPU arrays of the CPU are copied there, and arrays of CuPy, torch or JAX that lie on it are read there; the
    results lie where the first array does. A call returns when the GPU has done its work.

    As in eager: what the model writes to an input is written to the caller's array, through padding and copies too; an
    output that is an input is that very object, one that is a view of an input shares its memory. Buffers that the
    model writes to are this object's own, and the next call finds what was written.

    Attributes: `artifact`, the record; `digest` of the bundle; `buckets`, their names.
    """

    def __init__(
        self,
        artifact: Artifact,
        digest: str,
        libraries: Sequence[OpenedLibrary],
        state: Sequence[Any],
        on_miss: StandaloneOnMiss = "error",
        concurrency: int = 1,
        gpu: int | None = None,
    ) -> None:
        """`gpu`: the number of that which runs it. Raises LibraryError, CorruptError and MemoryLimitError."""
        self.artifact, self.digest, self.on_miss, self._gpu = artifact, digest, on_miss, gpu
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
        self._state = on_the_gpu(state, gpu)
        names = {spec.name: index for index, spec in enumerate(artifact.state)}
        self._results = [ResultMaker(variant, names, self._dispatcher.dims) for variant in variants]
        lines = "".join(f"{line}\n" for line in call_rows(artifact, self._dispatcher))
        leaves = self._signature.leaves
        places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, TensorLeaf))
        constants = tuple((index, leaf.value) for index, leaf in enumerate(leaves) if isinstance(leaf, ConstantLeaf))
        self._first = next(iter(places), None)
        where = () if gpu is None else (gpu,)
        try:
            self._table = open_cpu().Table(lines, places, constants, tuple(libraries), concurrency, *where)
            if gpu is not None:
                self._table.capture(self._state)
        except RuntimeError as error:
            raise failure_of(error) from error
        except ValueError as error:
            raise CorruptError(f"the record's calls cannot be decided: {error}", hint="build it again") from error
        self._counting, self._updating = threading.RLock(), threading.RLock()
        renew_in_child(self, StandaloneModel._renew)
        self._calls, self._misses, self._copies, self._padded = [0] * len(variants), 0, 0, 0

    def _renew(self) -> None:
        self._counting, self._updating = threading.RLock(), threading.RLock()
        if self._table is not None:
            self._table.renew()

    def close(self) -> None:
        """Let go of the code, the weights and, on a GPU, of the memory that is kept for calls. Later calls raise
        LibraryError."""
        self._table, self._state = None, []
        if self._gpu is not None:
            with gpu_errors():
                open_cpu().release_gpu(self._gpu)

    def __repr__(self) -> str:
        return f"<aotc.standalone {self.artifact.model} for {self.artifact.target}, {len(self.buckets)} buckets>"

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
            done = self._opened().call(given, state)
        except RuntimeError as error:
            raise failure_of(error) from error
        except ValueError as error:
            raise CorruptError(f"the record's rows cannot be kept: {error}", hint="build it again") from error
        if done is None:
            return self._miss(args, kwargs)
        variant, leaves, ran, outputs, copies, padded = done
        with self._counting:
            self._calls[variant] += 1
            self._copies += copies
            self._padded += padded
        first = None if self._first is None else given[self._first]
        give = giving_like(first)
        if self._gpu is not None and not lies_on_gpu(first):
            with gpu_errors():
                outputs = open_cpu().to_host(outputs)  # together: those that share memory do so in the copies
            give = giving_copies(give)
        return self._results[variant](RunCall(given, leaves, ran, state, outputs, give))

    def _opened(self) -> Any:
        if (table := self._table) is None:
            raise LibraryError(f"`{self.artifact.model}` was closed", hint="load it again")
        return table

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Which bucket this call would run and why, or why it is a miss. Raises TypeError as a call."""
        try:
            given = self._bind(args, kwargs)
        except StructureMismatch as error:
            came = describe(error.came)
            words = f"`{error.path}` must be {error.expected}, {came} came"
            reason = Issue(words, error.path, error.expected, came, error.hint or _OTHER_ARGUMENTS)
            return Explanation("miss", "", reasons=(reason,), for_module=False)
        leaves, issues = list(given), []
        for index, leaf in enumerate(self._signature.leaves):
            value = given[index]
            if isinstance(leaf, ConstantLeaf):
                if not equal_constant(value, leaf.value):
                    built, came = repr(leaf.value), describe(value)
                    hint = constant_hint(leaf.value, value, is_tensor=hasattr(value, "__dlpack__"))
                    issues.append(Issue(f"built for {built}, {came} came", leaf.path, built, came, hint))
            elif value is not None or leaf.default is None:
                try:
                    leaves[index] = tensor_of(value, leaf.path, describe, self._gpu)
                except NoTensor as error:
                    issues.append(error.issue)
        bucket, sizes, differences, others = self._opened().explain(leaves, self._state)
        issues += [Issue(*each) for each in differences]
        rejected = {self.buckets[at]: tuple(Issue(*each) for each in reasons) for at, reasons in others}
        if bucket is not None and not issues:
            plan = self._dispatcher.plan(sizes)
            assert plan is not None
            pads = pads_told(self._signature, plan)
            return Explanation(plan.kind, self.buckets[bucket], pads=pads, rejected=rejected)
        if not issues and sizes is not None and not any(rejected.values()):
            issues = [Issue(f"no bucket takes {self._dispatcher.dims.named(sizes)}")]
        name = "" if bucket is None else self.buckets[bucket]
        return Explanation("miss", name, reasons=tuple(issues), rejected=rejected, for_module=False)

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
            MemoryLimitError, LibraryError: on a GPU, where the new ones find no room, or no graph can be captured for
                them. The old weights are served on, launched directly where a graph was to be captured.

        Example:
            >>> model.update_weights({"norm.weight": numpy.ones(256, numpy.float32)})  # doctest: +SKIP
        """
        if self._updating._is_owned():  # type: ignore[attr-defined]
            raise BindError(
                f"`{self.artifact.model}` is being updated by this very thread, as where a signal interrupts it",
                hint="let a signal's handler set a flag, and update where the flag is read",
            )
        with self._updating:
            state = on_the_gpu(with_weights(self.artifact, self._state, weights), self._gpu)
            if self._gpu is not None:
                try:
                    self._opened().capture(state)
                except RuntimeError as error:
                    raise failure_of(error) from error
            self._state = state

    def stats(self) -> BucketCalls:
        with self._counting:
            buckets = {name: calls for name, calls in zip(self.buckets, self._calls, strict=True) if calls}
            counts = (sum(self._calls), buckets, self._misses, self._copies, self._padded)
        if self._gpu is None or (table := self._table) is None:
            return BucketCalls(*counts)
        return BucketCalls(*counts, table.graph_launches(), *open_cpu().gpu_bytes(self._gpu))

    def _miss(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self._counting:
            self._misses += 1
        # No frame may hold the error: its traceback holds the frames, and they hold the inputs.
        if callable(self.on_miss):
            return self.on_miss(error_of(self.artifact, self.explain(*args, **kwargs)), *args, **kwargs)
        raise error_of(self.artifact, self.explain(*args, **kwargs))
