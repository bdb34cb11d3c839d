"""`aotc.load`: from a reference to a callable."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Never, TypeVar, get_args

import torch
from torch import nn

from aotc.errors import AotcError, BindError, CorruptError
from aotc.garbage import no_collection
from aotc.machine.environment import Compat, refuse_free_threading
from aotc.reads.module_check import ModuleCheck, check_module, watch_module
from aotc.records import Artifact, File, Variant, part_name
from aotc.runtime.call import CompiledCall, OnMiss
from aotc.runtime.compiled import Compiled, compiled_module
from aotc.runtime.libraries.files import FilesInMemory, read_all
from aotc.runtime.libraries.library import Library, check_counts, open_library
from aotc.runtime.memory_errors import tells_of_memory
from aotc.runtime.select import device_of, select_target
from aotc.runtime.state.weights import Bound, bind_state
from aotc.store.layout.bundle import Bundle, read_artifact, read_bundle
from aotc.store.layout.reader import StoreReader
from aotc.store.reference import is_remote, parse_reference, store_named

if TYPE_CHECKING:
    from aotc.runtime.checkpoints.checkpoint_files import Checkpoint, Weights
    from aotc.runtime.checkpoints.state import CheckpointState
    from aotc.runtime.libraries.library_folder import LibraryFiles
    from aotc.runtime.libraries.required_operators import Imports
    from aotc.runtime.options import Graphs, Ranks, Trust
    from aotc.runtime.parallel.ranks import RanksOfLoad
    from aotc.store.layout.bundle import BundleEntry
    from aotc.store.reference import Reference
    from aotc.store.remote.fetching import Choose

    FilesOf = Callable[[Variant], LibraryFiles]
    Given = Weights | Checkpoint | CheckpointState | None

T = TypeVar("T")
Entries = Sequence["BundleEntry"]
Read = Callable[["BundleEntry"], Artifact]

DEFAULT_STORE = "aotc-store"
_TRUST = {"AOTC_TRUSTED_KEYS", "AOTC_SIGNED_AFTER", "AOTC_REQUIRE"}
_log = logging.getLogger("aotc")

OptionCheck = tuple[str, Any, bool, str]
"""Of an option: its name, its value, whether it may be that, and what it may be."""

READ_LIMIT = (256 << 20) + (1 << 20)
"""Bytes that a file may have that is read into memory: a module's attributes, its constants with their names."""


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
    if moved:
        from aotc.runtime.explain.arguments import unknown_options

        raise unknown_options(load, moved)
    return LoadRequest(
        *(ref, weights, store, device, target, on_miss, concurrency, ignore, cache),
        *(trust, graphs, ranks, allow_imports, compat),
    ).load(module)


class FoundBundle:
    """A bundle in a local store, and what was read of it: each part once."""

    def __init__(self, store: StoreReader, bundle: Bundle) -> None:
        self.store, self.bundle = store, bundle
        self.read_artifact: Read = functools.cache(lambda entry: read_artifact(store, entry))
        self.read_file = functools.cache(lambda file: store.blobs.load(file, READ_LIMIT))
        self.has = functools.cache(lambda entry: store.blobs.has(entry.digest, entry.size))
        self.files: dict[tuple[File, ...], FilesInMemory] = {}
        self.attested: dict[str, Artifact] = {}

    def files_of(self, artifact: Artifact, variant: Variant) -> FilesInMemory:
        """The files of a variant. When the first is asked for, those of all are read, several at a time."""
        if variant.files not in self.files:
            self.files |= read_all(artifact.variants, self.store.blobs)
        return self.files[variant.files]


