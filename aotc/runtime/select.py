"""Where code runs, and which artifact of a bundle this machine runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

import msgspec
import torch
from torch import nn

from aotc.errors import BindError, CorruptError, EnvironmentMismatchError, Issue
from aotc.machine.environment import Compat, mismatches, this_environment
from aotc.machine.targets import CPU_FEATURES, Target, parse_target
from aotc.records import Artifact
from aotc.store.layout.bundle import BundleEntry

_log = logging.getLogger("aotc")

_ORDER = [*CPU_FEATURES]


class _ForTarget(Protocol):
    @property
    def target(self) -> str: ...


C = TypeVar("C", bound=_ForTarget)


def device_of(module: nn.Module | None, device: torch.device | str | None, targets: Collection[str]) -> torch.device:
    """Where the code runs: the module's device, else the one asked for, else the only one in the bundle.

    Raises BindError for a module without values or on several devices, and where `device` is another than the module's,
    or a GPU that torch does not see.
    """
    tensors = {} if module is None else dict([*module.named_parameters(), *module.named_buffers()])
    found = {tensor.device for tensor in tensors.values()}
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if len(found) > 1 or empty:
        from aotc.runtime.explain.arguments import devices_error

        raise devices_error(found, empty)
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
        from aotc.runtime.explain.arguments import target_error

        raise target_error(target, [entry.target for entry in entries])
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
