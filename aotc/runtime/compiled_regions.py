"""A model by regions: the module itself runs, eagerly, with compiled code in the place of each region's forward."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from torch import nn

from aotc.amounts import counted
from aotc.call_table.misses import Explanation
from aotc.errors import BindError, Issue
from aotc.machine.forks import renew_in_child
from aotc.reads.attributes import own_forward
from aotc.reads.module_check import check_module, watch_module
from aotc.reads.state_specs import submodules
from aotc.reads.tensors import named_state
from aotc.records import Artifact, Region, part_name
from aotc.runtime.call import BoundModule, CompiledCall, OnMiss, streams_on
from aotc.runtime.compiled import HOOKS, Compiled
from aotc.runtime.conversions.call_forms import has_form
from aotc.runtime.state.binding import bind_state
from aotc.runtime.state.call_state import State
from aotc.runtime.state.read_write_lock import ReadWriteLock, set_all
from aotc.runtime.state.weights import ModuleState
from aotc.runtime.stats import BucketStats, Stats, add_to

if TYPE_CHECKING:
    from aotc.reads.watch import ModuleWatch
    from aotc.runtime.cuda.graphs import GraphPool
    from aotc.runtime.libraries.library_protocol import Library
    from aotc.runtime.options import Graphs, LoadOptions
    from aotc.runtime.padding.padded_regions import PaddedCalls
    from aotc.runtime.select import Chosen
    from aotc.runtime.state.state_source import Bound
    from aotc.runtime.variant import Attached


class CompiledByRegions(Compiled):
    """Of a model that was built by regions: the module runs, with its hooks."""

    __slots__ = ()

    @property
    def regions(self) -> dict[str, CompiledCall]:
        """The compiled code of each instance of a region by its path, with its own `stats()` and `explain()`."""
        return cast("dict[str, CompiledCall]", cast(Any, self._aotc).regions)

    def attach(self) -> None:
        """Put compiled code in the place of the regions' forwards again. Raises BindError where others stand there."""
        cast(Any, self._aotc).attach()

    def detach(self) -> None:
        """Give the regions their own forwards back. Attached, the module and its compiled code hold each other: detach
        a model that is replaced, for its memory to be freed with its last reference."""
        cast(Any, self._aotc).detach()


for _name in HOOKS:
    setattr(CompiledByRegions, f"register_{_name}", getattr(nn.Module, f"register_{_name}"))


