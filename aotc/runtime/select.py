"""The second stage of a load: where code runs, and which artifact of a bundle this machine runs and may load."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import torch
from torch import nn

from aotc.errors import BindError, CorruptError, EnvironmentMismatchError, Issue
from aotc.machine.compatibility import mismatches
from aotc.machine.environment import Compat, this_environment
from aotc.machine.targets import CPU_FEATURES, Target, parse_target
from aotc.runtime.options import Graphs, LoadOptions

if TYPE_CHECKING:
    from aotc.reads.outside import ReadFile
    from aotc.records import Artifact, Variant
    from aotc.runtime.find import Entries, FoundBundle, ReadArtifact
    from aotc.runtime.libraries.library_folder import LibraryFiles
    from aotc.runtime.parallel.ranks import RanksOfLoad
    from aotc.store.layout.bundle import BundleEntry

    class _ForTarget(Protocol):
        @property
        def target(self) -> str: ...


_log = logging.getLogger("aotc")

_ORDER = [*CPU_FEATURES]

C = TypeVar("C", bound="_ForTarget")


class Chosen(msgspec.Struct, frozen=True):
    """The artifact that is loaded, where it runs, how its files are read, and how a GPU launches it."""

    artifact: Artifact
    device: torch.device
    files_of: Callable[[Variant], LibraryFiles]
    read_file: ReadFile
    graphs: Graphs | None = None


def select(
    options: LoadOptions, module: nn.Module | None, found: FoundBundle, ranks: RanksOfLoad | None = None
) -> Chosen:
    """The artifact of a bundle for the module's device, or the one asked for. Raises as `aotc.load` does."""
    device, entry = choose(options, module, found.bundle.artifacts, found.read_artifact, found.has)
    artifact = accepted(options, found, entry)
    if ranks is not None:
        artifact = ranks.join(artifact, entry.digest, device)
    elif (parallel := artifact.parallel) is not None:
        raise BindError(
            f"`{artifact.model}` is the code of one of {parallel.size} ranks, and no group was given",
            hint=f"start {parallel.size} processes (torchrun --nproc-per-node={parallel.size}), and give each its "
            "process group: aotc.load(…, ranks=aotc.Ranks(torch.distributed.group.WORLD))",
            expected=str(parallel.size),
            actual="no group",
        )
    files_of = functools.partial(found.files_of, artifact)
    if options.compat == "abi":
        from aotc.runtime.libraries.torch_abi import check_symbols

        check_symbols(artifact, files_of)
    return Chosen(artifact, device, files_of, found.read_file, _graphs(options, device, ranks))


def choose(
    options: LoadOptions,
    module: nn.Module | None,
    entries: Entries,
    read: ReadArtifact,
    has: Callable[[BundleEntry], bool] = lambda _: True,
) -> tuple[torch.device, BundleEntry]:
    """Where the code runs, and the artifact for that, of those that the store `has`: some may not be fetched."""
    on = device_of(module, options.device, {entry.target for entry in entries})
    here = [entry for entry in entries if has(entry)]
    among = entries if options.target or not here else here
    if len(among) < len(entries):
        absent = ", ".join(entry.target for entry in entries if entry not in among)
        _log.info("%s: the artifacts for %s are not in this store", options.place()[0].name, absent)
    target = select_target(among, read, on, options.target, options.compat).target
    return on, next(entry for entry in among if entry.target == target)


def accepted(options: LoadOptions, found: FoundBundle, entry: BundleEntry) -> Artifact:
    """The artifact, which has run where it was built, or is attested, and is as `options.trust` asks."""
    artifact = found.read_artifact(entry)
    if not (options.trust.asks_of(artifact) if options.trust else artifact.untested):
        return artifact
    from aotc.runtime.attested import attested_once

    return attested_once(options, found, entry)


def _graphs(options: LoadOptions, device: torch.device, ranks: RanksOfLoad | None) -> Graphs | None:
    graphs = options.graphs
    if device.type != "cuda":
        return graphs if graphs and graphs.use == "always" else None
    graphs = graphs or Graphs()
    if ranks is not None and not ranks.is_capturable(device):
        return Graphs(use="never", capture=graphs.capture, outputs=graphs.outputs)
    return graphs