class LoadRequest(NamedTuple):
    """The arguments of a load but for the module. `find` needs no device, and `aotc.prepare` does it; `load` is all."""

    ref: str
    weights: Given
    store: str | os.PathLike[str] | None
    device: torch.device | str | None
    target: str | None
    on_miss: OnMiss
    concurrency: int
    ignore: Collection[ModuleCheck]
    cache: str | os.PathLike[str] | None
    trust: Trust | None
    graphs: Graphs | None
    ranks: Ranks | None
    allow_imports: Imports
    compat: Compat

    def place(self) -> tuple[Reference, str]:
        """The reference, and the store that it is in."""
        reference = parse_reference(self.ref)
        store = os.fspath(self.store) if self.store else None
        return reference, store_of(store_named(reference, store, "store="))

    @property
    def signers(self) -> tuple[Any, Any, Any]:
        """The keys, the time and the folder that `read_trust` takes."""
        return (self.trust.keys, self.trust.signed_after, self.cache) if self.trust else (None, None, self.cache)

    def find(self, choose: Choose, use: Callable[[FoundBundle], T]) -> T:
        """`use` of the bundle, which is signed as asked. Of a remote one, what `choose` chooses is fetched."""
        reference, where = self.place()
        if is_remote(where):
            from aotc.runtime.fetch import load_fetched

            return load_fetched(self, choose, lambda *found: use(FoundBundle(*found)))
        opened = StoreReader.open(Path(where))
        bundle = read_bundle(opened, reference)
        if self.trust is not None or _TRUST & os.environ.keys():
            from aotc.store.signing.trust import check_bundle

            check_bundle(opened, bundle, reference, *self.signers)
        return use(FoundBundle(opened, bundle))

    def choose(
        self,
        module: nn.Module | None,
        entries: Entries,
        read: Read,
        has: Callable[[BundleEntry], bool] = lambda _: True,
    ) -> tuple[torch.device, BundleEntry]:
        """Where the code runs, and the artifact for that, of those that the store `has`: some may not be fetched."""
        on = device_of(module, self.device, {entry.target for entry in entries})
        here = [entry for entry in entries if has(entry)]
        among = entries if self.target or not here else here
        if len(among) < len(entries):
            absent = ", ".join(entry.target for entry in entries if entry not in among)
            _log.info("%s: the artifacts for %s are not in this store", self.place()[0].name, absent)
        target = select_target(among, read, on, self.target, self.compat).target
        return on, next(entry for entry in among if entry.target == target)

    def accepted(self, found: FoundBundle, entry: BundleEntry) -> Artifact:
        """The artifact, which has run where it was built, or is attested, and is as `trust` asks."""
        artifact = found.read_artifact(entry)
        if not (self.trust.asks_of(artifact) if self.trust else artifact.untested):
            return artifact
        from aotc.runtime.attested import attested_once

        return attested_once(self, found, entry)

    @tells_of_memory
    def load(self, module: nn.Module | None, found: FoundBundle | None = None) -> Compiled:
        """As `aotc.load`; of what was found before, if it is given."""
        check_options(self, module)
        refuse_free_threading()
        if isinstance(module, Compiled):
            module = module.module
        timer, ranks = Timer(), None
        if self.ranks is not None:
            from aotc.runtime.parallel.ranks import RanksOfLoad

            ranks = RanksOfLoad(self.ranks.group, self.ranks.timeout)
        bind = functools.partial(self._bind, module, ranks, timer)
        try:
            if found is not None:
                return bind(found)
            return self.find(lambda *among: [self.choose(module, *among)[1]], bind)
        except BaseException as error:
            if ranks is not None:
                ranks.fail(error)
            raise

    def _bind(self, module: nn.Module | None, ranks: RanksOfLoad | None, timer: Timer, found: FoundBundle) -> Compiled:
        on, entry = self.choose(module, found.bundle.artifacts, found.read_artifact, found.has)
        artifact = self.accepted(found, entry)
        if ranks is not None:
            artifact = ranks.join(artifact, entry.digest, on)
        elif artifact.parallel is not None:
            from aotc.runtime.explain.arguments import group_error

            raise group_error(artifact)
        files_of = functools.partial(found.files_of, artifact)
        if self.compat == "abi":
            from aotc.runtime.libraries.torch_abi import check_symbols

            check_symbols(artifact, files_of)
        graphs = self.graphs if on.type == "cuda" or (self.graphs and self.graphs.use == "always") else None
        if on.type == "cuda":
            from aotc.runtime.options import Graphs

            graphs = graphs or Graphs()
            if ranks is not None and not ranks.is_capturable(on):
                graphs = Graphs(use="never", capture=graphs.capture, outputs=graphs.outputs)
        timer.took("record")
        call = bind_artifact(
            *(artifact, files_of, module, on),
            on_miss=self.on_miss,
            concurrency=self.concurrency,
            ignore=self.ignore,
            read_file=found.read_file,
            weights=self.weights,
            graphs=graphs,
            allow_imports=self.allow_imports,
            timer=timer,
            ranks=ranks,
        )
        with no_collection():
            from aotc.runtime.native import use_native

            use_native(call)
        if ranks is not None:
            ranks.agree("loaded", "")
        reference, where = self.place()
        call.loaded = Loaded(reference.name, where, found.bundle.digest, timer.parts)
        _log.info(
            "loaded %s from %s, %s for %s: %d %s in %s",
            *(reference.name, where, found.bundle.digest, artifact.target, count := len(artifact.variants)),
            *("bucket" if count == 1 else "buckets", timer),
        )
        return compiled_module(call)


