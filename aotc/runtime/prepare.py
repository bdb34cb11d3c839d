"""`aotc.prepare`: all of a load that needs no device, once, for this process and for the processes that it forks."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Never, NoReturn

import msgspec
import torch
from torch import nn

from aotc.errors import BindError, ForkError, Issue
from aotc.machine.environment import cpu_features, torch_library
from aotc.machine.forks import end_threads, end_threads_before_forks
from aotc.machine.this_host import Compat, refuse_free_threading
from aotc.runtime.find import FoundBundle, find
from aotc.runtime.libraries.files import opened
from aotc.runtime.libraries.library import calls_back
from aotc.runtime.libraries.required_operators import Imports, provide_operators
from aotc.runtime.load import Timer, blaming_the_record, load_module
from aotc.runtime.memory_errors import tells_of_memory
from aotc.runtime.native import open_core
from aotc.runtime.options import LoadOptions, check_options, refuse_unknown
from aotc.runtime.select import accepted, choose, select_target

if TYPE_CHECKING:
    from aotc.reads.module_check import ModuleCheck
    from aotc.records import Artifact
    from aotc.runtime.call import OnMiss
    from aotc.runtime.checkpoints.checkpoint_files import Weights
    from aotc.runtime.compiled import Compiled
    from aotc.runtime.find import Entries, ReadArtifact
    from aotc.runtime.options import Given, Graphs, Ranks
    from aotc.store.layout.bundle import BundleEntry
    from aotc.store.signing.policy import Trust

_log = logging.getLogger("aotc")


def prepare(
    ref: str,
    *,
    weights: Weights | None = None,
    store: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    target: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    trust: Trust | None = None,
    allow_imports: Imports = False,
    compat: Compat = "minor",
    **moved: Never,
) -> Prepared:
    """Do all of a load that needs no device. `prepared.load(…)` does the rest, here or in a forked child.

    The bundle is found, fetched where it is remote, and checked, signatures included. Its records are decoded and its
    libraries are in memory, and so are its frozen weights, or those that are given. Later loads read no store. No GPU
    is started and no thread is left, so a process may fork afterwards; children share the memory.

    Args:
        device: the kind of device that loads are for; as for `aotc.load`, a GPU for a bundle that is only for GPUs,
            else the CPU. For GPUs the artifacts of all their targets are read, unless `target` names one.
        ref, weights, store, target, cache, trust, allow_imports, compat: as for `aotc.load`. On a CPU, weights are laid
            out as the code takes them; processes share them until one writes. For a GPU a file is mapped, and each load
            copies it there.

    Raises:
        The errors of `aotc.load`, except those about a module, a GPU or a group, which `prepared.load` raises.

    Example:
        >>> prepared = aotc.prepare("aotc-store#quickstart", weights=module.state_dict())
        >>> compiled = prepared.load()
        >>> compiled(torch.randn(1, 128, 256)).shape
        torch.Size([1, 128, 256])
        >>> prepared.load()(torch.randn(4, 128, 256)).shape  # as often as you like, here or in a forked child
        torch.Size([4, 128, 256])
    """
    refuse_unknown(prepare, moved)
    asked = LoadOptions(
        ref,
        weights=weights,
        store=store,
        device=device,
        target=target,
        cache=cache,
        trust=trust,
        allow_imports=allow_imports,
        compat=compat,
    )
    check_options(asked, None)
    refuse_free_threading()
    return Prepared(asked)


class Prepared:
    """What `aotc.prepare` gives: a bundle without its device.

    Attributes:
        ref: the reference that was prepared. Loads are of the bundle that it named then, of this `digest`.
        digest: of the bundle.
        kind: the kind of device, "cpu" or "cuda".
        prepare_ms: milliseconds by part.
    """

    @tells_of_memory
    def __init__(self, asked: LoadOptions) -> None:
        timer = Timer()
        reference, where = asked.place()
        self.ref, self._process = str(reference.name), os.getpid()
        self._found = find(asked, functools.partial(_candidates, asked)).use(functools.partial(_fill, asked, timer))
        self.digest, self.kind = self._found.bundle.digest, _kind(asked, self._found.bundle.artifacts)
        weights = _prepared_weights(asked, self._found)
        self._found.read_artifact = functools.partial(_read_of_kind, self.ref, self.kind, self._found.read_artifact)
        timer.took("weights")
        self._asked = msgspec.structs.replace(asked, weights=weights, store=None if reference.store else where)
        self.prepare_ms = timer.parts
        if (early := sys.modules.get("aotc.early")) is not None:
            early.wait()
        end_threads()
        _alive.add(self)
        _log.info("prepared %s from %s, %s for %s in %s", self.ref, where, self.digest, self.kind, timer)

    def load(
        self,
        module: nn.Module | None = None,
        *,
        device: torch.device | str | None = None,
        on_miss: OnMiss = "error",
        concurrency: int = 1,
        ignore: Collection[ModuleCheck] = (),
        graphs: Graphs | None = None,
        ranks: Ranks | None = None,
        **moved: Never,
    ) -> Compiled:
        """The rest of the load, as `aotc.load` does it; each call gives a callable of its own.

        Of weights that the model writes to, each callable has a copy.

        Raises:
            ForkError: this process was forked from one whose GPU, or process group, it cannot use.
            BindError: also where the module or `device` is of another kind than was prepared.
            The errors of `aotc.load` about the machine, the module, a group and options.
        """
        refuse_unknown(Prepared.load, moved)
        asked = msgspec.structs.replace(
            self._asked,
            device=self._asked.device if device is None else device,
            on_miss=on_miss,
            concurrency=concurrency,
            ignore=ignore,
            graphs=graphs,
            ranks=ranks,
        )
        if os.getpid() != self._process:
            check_options(asked, module)
            self._check_fork(asked)
        compiled = load_module(asked, module, self._found)
        call = compiled._aotc
        assert call.loaded is not None
        call.loaded = call.loaded._replace(prepare_ms=self.prepare_ms, forked=os.getpid() != self._process)
        return compiled

    def _check_fork(self, asked: LoadOptions) -> None:
        """Raises ForkError with everything that this process has inherited and cannot use."""
        issues = []
        kind = self.kind if asked.device is None else torch.device(asked.device).type
        if kind == "cuda" and (torch.cuda._is_in_bad_fork() or _fork.context):
            issues.append(
                Issue(
                    "CUDA was initialised before the fork, and its context is the parent's",
                    where="cuda",
                    expected="no context at the fork",
                    actual=f"a context of process {_fork.parent}",
                    hint="touch no GPU before the fork: no tensor on it, no aotc.early.start(cuda=True), and no "
                    "torch.cuda.is_available() unless PYTORCH_NVML_BASED_CUDA_CHECK=1; or start it with `spawn`",
                )
            )
        if asked.ranks is not None and _fork.group:
            issues.append(
                Issue(
                    "the process group was made before the fork, and its connections are the parent's",
                    where="group",
                    expected="a group of this process",
                    actual=f"one of process {_fork.parent}",
                    hint="call torch.distributed.init_process_group in each child",
                )
            )
        if issues:
            raise ForkError(
                f"process {os.getpid()} was forked from {_fork.parent}, and cannot load `{self.ref}` as it is",
                issues=tuple(issues),
                parent=_fork.parent,
            )
        _fork.warn(self.ref)

    def __repr__(self) -> str:
        return f"<aotc.Prepared {self.ref} for {self.kind}>"

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: what is in this process's memory reaches a child by a fork alone."""
        raise TypeError(
            f"{self!r} cannot be pickled: prepare in a module that the parent imports before it forks, and let the "
            "child import that module"
        )