class RegionForward:
    """Compiled code as the forward of one instance of a region: of each form of its calls that is attached.

    A copy of the module, or a pickle of it, has the class's own forward in its place: this one has the weights of the
    instance that it was made for. While it stands there, it keeps `model` alive.
    """

    is_compiled_code = True
    """`aotc.reads` knows it by this: it is not a forward that the module was given."""

    def __init__(self, instance: nn.Module) -> None:
        self.forms: dict[str, CompiledCall] = {}
        """By the names of the regions, which have this instance and are called in other forms."""
        self.attached: frozenset[str] = frozenset()
        self.instance = instance
        self.model: CompiledRegions | None = None
        self.__wrapped__ = own_forward(instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.forms) == 1:
            (compiled,) = self.forms.values()
            return compiled(*args, **kwargs)
        return self._of_form(args, kwargs)(*args, **kwargs)

    def _of_form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """The code of the form that the call has; of one that is not attached, the instance's own forward. A call of
        no form is a miss of the first."""
        for name, compiled in self.forms.items():
            if has_form(compiled, args, kwargs):
                return compiled if name in self.attached else self.__wrapped__
        return next(iter(self.forms.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Of the copied instance, which has no attributes yet when this is called: so that is its class's.
        return getattr, (self.instance, "forward")


class BoundRegions(msgspec.Struct, frozen=True):
    """A module of which regions are compiled. `check_again` compares these with the build; `watch` makes the look that
    each call of a region takes at its instance: of the region's artifact, the instance, and what it is called."""

    module: nn.Module
    check_again: Callable[[], None]
    watch: Callable[[Artifact, nn.Module, str], ModuleWatch]


class CompiledRegions(CompiledCall):
    """A model of which regions are compiled, with the module's calling convention. It is the module that runs.

    So `module(x)` and methods that call it (`generate`) run the compiled regions, too, under `torch.no_grad()`. A call
    of this object disables gradients by itself, except for regions with `train: true`. `detach()` gives the module its
    own forwards back. `on_miss` applies to a region's call, with the region's arguments; "eager" runs the instance's
    own forward.

    regions: the callable of each instance by its path, with its own `stats()` and `explain()`. Of an instance that is
        called in several forms (with a mask, and with None) one for each, by the path and what is given in that form.
    """

    def __init__(
        self,
        artifact: Artifact,
        libraries: Sequence[Library],
        bound: BoundRegions,
        device: torch.device,
        on_miss: OnMiss,
        graphs: Graphs | None = None,
    ) -> None:
        if graphs is not None and graphs.outputs == "view" and graphs.use != "never":
            raise BindError(
                f"the outputs of the regions of `{artifact.model}` cannot be views: another region of the same call "
                "may overwrite them before they are read",
                hint='leave out aotc.Graphs(outputs="view"), or build the model whole',
            )
        self.bound, self._check_again = bound, bound.check_again
        self._gate = ReadWriteLock()
        """Inside are calls of the model; `update_weights` is alone."""
        self._updating = threading.RLock()
        self._streams = streams_on(device)
        self._graphs, self._pool = graphs, _pool_of(graphs, device)
        self._padded: PaddedCalls | None = None
        if artifact.calls:
            from aotc.runtime.padding.padded_regions import PaddedCalls

            self._padded = PaddedCalls(artifact, device)
        self.artifact = artifact
        self.module: nn.Module = bound.module
        self.device = device
        self.on_miss = on_miss
        self.regions: dict[str, CompiledCall] = {}
        self._forwards: dict[str, list[tuple[str, nn.Module, RegionForward]]] = {}
        self._attached_names: frozenset[str] = frozenset()
        forwards: dict[str, RegionForward] = {}
        for region in artifact.regions:
            own = [lib for lib, v in zip(libraries, artifact.variants, strict=True) if v.region == region.name]
            self._forwards[region.name] = [self._forward(region, path, own, forwards) for path in region.instances]
        self._edges = _edges(self.module, list(forwards))
        renew_in_child(self, CompiledCall._renew)
        self.attach()

    def _forward(
        self, region: Region, path: str, libraries: Sequence[Library], forwards: dict[str, RegionForward]
    ) -> tuple[str, nn.Module, RegionForward]:
        instance = self.module.get_submodule(path)
        part = self.artifact.of_region(region, path)
        try:
            state = bind_state(part, instance, self.device, self._gate)
        except BindError as error:
            raise BindError(f"{path}: {error.message}", hint=error.hint, issues=error.issues) from error
        watch = self.bound.watch(part, instance, f"{self.artifact.model} {path}")
        bound = BoundModule(instance, state, watch, eager=own_forward(instance))
        compiled = self.regions[_key(region, path)] = CompiledCall(
            part,
            libraries,
            bound,
            self.device,
            self.on_miss,
            self._graphs,
            streams=self._streams,
            pool=self._pool,
        )
        forward = forwards.setdefault(path, RegionForward(instance))
        forward.forms[region.name] = compiled
        return path, instance, forward

    def __repr__(self) -> str:
        kinds = {region.instances for region in self.artifact.regions}
        count = sum(map(len, kinds))
        return (
            f"<aotc.Compiled {self.artifact.model} for {self.artifact.target}, {counted(count, 'region')} of "
            f"{counted(len(kinds), 'kind')}>"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._attached_names:
            raise BindError(
                f"`{self.artifact.model}` was detached from its module", hint="call attach(), or the module"
            )
        return self._gate.run_inside(lambda: self._call_inside(args, kwargs))

    def _call_inside(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._check_edges()
        if self._streams:
            self._streams.note()
            if self._streams.is_captured():
                self._streams.keep_for_replays(State(named_state(self.module).values()))
        if self.artifact.trains:
            return self._run(args, kwargs)
        with torch.no_grad():
            return self._run(args, kwargs)

    def parts(self) -> Sequence[CompiledCall]:
        return [*self.regions.values()]

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._padded is not None:
            return self._padded.run(self._run_module, args, kwargs)
        return self._run_module(*args, **kwargs)

    def _check_edges(self) -> None:
        if not all(owner.get(key) is child for owner, key, child in self._edges):
            raise BindError(
                f"regions of `{self.artifact.model}` were replaced in its module after the load",
                hint="call detach(), and aotc.load again, which checks the new ones",
            )

    def refresh(self) -> None:
        """Compare all regions with the build once more, as the load did, and go on with them as they are now.

        Raises BindError: with every way in which they are not what was built; or where a region is another object.
        """
        self._check_edges()
        self.bound.check_again()
        for compiled in self.regions.values():
            compiled.refresh()

    def attach(self, names: Collection[str] | None = None) -> None:
        """Put compiled code in the place of the forwards of these regions' instances; of all regions by default.

        Raises BindError where something else stands there.
        """
        names = self._forwards if names is None else names
        wanted = [part for name in names for part in self._forwards[name]]
        taken = [
            Issue("its forward was replaced already", where=path)
            for path, instance, forward in wanted
            if not _is_free(instance) and vars(instance)["forward"] is not forward
        ]
        if taken:
            raise BindError(
                f"regions of `{self.artifact.model}` are not free: compiled code would take another's place",
                issues=tuple(taken[:5]),
                hint="call detach() of what aotc.load gave for this module before; other libraries' hooks cannot stay",
            )
        for _, _, forward in wanted:
            forward.model = self
        try:
            set_all([vars(instance) for _, instance, _ in wanted], repeat("forward"), [part[2] for part in wanted])
            for name in names:
                for _, _, forward in self._forwards[name]:
                    forward.attached |= {name}
            self._attached_names |= set(names)
        except BaseException:  # raised by a signal's handler
            self.detach(names)
            raise

    def instances(self, name: str) -> list[str]:
        """The paths of a region's instances."""
        return [path for path, _, _ in self._forwards[name]]

    def detach(self, names: Collection[str] | None = None) -> None:
        """Give the instances of these regions their own forward back; of all regions by default.

        Then no cycle of references is left, and the model is freed with the last reference to it.
        """
        names = self._forwards if names is None else names
        for name in names:
            for _, instance, forward in self._forwards[name]:
                forward.attached -= {name}
                if not forward.attached:
                    if vars(instance).get("forward") is forward:
                        del vars(instance)["forward"]
                    forward.model = None
        self._attached_names -= set(names)

    def _replaceable(self) -> tuple[Bound, Sequence[Sequence[Attached]]]:
        """The module's tensors, which no call of the model that has begun sees replaced, neither in a region nor
        between two."""
        from aotc.runtime.checkpoints.region_swap import RegionStates

        parts = [
            (path, self.regions[_key(region, path)]) for region in self.artifact.regions for path in region.instances
        ]
        states = [(path, cast(ModuleState, call._state)) for path, call in parts]
        return RegionStates(self.module, states, self.device, self._gate), [call._attached for _, call in parts]

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """The bucket that a call is padded to, if it is. Nothing else is known before the module runs:
        `regions[path].explain(...)` says it of one region's call."""
        reason = Issue(
            "each region decides at its own call", hint="compiled.regions[path].explain(…), compiled.stats()"
        )
        padded = self._padded.explain(args, kwargs) if self._padded is not None else ("", ())
        return Explanation("regions", *padded, reasons=(reason,))

    def stats(self) -> Stats:
        """The regions' counters, those of all instances together: a call of the model counts once for each."""
        snapshots = [
            (region.name, self.regions[_key(region, path)].stats())
            for region in self.artifact.regions
            for path in region.instances
        ]
        buckets: dict[str, BucketStats] = {}
        kinds: dict[str, int] = {}
        errors: dict[str, int] = {}
        for name, stats in snapshots:
            for bucket, of_bucket in stats.buckets.items():
                add_to(buckets.setdefault(f"{name} {bucket}", BucketStats()), of_bucket)
            for kind, count in stats.miss_kinds.items():
                kinds[f"{name}: {kind}"] = kinds.get(f"{name}: {kind}", 0) + count
            for kind, count in stats.errors.items():
                errors[kind] = errors.get(kind, 0) + count
        return Stats(
            calls=sum(stats.calls for _, stats in snapshots),
            buckets=buckets,
            misses=sum(stats.misses for _, stats in snapshots),
            miss_kinds=kinds,
            contiguous_copies=sum(stats.contiguous_copies for _, stats in snapshots),
            errors=errors,
        )

    @property
    def buckets(self) -> list[str]:
        """The names of the regions' buckets, in the artifact's order."""
        return [part_name(variant.region, variant.bucket) for variant in self.artifact.variants]


def check_regions(chosen: Chosen, module: nn.Module | None, options: LoadOptions) -> BoundRegions:
    """The module, whose regions are those that were built. Raises BindError."""
    artifact, ignore, read_file = chosen.artifact, options.ignore, chosen.read_file
    if module is None:
        raise BindError(
            f"of `{artifact.model}` only regions are compiled, and no module was given to run the rest",
            hint="pass the module: aotc.load(ref, module)",
        )
    if options.on_miss not in ("error", "eager") and not callable(options.on_miss):
        raise BindError(f"on_miss is {options.on_miss!r}", hint='it may be "error", "eager" or a callable')
    paths = list(dict.fromkeys(path for region in artifact.regions for path in region.instances))
    try:
        instances = submodules(module, paths)
    except AttributeError as error:
        raise BindError(
            f"the module lacks regions of `{artifact.model}`: {error}",
            hint="load it with the model of its manifest, of as many layers",
        ) from error
    check_again = functools.partial(check_module, artifact, instances, ignore, read_file)
    check_again()

    def watch(part: Artifact, instance: nn.Module, name: str) -> ModuleWatch:
        return watch_module(part, instance, ignore, read_file, name=name, as_region=True)

    return BoundRegions(module, check_again, watch)


def _pool_of(graphs: Graphs | None, device: torch.device) -> GraphPool | None:
    """The pool that the graphs of all regions share: only one region runs at a time."""
    if graphs is None or graphs.use == "never":
        return None
    from aotc.runtime.cuda.graphs import GraphPool

    return GraphPool(device)


def _key(region: Region, path: str) -> str:
    """The path of an instance, with the form that the region's name ends with."""
    return path + region.name.removeprefix(region.instances[0])


def _edges(module: nn.Module, paths: Sequence[str]) -> list[tuple[dict[str, nn.Module | None], str, nn.Module]]:
    """From the module down to each region: what holds each submodule on the way, its name there, and itself."""
    names = [path.split(".") for path in paths]
    prefixes = sorted({".".join(parts[:end]) for parts in names for end in range(1, len(parts) + 1)})
    steps = [(prefix.rpartition(".")[0], prefix.rpartition(".")[2], prefix) for prefix in prefixes]
    return [(module.get_submodule(owner)._modules, key, module.get_submodule(path)) for owner, key, path in steps]


def _is_free(instance: nn.Module) -> bool:
    """Whether the instance runs its class's forward: a copy of an attached module has that one as its own."""
    forward = vars(instance).get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(instance).forward
