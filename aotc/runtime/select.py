"""The second stage of a load: where code runs, and which artifact of a bundle this machine runs and may load."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
from torch import nn

from aotc.errors import BindError
from aotc.machine.compatibility import mismatches
from aotc.machine.environment import this_environment
from aotc.machine.this_host import Compat
from aotc.runtime.options import Graphs, LoadOptions
from aotc.selection import ForTarget, most_capable, of_target

if TYPE_CHECKING:
    from aotc.reads.outside import ReadFile
    from aotc.records import Artifact, Variant
    from aotc.runtime.find import Entries, FoundBundle, ReadArtifact
    from aotc.runtime.libraries.library_folder import LibraryFiles
    from aotc.runtime.parallel.ranks import RanksOfLoad
    from aotc.store.layout.bundle import BundleEntry


_log = logging.getLogger("aotc")

C = TypeVar("C", bound=ForTarget)


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
    return select_artifact(of_target(entries, target), device, read, compat)


def select_artifact(
    candidates: Sequence[C], device: torch.device, read: Callable[[C], Artifact], compat: Compat = "minor"
) -> Artifact:
    """The most capable artifact for `device` that this machine runs: `aotc.selection.most_capable`."""
    differences = functools.partial(mismatches, compat=compat)
    return most_capable(candidates, device.type, read, differences, functools.partial(this_environment, device))
