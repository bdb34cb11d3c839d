"""The callable that `aotc.load` gives."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from aotc.errors import BindError, LibraryError
from aotc.records import Artifact, bucket_name
from aotc.runtime.bind import DoesNotBind, StructureMismatch, make_binder
from aotc.runtime.dispatch import Dispatcher, Plan
from aotc.runtime.forks import renew_in_child
from aotc.runtime.guards import Guards, is_followed
from aotc.runtime.library import Library
from aotc.runtime.stats import Counters, Stats
from aotc.runtime.variant import Attached, direct_launch
from aotc.runtime.watch import ModuleWatch
from aotc.runtime.weights import GPU_ALIGNMENT, Bound, ModuleState, State
from aotc.tensors.layouts import with_strides

if TYPE_CHECKING:
    from aotc.runtime.checkpoints.files import Weights
    from aotc.runtime.checkpoints.swap import Streams
    from aotc.runtime.cuda.options import GraphOptions
    from aotc.runtime.explain.misses import Explanation

log = logging.getLogger("aotc")

OnMiss = Literal["error", "eager"] | Callable[..., Any]


class Compiled:
    """A compiled model with the module's calling convention.

    Each call is bound to the model's parameters, dispatched on its sizes (by the rule of `aotc.runtime.dispatch`),
    checked against every guard, and run. A call that no variant may run goes to `on_miss`. Many threads may call.

    As in eager: what the model writes to an input or a buffer is written to the caller's and the module's own tensor,
    through padding and copies too; an output that is an input or a buffer is that very object; an output that is a view
    of an input shares its memory, unless the input was padded or copied into the compiled layout. Compiled outputs
    never require a gradient; what `on_miss="eager"` computes does, outside `torch.no_grad()`. Random operators draw
    from torch's generator, so `torch.manual_seed` makes calls repeat, but their numbers are not those that eager draws
    from the same seed; dropout in eval mode is the identity.

    Attributes:
        artifact: the record of what was compiled: buckets, guards, options, environment.
        module: the module whose tensors are used, and that `on_miss="eager"` runs; None if none was given.
        device: where the code runs, and its inputs must lie.
        on_miss: what happens to a call that no variant may run.

    Raises:
        TypeError: the arguments do not bind to the model's forward.
        MissError: no variant may run the call, and `on_miss` is "error".
        BindError: a tensor of the module was replaced by one of another shape, dtype, stride or device; or an attribute
            that compiled code depends on, a forward or a hook is no longer what it was at the load.
        LibraryError: the library failed while it ran; or the caller captures a CUDA graph, and it never ran before.

    Example:
        >>> compiled = aotc.load("aotc-store#quickstart", module)
        >>> with torch.no_grad():
        ...     y = compiled(torch.randn(4, 128, 256))
        >>> y.shape, y.dtype
        (torch.Size([4, 128, 256]), torch.float32)
    """

    def __init__(
        self,
        artifact: Artifact,
        libraries: Sequence[Library],
        state: Bound,
        module: nn.Module | None,
        device: torch.device,
        on_miss: OnMiss,
        graphs: GraphOptions | None = None,
        eager: Callable[..., Any] | None = None,
        *,
        watch: ModuleWatch | None = None,
        check_again: Callable[[], None] = lambda: None,
    ) -> None:
        """`eager` runs the model where that is not simply to call the module. `watch` looks at the module's attributes
        in every call; `check_again` compares all of it with the build."""
        if on_miss not in ("error", "eager") and not callable(on_miss):
            raise BindError(f"on_miss is {on_miss!r}", hint='it may be "error", "eager" or a callable')
        if on_miss == "eager" and module is None:
            raise BindError(
                'on_miss="eager" needs the module, and none was given',
                hint='pass the module to aotc.load instead of `weights`, or load with on_miss="error" or a callable',
            )
        signature = artifact.signature
        self.artifact = artifact
        self.module = module
        self.device = device
        self.on_miss = on_miss
        self._eager = module if eager is None else eager
        self._bind = make_binder(
            signature,
            any_sequence=all(variant.any_sequence for variant in artifact.variants),
            any_order=all(variant.any_order for variant in artifact.variants),
        )
        self._dispatcher = Dispatcher(signature, artifact.variants, artifact.model)
        self._guards = Guards(artifact, device, module)
        self._written_on_gpu = self._guards.mutated if device.type == "cuda" else []
        self._state = state
        self._watch, self._check_again = watch, check_again
        self._updating = threading.RLock()
        self._is_updating = False
        self._streams: Streams | None = None
        if device.type == "cuda":
            from aotc.runtime.checkpoints.swap import Streams

            self._streams = Streams(device)
        self._in_graphs: list[State] = []
        self._take_state = self._streams.noted(state.take) if self._streams else state.take
        names = [spec.name for spec in artifact.state] if artifact.weights == "live" else []
        self._attached = [
            Attached(
                variant, direct_launch(variant, library, names, len(signature.leaves)), names, plain=module is None
            )
            for variant, library in zip(artifact.variants, libraries, strict=True)
        ]
        buffers: list[Tensor] = []
        if graphs is not None:
            from aotc.runtime.cuda.graphs import add_graphs

            buffers = add_graphs(self._attached, self._dispatcher, names, device, graphs, state.take)
        if self._streams:
            self._streams.keep(self, lambda: [*buffers, *(state.take() if state.owned else ())])
        self._counters = Counters([bucket_name(variant.bucket) for variant in artifact.variants])
        renew_in_child(self, Compiled._renew)

    def _renew(self) -> None:
        self._updating = threading.RLock()
        self._is_updating = False

    def __reduce__(self) -> Any:
        """Raises TypeError: neither copies nor other processes can have what is mapped into this one."""
        raise TypeError(f"{self!r} can be neither copied nor pickled: call aotc.load again, in that process")

    def __repr__(self) -> str:
        return f"<aotc.Compiled {self.artifact.model} for {self.artifact.target}, {len(self._attached)} buckets>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan, leaves = None, []
        form: object = "followed"
        try:
            leaves = self._bind(args, kwargs)
        except StructureMismatch as error:
            from aotc.runtime.explain.values import describe_form

            form = error.path, describe_form(error.came)
        except DoesNotBind as error:
            if not self._module_takes(args, kwargs):
                raise
            form = str(error)
        else:
            if not is_followed():
                plan = self._plan(leaves)
                form = None
        if plan is None:
            return self._miss(args, kwargs, form or self._guards.form_of(leaves))
        ran = leaves
        if not self._guards.hold(leaves, plan.shapes):
            copies = self._in_compiled_layout(leaves, plan)
            if copies is None:
                return self._miss(args, kwargs, self._guards.form_of(leaves))
            ran = copies
        if self._watch is not None:
            self._watch.check()
        state = self._take_state()
        if self._guards.state_aliases is not None and self._guards.state_aliases.issues(leaves, state):
            return self._miss(args, kwargs, ("shares memory with the module", self._guards.form_of(leaves)))
        if ran is not leaves:
            self._counters.count_copies(sum(copy is not leaf for copy, leaf in zip(ran, leaves, strict=True)))
        for index, strides in plan.strides:
            if ran[index].stride() != strides:
                ran = [*ran[:index], with_strides(ran[index], strides), *ran[index + 1 :]]
        for index in self._written_on_gpu:  # else a library for GPUs writes to an aligned copy, and the result is lost
            if ran[index].data_ptr() % GPU_ALIGNMENT:
                ran = [*ran[:index], ran[index].clone(), *ran[index + 1 :]]
        self._counters.count_call(plan)
        if self._streams and self._streams.is_captured():
            self._keep_for_replays(state)
            return self._attached[plan.variant].run_captured(ran, state, plan, leaves)
        try:
            return self._attached[plan.variant].run(ran, state, plan, leaves)
        except LibraryError as error:
            from aotc.runtime.explain.indices import with_indices

            raise with_indices(error, self.artifact.signature.leaves, leaves) from error.__cause__

    def _has_form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call binds, and has the tensors and the constants that were compiled for, but for their sizes."""
        try:
            return self._guards.have_form(self._bind(args, kwargs))
        except (DoesNotBind, StructureMismatch):
            return False

    def _keep_for_replays(self, state: State) -> None:
        """A CUDA graph of the caller's reads these tensors for as long as it is replayed, also after a swap."""
        if not any(kept is state for kept in self._in_graphs):
            self._in_graphs.append(state)

    def _plan(self, leaves: list[Any]) -> Plan | None:
        """None for a miss: no variant takes these sizes, or the leaves have none."""
        try:
            return self._dispatcher.plan(self._dispatcher.dims.read(leaves))
        except Exception:
            if self._guards.fit(leaves):
                raise
            return None

    def _module_takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether arguments that were not built for bind to the module's forward, as others of its `**kwargs` do."""
        if self.module is None:
            return False
        try:
            inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs)
        except (TypeError, ValueError):
            return False
        return True

    def _in_compiled_layout(self, leaves: list[Any], plan: Plan) -> list[Any] | None:
        if not self.artifact.signature.make_contiguous:
            return None
        return self._guards.wrong_layout_only(leaves, plan.shapes)

    # -- misses -------------------------------------------------------------------------------------------------------

    def _miss(self, args: Sequence[Any], kwargs: Mapping[str, Any], form: object) -> Any:
        """`form` tells kinds of misses apart: the cause is only worked out for an error or a log message."""

        from aotc.runtime.explain.misses import explain_call, kind_of_miss, miss_error
        from aotc.runtime.explain.values import describe_form

        def kind() -> str:
            return kind_of_miss(explain_call(self, args, kwargs, describe_form))

        if text := self._counters.count_miss(form, kind):
            log.warning("%s: a call that no variant may run: %s", self.artifact.model, text)
        if self.on_miss == "eager":
            return self._run_eager(args, kwargs)
        error = miss_error(self.artifact, explain_call(self, args, kwargs))
        if callable(self.on_miss):
            return self.on_miss(error, *args, **kwargs)
        raise error

    def _run_eager(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        run = self._eager
        assert run is not None
        if not isinstance(self._state, ModuleState):
            return run(*args, **kwargs)
        if self._streams:
            self._streams.note()
        return self._state.run_eagerly(lambda: run(*args, **kwargs))

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What this call would run and why, without running it. Raises TypeError where the arguments do not bind.

        Example:
            >>> compiled.explain(torch.randn(4, 128, 256)).kind
            'exact'
            >>> compiled.explain(torch.randn(2, 128, 256)).rejected["batch=1,seq=128"][0].message
            'batch is 2, the bucket takes 1 and its inputs are not padded'
        """
        from aotc.runtime.explain.misses import explain_call

        return explain_call(self, args, kwargs)

    # -- swapping -----------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights) -> None:
        """Put other weights in the place of those that are served, all or nothing, while calls go on.

        Calls that have begun finish on the old weights; each later one uses the new ones; none sees a mixture. With a
        module, its parameters and buffers are replaced too, by new objects, so it and the compiled code agree; an
        optimizer or a reference to an old parameter does not follow. Old and new weights are held side by side until
        the calls that use the old ones have ended. CUDA graphs are captured for the new weights before they are served.

        Args:
            weights: a safetensors file, a shard index, a folder that holds either, or a mapping of names to tensors.
                It may name some of the tensors only; the others stay. One name of tied weights is enough. Tensors of a
                mapping are copied, so a trainer may go on changing them.

        Raises:
            BindError: with everything that is wrong (unknown names, shapes, dtypes), or the artifact's weights are
                frozen. LibraryError: the GPU has no room for both, or the graphs cannot be captured anew. Either way
                the old weights are served on.

        Example:
            >>> compiled.update_weights({"feed_forward_norm.weight": torch.ones(256)})
        """
        from aotc.runtime.checkpoints.swap import update_weights

        update_weights(self, weights)

    def refresh(self) -> None:
        """Compare the whole module with the build once more, as the load did, and go on with it as it is now.

        For what no call looks at (the sources of its classes, say), and after submodules were replaced by equal ones.

        Raises BindError: with every way in which it is not what was built; then all is as before.

        Example:
            >>> module.attention = copy.deepcopy(module.attention)
            >>> compiled.refresh()
        """
        if self.module is None:
            return
        self._check_again()
        self._state.refresh()
        self._guards.refresh()
        if self._watch is not None:
            self._watch.refresh()

    # -- looking in ---------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """A snapshot of the counters since the load.

        Example:
            >>> before = compiled.stats().calls
            >>> y = compiled(torch.randn(1, 128, 256))
            >>> compiled.stats().calls - before
            1
        """
        return self._counters.snapshot()

    @property
    def buckets(self) -> list[str]:
        """The names of the buckets, in the artifact's order.

        Example:
            >>> compiled.buckets
            ['batch=1,seq=128', 'batch=4,seq=128']
        """
        return [bucket_name(variant.bucket) for variant in self.artifact.variants]
