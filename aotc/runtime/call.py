"""The callable that `aotc.load` gives."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from aotc.call_table.bind import DoesNotBind, StructureMismatch, make_binder
from aotc.call_table.dispatch import Dispatcher, Plan, Shape
from aotc.errors import BindError, LibraryError
from aotc.machine.forks import renew_in_child
from aotc.reads.attributes import own_forward
from aotc.records import Artifact, TensorLeaf, bucket_name
from aotc.runtime.counters import Counters
from aotc.runtime.guards import Guards, has_tangent, is_followed
from aotc.runtime.state.call_state import ALIGNMENT, State
from aotc.runtime.variant import Attached, direct_launch
from aotc.tensors.layouts import with_strides

if TYPE_CHECKING:
    from aotc.call_table.misses import Explanation
    from aotc.reads.watch import ModuleWatch
    from aotc.runtime.checkpoints.checkpoint_files import Checkpoint, Weights
    from aotc.runtime.checkpoints.swap import Streams
    from aotc.runtime.conversions.default_tensors import Maker
    from aotc.runtime.cuda.graphs import GraphPool
    from aotc.runtime.libraries.library_protocol import Library
    from aotc.runtime.load import Loaded
    from aotc.runtime.options import Graphs
    from aotc.runtime.state.state_source import Bound
    from aotc.runtime.stats import Stats

OnMiss = Literal["error", "eager"] | Callable[..., Any]


class ModelSignature:
    """The signature of the model's forward, as `inspect.signature` of a callable finds it."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is None:
            raise AttributeError("__signature__")
        from aotc.runtime.forward_signature import signature_of

        return signature_of(instance.artifact.signature, instance.module, instance.artifact.method)


def streams_on(device: torch.device) -> Streams | None:
    """A record of the CUDA streams of calls; none where the device has no streams."""
    if device.type != "cuda":
        return None
    from aotc.runtime.checkpoints.swap import Streams

    return Streams(device)


class BoundModule(msgspec.Struct, frozen=True):
    """A module, or None, to which compiled code is bound, and the tensors of its calls.

    `watch` looks at the module's attributes in every call; `check_again` compares all of it with the build. `eager`
    runs the model where that is not simply to call the module.
    """

    module: nn.Module | None
    state: Bound
    watch: ModuleWatch | None = None
    check_again: Callable[[], None] | None = None
    eager: Callable[..., Any] | None = None