# -- before the device ------------------------------------------------------------------------------------------------


def _kind(asked: LoadOptions, entries: Entries) -> str:
    """The kind of device, without asking a GPU whether it is there."""
    if asked.device is not None:
        return torch.device(asked.device).type
    return "cuda" if {entry.target.partition(":")[0] for entry in entries} == {"cuda"} else "cpu"


def _candidates(asked: LoadOptions, entries: Entries, read: ReadArtifact) -> Sequence[BundleEntry]:
    """The artifacts that loads may take: which of several for GPUs, only a GPU tells. Raises as `select_target`."""
    kind = _kind(asked, entries)
    if kind == "cpu":
        return [choose(msgspec.structs.replace(asked, device="cpu"), None, entries, read)[1]]
    found = [
        entry for entry in entries if entry.target.partition(":")[0] == kind and asked.target in (None, entry.target)
    ]
    if not found:
        select_target(entries, read, torch.device(kind), asked.target, asked.compat)
    return found


def _read_of_kind(ref: str, prepared: str, read: ReadArtifact, entry: BundleEntry) -> Artifact:
    """Raises BindError where a load asks for an artifact for another kind of device than was prepared."""
    kind = entry.target.partition(":")[0]
    if kind != prepared:
        raise BindError(
            f"`{ref}` was prepared for {prepared}, and is to run on {kind}",
            hint=f'aotc.prepare(…, device="{kind}")',
            expected=prepared,
            actual=kind,
        )
    return read(entry)