def bind_artifact(
    artifact: Artifact,
    files_of: FilesOf,
    module: nn.Module | None,
    device: torch.device,
    *,
    on_miss: OnMiss = "error",
    concurrency: int = 1,
    ignore: Collection[ModuleCheck] = (),
    read_file: Callable[[File], bytes],
    graphs: Graphs | None = None,
    weights: Given = None,
    allow_imports: Imports = False,
    timer: Timer | None = None,
    ranks: RanksOfLoad | None = None,
) -> CompiledCall:
    """The callable over an artifact whose libraries are `files_of(variant)`. Raises as `load` does.

    The record is trusted, since it was checked when it entered the store: where it is to blame for another error, it is
    a CorruptError.
    """
    timer = timer or Timer()
    with blaming_the_record(artifact):
        if module is not None and weights is not None:
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

            check_trainable(artifact, module, graphs)
            graphs = None
        on_gpu = graphs if device.type == "cuda" else None
        if artifact.regions:
            libraries = _open_all(artifact, files_of, device, concurrency, allow_imports)
            timer.took("libraries")
            from aotc.runtime.compiled_regions import attach_regions

            attached = attach_regions(artifact, libraries, module, device, on_miss, ignore, read_file, on_gpu, ranks)
            timer.took("module")
            return attached
        if module is not None:
            check_module(artifact, module, ignore, read_file)
        with no_collection():
            watch = watch_module(artifact, module, ignore, read_file) if module is not None else None
        state = _bind(artifact, module, weights, device, read_file, ranks)
        timer.took("module")
        libraries = _open_all(artifact, files_of, device, concurrency, allow_imports)
        timer.took("libraries")
        with no_collection():
            make = CompiledCall
            if ranks is not None:
                from aotc.runtime.parallel.rank_call import ParallelCall

                make = functools.partial(ParallelCall, ranks=ranks)  # type: ignore[assignment]
            compiled = make(
                artifact,
                libraries,
                state,
                module,
                device,
                on_miss,
                on_gpu,
                watch=watch,
                check_again=lambda: check_module(artifact, module, ignore, read_file) if module is not None else None,
            )
        timer.took("graphs")
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
        """What went by since the last part was this one."""
        now = time.perf_counter()
        self.parts[part] = round(1000 * (now - self._last), 1)
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {ms}" for part, ms in self.parts.items())
        return f"{1000 * (self._last - self._began):.1f} ms ({parts})"


def check_options(asked: LoadRequest, module: Any) -> None:
    """Raises BindError for options of a wrong type, which would otherwise be ignored on some machines."""
    one_text = isinstance(asked.ignore, str)
    checks: list[OptionCheck] = [
        ("ref", asked.ref, isinstance(asked.ref, str), "a text: [STORE#]model[:tag]"),
        ("module", module, module is None or isinstance(module, nn.Module), "a torch.nn.Module"),
        ("device", asked.device, _is_device(asked.device), "a torch.device, or a text like 'cpu', 'cuda' or 'cuda:0'"),
        ("cache", asked.cache, "\0" not in str(asked.cache), "a folder"),
        ("concurrency", asked.concurrency, isinstance(asked.concurrency, int) and asked.concurrency > 0, "1 or more"),
        _choice("compat", asked.compat, get_args(Compat)),
        ("ignore", asked.ignore, not one_text, f"a list, like [{asked.ignore!r}]"),
        *(_choice("ignore", check, get_args(ModuleCheck)) for check in ([] if one_text else asked.ignore)),
    ]
    if (asked.trust, asked.graphs, asked.ranks) != (None, None, None):
        from aotc.runtime.options import checks_of_groups

        checks += checks_of_groups(asked)
    if wrong := [(name, value, expected) for name, value, fits, expected in checks if not fits]:
        from aotc.runtime.explain.arguments import options_error

        raise options_error(wrong)


def _is_device(value: Any) -> bool:
    try:
        return value is None or torch.device(value) is not None
    except (RuntimeError, TypeError):
        return False


def _choice(name: str, value: Any, choices: Sequence[str]) -> OptionCheck:
    return name, value, value in choices, " or ".join(map(repr, choices))


def store_of(store: str | os.PathLike[str] | None) -> str:
    """The store that is named, else `$AOTC_STORE`, else `aotc-store`."""
    return os.fspath(store or os.environ.get("AOTC_STORE") or DEFAULT_STORE)


def _bind(
    artifact: Artifact,
    module: nn.Module | None,
    weights: Given,
    device: torch.device,
    read_file: Callable[[File], bytes],
    ranks: RanksOfLoad | None,
) -> Bound:
    if weights is None:
        with no_collection():
            return bind_state(artifact, module, device)
    from aotc.runtime.checkpoints.state import bind_weights

    return bind_weights(artifact, weights, device, read_file, ranks)


def _open_all(
    artifact: Artifact, files_of: FilesOf, device: torch.device, concurrency: int, allow_imports: Imports
) -> list[Library]:
    if needs := artifact.operators:
        from aotc.runtime.libraries.required_operators import provide_operators

        provide_operators(needs, allow_imports)
    with no_collection():
        files = [files_of(variant) for variant in artifact.variants]
        libraries = []
        for each, variant in zip(files, artifact.variants, strict=True):
            began = time.perf_counter()
            libraries.append(open_variant(each, variant, device, concurrency))
            _log.debug(
                "%s: opened the library of %s, %d bytes, in %.1f ms",
                *(artifact.model, part_name(variant.region, variant.bucket), sum(file.size for file in variant.files)),
                1000 * (time.perf_counter() - began),
            )
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