def device_of(module: nn.Module | None, device: torch.device | str | None, targets: Collection[str]) -> torch.device:
    """Where the code runs: the module's device, else the one asked for, else the only one in the bundle.

    Raises BindError for a module without values or on several devices, and where `device` is another than the module's,
    or a GPU that torch does not see.
    """
    tensors = {} if module is None else dict([*module.named_parameters(), *module.named_buffers()])
    found = {tensor.device for tensor in tensors.values()}
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if len(found) > 1 or empty:
        from aotc.amounts import listed

        where = f"several devices: {', '.join(sorted(map(str, found)))}" if len(found) > 1 else "the device meta"
        raise BindError(
            f"the module's tensors are on {where}" + (f"; without values are {listed(empty, 3)}" if empty else ""),
            hint="give it values: module.to_empty(device=…), then load_state_dict; or leave the module out, and give "
            "its checkpoint: aotc.load(REF, weights=…)"
            if empty
            else "move it to one with .to()",
        )
    asked = None if device is None else torch.device(device)
    if found:
        return _same(found.pop(), asked)
    if asked is None:
        kinds = {target.partition(":")[0] for target in targets}
        asked = torch.device("cuda" if kinds == {"cuda"} and torch.cuda.is_available() else "cpu")
    if asked.type == "cpu":
        return torch.device("cpu")  # a tensor's device is never cpu:0
    if asked.type == "cuda" and (asked.index or 0) >= torch.cuda.device_count():
        raise BindError(
            f"the device {asked} was asked for, and torch sees {torch.cuda.device_count()} GPUs",
            hint="check the driver, CUDA_VISIBLE_DEVICES and that torch is a CUDA build; or load with device='cpu'",
        )
    return torch.device("cuda", torch.cuda.current_device()) if str(asked) == "cuda" else asked


def _same(module: torch.device, asked: torch.device | None) -> torch.device:
    if asked is not None and (asked.type != module.type or asked.index not in (None, module.index or 0)):
        raise BindError(
            f"the device {asked} was asked for, and the module's tensors are on {module}",
            hint=f"move the module first: module.to('{asked}'); or leave `device` out",
        )
    return module


def select_target(
    entries: Sequence[BundleEntry],
    read: Callable[[BundleEntry], Artifact],
    device: torch.device,
    target: str | None,
    compat: Compat = "minor",
) -> Artifact:
    """The artifact for `target`, else the most capable one for `device`. Raises EnvironmentMismatchError."""
    fitting = [entry for entry in entries if target in (None, entry.target)]
    if not fitting and entries:
        hint = "leave `target` out: then the most capable one that this machine runs is taken"
        held = [entry.target for entry in entries]
        known = [*held, *CPU_FEATURES]
        meant = [name for name in known if name.partition(":")[2] == target] or difflib.get_close_matches(
            str(target), known, n=1, cutoff=0.8
        )
        if target not in known and meant:
            hint = f"did you mean {meant[0]!r}? Or {hint}"
        raise EnvironmentMismatchError(f"the bundle holds {', '.join(held)}, and nothing for {target!r}", hint=hint)
    return select_artifact(fitting, device, read, compat)


def select_artifact(
    candidates: Sequence[C], device: torch.device, read: Callable[[C], Artifact], compat: Compat = "minor"
) -> Artifact:
    """The most capable artifact for `device` that this machine runs; `read` gives that of a candidate.

    Only those are read that come before it: from a remote, each costs two requests.

    Raises EnvironmentMismatchError that lists, for every artifact, every mismatch with both values.
    """
    fitting = sorted((one for one in candidates if _target(one).device == device.type), key=_rank)
    if not fitting:
        built = ", ".join(one.target for one in candidates)
        other = f", or build the model for a {device.type} target too" if device.type in ("cpu", "cuda") else ""
        raise EnvironmentMismatchError(
            f"the bundle holds {built or 'nothing'}, and it is to run on {device.type}",
            hint=f"move the module with .to(), or, without one, say another `device`{other}",
        )
    here = this_environment(device)
    rejected: list[Issue] = []
    for candidate in fitting:
        artifact = read(candidate)
        found = mismatches(artifact, here, compat)
        if not found:
            _log.debug("%s: of %s, %s is taken", artifact.model, [one.target for one in candidates], artifact.target)
            return artifact
        _log.debug("%s: %s does not run here: %s", artifact.model, artifact.target, "; ".join(map(str, found)))
        rejected += [msgspec.structs.replace(issue, where=artifact.target) for issue in found]
    raise EnvironmentMismatchError(
        f"no artifact of `{artifact.model}` runs on this machine",
        issues=tuple(rejected),
        here=here,
    )


def _target(candidate: _ForTarget) -> Target:
    if candidate.target.startswith("cache:"):
        from aotc.store.layout.bundle_errors import is_a_cache

        raise is_a_cache()
    try:
        return parse_target(candidate.target)
    except ValueError as error:
        raise CorruptError(f"the bundle names an unknown target: {error}", hint="a newer aotc may know it") from error


def _rank(candidate: _ForTarget) -> tuple[int, int]:
    """The most capable CPU target first; the highest GPU capability first."""
    target = _target(candidate)
    if target.device == "cpu":
        return _ORDER.index(target.name), 0
    return 0, -int(target.capability.replace(".", ""))