class CompiledCall:
    """Compiled code as a callable with the module's calling convention: `aotc.Compiled`, which has one, says the rest.

    Each call is bound to the model's parameters, dispatched on its sizes (by the rule of `aotc.call_table.dispatch`),
    checked against every guard, and run. A call that no variant may run goes to `on_miss`. Many threads may call.
    """

    is_compiled_code = True
    """`aotc.reads` knows it by this where it stands in the place of a forward."""

    __signature__ = ModelSignature()

    loaded: Loaded | None = None
    """Where it came from, if `aotc.load` made it."""
    _on_sizes: Callable[[Shape], object] | None = None
    native: Any | None = None
    """The evaluator of `aotc.core`, asked first: it gives the result of a call, or NotImplemented."""
    renew_facts: Callable[[CompiledCall], None] = staticmethod(lambda call: None)
    """Gives the evaluator what Python has found, and accepted, of a module that changed; `forget` takes it away."""
    forget: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        artifact: Artifact,
        libraries: Sequence[Library],
        bound: BoundModule,
        device: torch.device,
        on_miss: OnMiss,
        graphs: Graphs | None = None,
        *,
        streams: Streams | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        """The regions of a model share `streams`, and the `pool` of their graphs."""
        module, state = bound.module, bound.state
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
        self._eager = bound.eager
        self._bind = make_binder(
            signature,
            any_sequence=all(variant.any_sequence for variant in artifact.variants),
            any_order=all(variant.any_order for variant in artifact.variants),
            empty_is_none=[
                name
                for name in (artifact.variants[0].empty_is_none if artifact.variants else ())
                if all(name in variant.empty_is_none for variant in artifact.variants)
            ],
        )
        self.makers: Sequence[Maker] = ()
        if any(isinstance(leaf, TensorLeaf) and leaf.default is not None for leaf in signature.leaves):
            from aotc.runtime.conversions.default_tensors import makers_of, with_defaults

            self.makers = makers_of(signature, device)
            self._bind = with_defaults(self._bind, self.makers)
        self._dispatcher = Dispatcher(signature, artifact.variants, artifact.model)
        self._guards = Guards(artifact, device, module)
        self._written_on_gpu = self._guards.mutated if device.type == "cuda" else []
        self._libraries, self._state = libraries, state
        self._watch, self._check_again = bound.watch, bound.check_again
        self._updating = threading.RLock()
        self._streams = streams or streams_on(device)
        self._take_state = self._streams.noted(state.take) if self._streams else state.take
        names = [spec.name for spec in artifact.state] if artifact.weights == "live" else []
        self._attached = [
            Attached(
                variant,
                direct_launch(variant, library, names, len(signature.leaves)),
                names,
                plain=module is None,
                dims=self._dispatcher.dims,
            )
            for variant, library in zip(artifact.variants, libraries, strict=True)
        ]
        buffers: list[Tensor] = []
        if graphs is not None:
            from aotc.runtime.cuda.graphs import add_graphs

            buffers = add_graphs(self._attached, self._dispatcher, names, device, graphs, state.take, pool)
        if self._streams:
            self._streams.keep(self, lambda: [*buffers, *(state.take() if state.owned else ())])
        self._counters = Counters([bucket_name(variant.bucket) for variant in artifact.variants])
        renew_in_child(self, CompiledCall._renew)

    def _renew(self) -> None:
        self._updating = threading.RLock()

    def __reduce__(self) -> Any:
        """Raises TypeError: neither copies nor other processes can have what is mapped into this one."""
        raise TypeError(
            f"{self!r} can be neither copied nor pickled, as its code is mapped into this process: save or copy the "
            "module or its state_dict, and call aotc.load again with that, in the process that runs it"
        )

    def __repr__(self) -> str:
        from aotc.amounts import counted

        buckets = counted(len(self._attached), "bucket")
        return f"<aotc.Compiled {self.artifact.model} for {self.artifact.target}, {buckets}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.native and (done := self.native(*args, **kwargs)) is not NotImplemented:
            return done
        began = time.perf_counter_ns()
        plan, leaves = None, []
        form: object = "sizes"
        try:
            leaves = self._bind(args, kwargs)
        except StructureMismatch as error:
            from aotc.call_table.values import describe_form

            form = error.path, describe_form(error.came)
        except DoesNotBind as error:
            from aotc.runtime.explain.misses import module_takes

            if not module_takes(self, args, kwargs):
                raise
            form = str(error)
        else:
            if is_followed():
                form, leaves = "followed", []
            else:
                plan = self._plan(leaves)
        if plan is None:
            return self._miss(args, kwargs, form, leaves)
        ran = leaves
        if not self._guards.hold(leaves, plan.shapes):
            from aotc.runtime.conversions.call_forms import in_compiled_layout

            copies = in_compiled_layout(self._guards, leaves, plan.shapes)
            if copies is None:
                return self._miss(args, kwargs, "guards", leaves)
            ran = copies
        if self._watch is not None:
            self._watch.check()
        state = self._take_state()
        if self._guards.state_aliases is not None and self._guards.state_aliases.issues(leaves, state):
            return self._miss(args, kwargs, "shares memory with the module", leaves)
        if forward_ad._current_level >= 0 and has_tangent(state):
            return self._miss(args, kwargs, "a tensor of the module has a tangent", leaves)
        if ran is not leaves:
            self._counters.count_copies(sum(copy is not leaf for copy, leaf in zip(ran, leaves, strict=True)))
        for index, strides in plan.strides:
            if ran[index].stride() != strides:
                strided = with_strides(ran[index], strides, detached=not ran[index].requires_grad)
                ran = [*ran[:index], strided, *ran[index + 1 :]]
        for index in self.unaligned(ran):
            ran = [*ran[:index], ran[index].clone(), *ran[index + 1 :]]
        result = self.launch(ran, state, plan, leaves)
        self._counters.count_call(plan, time.perf_counter_ns() - began)
        self.renew_facts(self)
        return result

    def unaligned(self, leaves: Sequence[Any]) -> list[int]:
        """Where a library for GPUs would write to an aligned copy, and the result would be lost."""
        return [index for index in self._written_on_gpu if leaves[index].data_ptr() % ALIGNMENT]

    def launch(self, ran: list[Any], state: State, plan: Plan, leaves: list[Any]) -> Any:
        run = self._attached[plan.variant].run
        if self._streams and self._streams.is_captured():
            run = self._streams.recorded(self._attached[plan.variant], state)
        try:
            return run(ran, state, plan, leaves)
        except BaseException as error:
            self._counters.count_error(type(error))
            if not isinstance(error, LibraryError):
                raise
            from aotc.runtime.explain.indices import with_indices

            raise with_indices(error, self.artifact.signature.leaves, leaves) from error.__cause__

    @property
    def on_sizes(self) -> Callable[[Shape], object] | None:
        """Called with the sizes of `dims` in each call that binds, before a bucket is chosen. It must not raise."""
        return self._on_sizes

    @on_sizes.setter
    def on_sizes(self, observer: Callable[[Shape], object] | None) -> None:
        self._on_sizes = observer
        if self.native is not None:
            self.native.observe(observer)

    def agree(self, leaves: list[Any]) -> None:
        """Called before a launch; only a model of several ranks overrides it."""

    def _plan(self, leaves: list[Any]) -> Plan | None:
        """None for a miss: no variant takes these sizes, or the leaves have none."""
        try:
            sizes = self._dispatcher.dims.read(leaves)
            if self.on_sizes is not None:
                self.on_sizes(sizes)
            return self._dispatcher.plan(sizes)
        except Exception:
            from aotc.runtime.conversions.call_forms import have_sizes

            if have_sizes(self._guards, leaves):
                raise
            return None

    def _miss(self, args: Sequence[Any], kwargs: Mapping[str, Any], form: object, leaves: Sequence[Any]) -> Any:
        from aotc.runtime.explain.misses import answer_miss

        return answer_miss(self, args, kwargs, form, leaves)

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        """Where this object is the module's forward (`child.forward = compiled`), eager is the forward of its class."""
        assert self.module is not None
        is_forward = vars(self.module).get("forward") is self
        method = self.artifact.method
        return (own_forward(self.module, method) if is_forward or method else self.module)(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """As `Compiled.explain`."""
        from aotc.runtime.explain.misses import explain_call

        return explain_call(self, args, kwargs)

    def parts(self) -> Sequence[CompiledCall]:
        """The callables that run libraries: this one, or those of its regions."""
        return [self]

    # -- swapping -----------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights) -> None:
        """As `Compiled.update_weights`."""
        from aotc.runtime.checkpoints.swap import update_weights

        update_weights(self, weights)

    def _part_of(self, checkpoint: Checkpoint) -> Checkpoint:
        """The part of a checkpoint that is for this process."""
        return checkpoint

    def _replaceable(self) -> tuple[Bound, Sequence[Sequence[Attached]]]:
        """The state that `update_weights` replaces, and the variants that run with each part of it."""
        return self._state, [self._attached]

    def refresh(self) -> None:
        """As `Compiled.refresh`."""
        if self.module is None:
            return
        if self._check_again is not None:
            self._check_again()
        self.forget()
        self._state.refresh()
        self._guards.refresh()
        if self._watch is not None:
            self._watch.refresh()

    # -- looking in ---------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """As `Compiled.stats`."""
        from aotc.runtime.stats import snapshot

        return snapshot(self._counters)

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the sizes that choose a bucket."""
        return self._dispatcher.dims.names

    @property
    def buckets(self) -> list[str]:
        """As `Compiled.buckets`."""
        return [bucket_name(variant.bucket) for variant in self.artifact.variants]