def _fill(asked: LoadOptions, timer: Timer, found: FoundBundle) -> FoundBundle:
    """Read what loads will ask for."""
    here = [entry for entry in found.bundle.artifacts if found.has(entry)]
    candidates = _candidates(asked, here or found.bundle.artifacts, found.read_artifact)
    artifacts = [accepted(asked, found, entry) for entry in candidates]
    timer.took("record")
    on_cpu = _kind(asked, found.bundle.artifacts) == "cpu"
    for artifact in artifacts:
        with blaming_the_record(artifact):
            provide_operators(artifact.operators, asked.allow_imports)
            for part in (artifact, *artifact.kinds):
                _read_part(asked, part, found, on_cpu)
    open_core()
    timer.took("libraries")
    return found


def _read_part(asked: LoadOptions, artifact: Artifact, found: FoundBundle, on_cpu: bool) -> None:
    """The files of the code of one rank, or of all."""
    values = {variant.read_values: None for variant in artifact.variants}
    for file in (artifact.module.attributes_file, artifact.constants, *values):
        if file is not None:
            found.read_file(file)
    files_of = functools.partial(found.files_of, artifact)
    if artifact.variants and asked.compat == "abi":
        from aotc.runtime.libraries.torch_abi import check_symbols

        check_symbols(artifact, files_of)
    for variant in artifact.variants:
        files = files_of(variant)
        if not on_cpu or calls_back(files):
            continue
        cpu_features()  # asks the kernel for AMX's tiles, for this process and its children
        names = [files.library] if variant.backward is None else [files.library, variant.backward.library]
        for name in names:
            with opened(files.of(name)) as path:
                end_threads_before_forks(ctypes.CDLL(path), torch_library())


def _prepared_weights(asked: LoadOptions, found: FoundBundle) -> Given:
    """For a CPU, the tensors as the code takes them; else the checkpoint, open. Raises BindError."""
    if asked.weights is None:
        return None
    from aotc.early import read_ahead
    from aotc.runtime.checkpoints.checkpoint_files import FileCheckpoint, open_weights
    from aotc.runtime.checkpoints.state import CheckpointState, bind_weights

    checkpoint = open_weights(asked.weights)  # type: ignore[arg-type]
    if isinstance(checkpoint, FileCheckpoint):
        read_ahead(checkpoint.files)
    if _kind(asked, found.bundle.artifacts) == "cpu":
        (entry,) = _candidates(asked, found.bundle.artifacts, found.read_artifact)
        artifact = found.read_artifact(entry)
        if not artifact.regions and artifact.parallel is None:
            with blaming_the_record(artifact):
                bound = bind_weights(artifact, checkpoint, torch.device("cpu"), found.read_file)
            assert isinstance(bound, CheckpointState)
            return bound
    checkpoint.owned = False  # several loads read it
    return checkpoint


# -- forks ------------------------------------------------------------------------------------------------------------


class _Fork:
    """What this process's parent was like when it forked."""

    parent = 0
    threads: tuple[str, ...] = ()
    group = False
    context = False

    def look(self) -> None:
        """Before a fork."""
        self.parent = os.getpid()
        self.threads = tuple(one.name for one in threading.enumerate() if one is not threading.current_thread())
        distributed, early = sys.modules.get("torch.distributed"), sys.modules.get("aotc.early")
        self.group = distributed is not None and distributed.is_available() and distributed.is_initialized()
        self.context = self.context or (early is not None and early.has_context())  # a grandparent's counts, too

    def warn(self, ref: str) -> None:
        """Say once in a child which threads its parent had."""
        if self.threads:
            _log.warning(
                "%s: process %d had the threads %s when it forked this one; a lock that one of them held stays locked "
                "here: fork before threads start",
                ref,
                self.parent,
                ", ".join(self.threads),
            )
            self.threads = ()


_fork = _Fork()
_alive: weakref.WeakSet[Prepared] = weakref.WeakSet()


def _before() -> None:
    if _alive:
        _fork.look()


def _in_child() -> None:
    """Children would draw the same random numbers from torch; Python's `random` sees to itself."""
    if _alive:
        seed = torch.default_generator.seed()
        if torch.version.cuda and not torch.cuda._is_in_bad_fork():
            torch.cuda.manual_seed_all(seed)


os.register_at_fork(before=_before, after_in_child=_in_child)
