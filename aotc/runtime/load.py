"""`aotc.load`: from a reference to a callable."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Never

import torch
from torch import nn

from aotc.errors import AotcError, BindError, CorruptError
from aotc.garbage import no_collection
from aotc.machine.this_host import Compat, refuse_free_threading
from aotc.reads.module_check import ModuleCheck, check_module, watch_module
from aotc.records import Artifact, Variant, part_name
from aotc.runtime.call import BoundModule, CompiledCall, OnMiss
from aotc.runtime.compiled import Compiled, class_for
from aotc.runtime.find import FoundBundle, find
from aotc.runtime.libraries.library import check_counts, open_library
from aotc.runtime.memory_errors import tells_of_memory
from aotc.runtime.options import LoadOptions, check_options, refuse_unknown
from aotc.runtime.select import Chosen, choose, select
from aotc.runtime.state.binding import bind_state

if TYPE_CHECKING:
    from aotc.runtime.checkpoints.checkpoint_files import Weights
    from aotc.runtime.compiled_regions import BoundRegions
    from aotc.runtime.libraries.library_folder import LibraryFiles
    from aotc.runtime.libraries.library_protocol import Library
    from aotc.runtime.libraries.required_operators import Imports
    from aotc.runtime.options import Graphs, Ranks
    from aotc.runtime.parallel.ranks import RanksOfLoad
    from aotc.runtime.state.state_source import Bound
    from aotc.store.signing.policy import Trust

DEFAULTS = LoadOptions()

_log = logging.getLogger("aotc")


def load(
    ref: str,
    module: nn.Module | None = None,
    *,
    weights: Weights | None = None,
    store: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    target: str | None = None,
    on_miss: OnMiss = "error",
    concurrency: int = 1,
    ignore: Collection[ModuleCheck] = (),
    cache: str | os.PathLike[str] | None = None,
    trust: Trust | None = None,
    graphs: Graphs | None = None,
    ranks: Ranks | None = None,
    allow_imports: Imports = False,
    compat: Compat = "minor",
    **moved: Never,
) -> Compiled:
    """Bind compiled code to a module or a checkpoint. No compiler is imported, then or later: nothing can recompile.

    Args:
        ref: `[STORE#]model[:tag]` or `[STORE#]model@sha256:…`; the tag is `latest` where none is said. Or a bundle in
            a registry: `oci://HOST[:PORT]/REPOSITORY[:tag]` or `oci://HOST[:PORT]/REPOSITORY@sha256:…`, or in object
            storage, where STORE is a URL as `s3://BUCKET/PREFIX`. What this machine runs of a remote bundle is fetched
            first, as `aotc.fetch` does.
        module: the module whose parameters and buffers the code uses in place, in eval mode, on the device that it is
            to run on. May be None for an artifact with frozen weights, or for a model without any.
        weights: instead of the module, its weights: a safetensors file, a shard index (`*.safetensors.index.json`), a
            folder that holds either, or a mapping of names to tensors. Nothing of the model's code is imported, and no
            module is made. A file is mapped on a CPU, and copied straight to a GPU; tensors of a mapping are used where
            they lie, if they can be. What no checkpoint holds comes from the artifact. A result whose class is not
            imported is a dict or a tuple.
        store: the store's folder or URL, where `ref` names none; else `$AOTC_STORE`, else `aotc-store`.
        device: where to run without a module. A module's tensors decide by themselves; another `device` is refused.
            Default: the GPU for a bundle that is only for GPUs, else the CPU.
        target: take the artifact of this target; else the most capable that this machine runs.
        on_miss: for a call that no variant may run: "error" raises MissError; "eager" runs the module and counts;
            a callable is called as `on_miss(error, *args, **kwargs)` and its result is returned.
        concurrency: on a CPU, how many calls may be inside one bucket's library at a time (the number of models in
            AOTInductor's container); further ones wait. The GIL is never held meanwhile, so `concurrency=N` serves N
            threads at once. How many cores one call uses is `torch.set_num_threads`: keep the product within the cores.
        ignore: checks of the module to leave out, of "class", "source", "attributes", "training".
        cache: the folder of what is fetched and of what `trust` remembers; else `$AOTC_CACHE_DIR`, else the
            user's cache folder. A local reference without keys needs none.
        trust: which bundles and artifacts may be loaded: `aotc.Trust(keys=…, signed_after=…, require_verified=…,
            allow_untested=…, advisories=…)`. Keys and a time may be `$AOTC_TRUSTED_KEYS` and `$AOTC_SIGNED_AFTER`.
        graphs: how a GPU launches: `aotc.Graphs(use=…, capture=…, outputs=…)`. By default what measured faster at build
            is a CUDA graph, captured now, and gives copies.
        ranks: of a model that was built for several ranks (`parallel:` in its manifest), this one's process group:
            `aotc.Ranks(GROUP, timeout=…)`.
        allow_imports: modules that may be imported because compiled code calls operators which they register: a list
            of names (a package's is good for all modules in it), or True for any that the record names. One that
            imports a compiler is refused.
        compat: "minor": torch must have the major.minor version that built the artifact. "abi": for a CPU and live
            weights, also another minor whose C shim has every symbol that the code calls, which is looked up before a
            library is opened. Run `aotc verify` there: torch promises the calls, and tests them in one version.

    Returns:
        A callable with the calling convention of `module.forward`, which is an `nn.Module` and can stand where the
        module stood: `parent.child = compiled`. Of a model that was built by regions, one that runs the module with
        compiled regions in it (`aotc.runtime.compiled_regions`); its `detach()` takes them out again.

    Raises:
        ReferenceFormatError, NotFoundError: `ref` names nothing, or another store than `store`.
        RemoteError: a registry or object storage was not reached in time, or refuses; StoreError: the store or the
            cache folder cannot be used; CorruptError: bytes are not what their digest says.
        SignatureError: the bundle is not signed as `trust` asks, and `reason` says why; or a key cannot be used.
        UnverifiedError: the artifact has no attestation that it passed, and `trust` requires one, or it has never run
            where it was built; `reason` says which.
        EnvironmentMismatchError: no artifact of the bundle runs on this machine; every mismatch is listed. Or this
            Python runs without its lock (free-threaded, as 3.14t).
        BindError: the module or the checkpoint is not what was built for; every mismatch of the first kind that differs
            is listed (the class; then code, attributes and training flags; then tensors). Or an option has a value
            that it cannot have.
        GroupError: a rank loads something else, has failed, or is not heard of in time: then no rank loads.
        OperatorError: compiled code calls operators that are not registered; each is named with its module.
        LibraryError: a library cannot be opened.
        MemoryLimitError: the host has too little memory, or this process may not have as much.

    Example:
        The model of manifests/quickstart.yaml takes float32 `[batch, 128, 256]`, for a batch of 1 or 4.

        >>> from examples.models import transformer_block
        >>> module = transformer_block(width=256, heads=4).eval()
        >>> compiled = aotc.load("aotc-store#quickstart", module)
        >>> with torch.no_grad():
        ...     compiled(torch.randn(4, 128, 256)).shape
        torch.Size([4, 128, 256])

        The same without the module, from its weights:

        >>> compiled = aotc.load("aotc-store#quickstart", weights=module.state_dict())
        >>> compiled(torch.randn(1, 128, 256)).shape
        torch.Size([1, 128, 256])
    """
    refuse_unknown(load, moved)
    options = LoadOptions(
        ref,
        weights=weights,
        store=store,
        device=device,
        target=target,
        on_miss=on_miss,
        concurrency=concurrency,
        ignore=ignore,
        cache=cache,
        trust=trust,
        graphs=graphs,
        ranks=ranks,
        allow_imports=allow_imports,
        compat=compat,
    )
    return load_module(options, module)


@tells_of_memory
def load_module(options: LoadOptions, module: nn.Module | None, found: FoundBundle | None = None) -> Compiled:
    """As `aotc.load`, by its stages: find, select, check, open, bind. Of what was found before, if it is given."""
    check_options(options, module)
    refuse_free_threading()
    if isinstance(module, Compiled):
        module = module.module
    timer, ranks = Timer(), None
    if options.ranks is not None:
        from aotc.runtime.parallel.ranks import RanksOfLoad

        ranks = RanksOfLoad(options.ranks.group, options.ranks.timeout)
    load_found = functools.partial(_load_found, options, module, ranks, timer)
    try:
        if found is not None:
            return load_found(found)
        return find(options, lambda *among: [choose(options, module, *among)[1]]).use(load_found)
    except BaseException as error:
        if ranks is not None:
            ranks.fail(error)
        raise


def _load_found(
    options: LoadOptions, module: nn.Module | None, ranks: RanksOfLoad | None, timer: Timer, found: FoundBundle
) -> Compiled:
    chosen = select(options, module, found, ranks)
    timer.took("record")
    call = bind_artifact(chosen, module, options, ranks=ranks, timer=timer)
    with no_collection():
        from aotc.runtime.native import use_native

        use_native(call)
    if ranks is not None:
        ranks.agree("loaded", "")
    reference, where = options.place()
    call.loaded = Loaded(reference.name, where, found.bundle.digest, timer.parts)
    count, target = len(call.artifact.variants), call.artifact.target
    buckets = "bucket" if count == 1 else "buckets"
    text = "loaded %s from %s, %s for %s: %d %s in %s"
    _log.info(text, reference.name, where, found.bundle.digest, target, count, buckets, timer)
    return compiled_module(call)


def bind_artifact(
    chosen: Chosen,
    module: nn.Module | None,
    options: LoadOptions = DEFAULTS,
    *,
    ranks: RanksOfLoad | None = None,
    timer: Timer | None = None,
) -> CompiledCall:
    """The callable over an artifact: the stages check, open and bind. Raises as `load` does.

    The record is trusted, since it was checked when it entered the store: where it is to blame for another error, it is
    a CorruptError.
    """
    timer = timer or Timer()
    with blaming_the_record(chosen.artifact):
        checked = check(chosen, module, options, ranks)
        timer.took("module")
        libraries = open_libraries(chosen, options)
        timer.took("libraries")
        call = bind(chosen, checked, libraries, options, ranks)
        timer.took("graphs")
        return call


def check(
    chosen: Chosen, module: nn.Module | None, options: LoadOptions, ranks: RanksOfLoad | None = None
) -> BoundModule | BoundRegions:
    """The module, or the weights in its place, which are what the artifact was built for. Raises BindError."""
    artifact, device, read_file = chosen.artifact, chosen.device, chosen.read_file
    if module is not None and options.weights is not None:
        raise BindError(
            "both a module and weights were given",
            hint="load the weights into the module, or leave the module out",
        )
    if device.type == "cuda":
        from aotc.runtime.cuda.captures import refuse_captures

        refuse_captures(device, artifact.model)
    if not artifact.variants:
        message = f"the artifact of `{artifact.model}` for {artifact.target} holds no variant"
        raise CorruptError(message, hint="it was not written by `aotc build`: build it again")
    if artifact.trains:
        from aotc.runtime.training.training_library import check_trainable

        check_trainable(artifact, module, chosen.graphs)
    if artifact.regions:
        from aotc.runtime.compiled_regions import check_regions

        return check_regions(chosen, module, options)
    if module is None:
        return BoundModule(None, _state_of_weights(chosen, options, ranks))
    compare = functools.partial(check_module, artifact, module, options.ignore, read_file)
    compare()
    with no_collection():
        watch = watch_module(artifact, module, options.ignore, read_file)
        return BoundModule(module, bind_state(artifact, module, device), watch, compare)


def _state_of_weights(chosen: Chosen, options: LoadOptions, ranks: RanksOfLoad | None) -> Bound:
    if options.weights is None:
        return bind_state(chosen.artifact, None, chosen.device)
    from aotc.runtime.checkpoints.state import bind_weights

    return bind_weights(chosen.artifact, options.weights, chosen.device, chosen.read_file, ranks)


def open_libraries(chosen: Chosen, options: LoadOptions) -> list[Library]:
    """The libraries of an artifact's variants. Raises OperatorError, LibraryError, CorruptError."""
    artifact = chosen.artifact
    if needs := artifact.operators:
        from aotc.runtime.libraries.required_operators import provide_operators

        provide_operators(needs, options.allow_imports)
    with no_collection():
        files = [chosen.files_of(variant) for variant in artifact.variants]
        libraries = []
        for each, variant in zip(files, artifact.variants, strict=True):
            began = time.perf_counter()
            libraries.append(open_variant(each, variant, chosen.device, options.concurrency))
            _log.debug(
                "%s: opened the library of %s, %d bytes, in %.1f ms",
                artifact.model,
                part_name(variant.region, variant.bucket),
                sum(file.size for file in variant.files),
                1000 * (time.perf_counter() - began),
            )
        if chosen.device.type == "cpu":
            from aotc.runtime.libraries.openmp import spin_briefly

            spin_briefly()
        return libraries


def open_variant(files: LibraryFiles, variant: Variant, device: torch.device, concurrency: int) -> Library:
    """The library of a variant; of one for training, both. Raises LibraryError, CorruptError."""
    library = open_library(files, device, concurrency)
    check_counts(library, variant)
    if variant.backward is None:
        return library
    from aotc.runtime.training.training_library import open_backward, with_backward

    backward = open_backward(files.of(variant.backward.library), device, concurrency)
    return with_backward(library, variant, backward)


def bind(
    chosen: Chosen,
    checked: BoundModule | BoundRegions,
    libraries: Sequence[Library],
    options: LoadOptions,
    ranks: RanksOfLoad | None = None,
) -> CompiledCall:
    """The callable. On a GPU its graphs are captured. Raises BindError for options that do not suit the module."""
    artifact, device = chosen.artifact, chosen.device
    graphs = None if artifact.trains or device.type != "cuda" else chosen.graphs
    with no_collection():
        if isinstance(checked, BoundModule):
            if ranks is None:
                return CompiledCall(artifact, libraries, checked, device, options.on_miss, graphs)
            from aotc.runtime.parallel.rank_call import ParallelCall

            return ParallelCall(artifact, libraries, checked, device, options.on_miss, graphs, ranks=ranks)
        if ranks is None:
            from aotc.runtime.compiled_regions import CompiledRegions

            return CompiledRegions(artifact, libraries, checked, device, options.on_miss, graphs)
        from aotc.runtime.parallel.rank_call import ParallelRegions

        return ParallelRegions(artifact, libraries, checked, device, options.on_miss, graphs, ranks=ranks)


def compiled_module(call: CompiledCall) -> Compiled:
    """The module whose calls are `call`; or that has it in the place of the method that was compiled."""
    if call.module is None:
        from aotc.runtime.checkpoints.without_module import CompiledAlone

        return CompiledAlone(call)
    base = Compiled
    if call.artifact.regions:
        from aotc.runtime.compiled_regions import CompiledByRegions

        base = CompiledByRegions
    own = class_for(base, type(call.module), call.artifact.method)
    compiled: Compiled = object.__new__(own)
    object.__setattr__(compiled, "_aotc", call)
    object.__setattr__(compiled, "__dict__", vars(call.module))
    return compiled


@contextmanager
def blaming_the_record(artifact: Artifact) -> Iterator[None]:
    """Raise CorruptError in place of an internal error where the record is the cause."""
    try:
        yield
    except (AotcError, MemoryError):
        raise
    except Exception as error:
        from aotc.store.layout.check_record import explain_unsound

        if unsound := explain_unsound(artifact):
            raise unsound from error
        raise


class Loaded(NamedTuple):
    """The reference and the store of a load, the digest of the bundle, and milliseconds by part; `prepare_ms` of what
    `aotc.prepare` did before, which was in another process where this one is `forked`."""

    ref: str
    store: str
    digest: str
    load_ms: dict[str, float]
    prepare_ms: dict[str, float] | None = None
    forked: bool = False


class Timer:
    """Milliseconds of a load by its parts."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.parts: dict[str, float] = {}

    def took(self, part: str) -> None:
        """Add the time since the last call of `took` as that of this part."""
        now = time.perf_counter()
        self.parts[part] = round(1000 * (now - self._last), 1)
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {ms}" for part, ms in self.parts.items())
        return f"{1000 * (self._last - self._began):.1f} ms ({parts})"
