"""`aotc build --suggest-regions`: find repeated submodules, and try to export each of them."""

from __future__ import annotations

import io
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from aotc.compiler.capture.regions.equal_regions import find_regions, left_as_it_was, regions_of
from aotc.compiler.explain_failure import explain_failure, model_line
from aotc.errors import AotcError
from aotc.machine.native_target import resolve_target
from aotc.machine.targets import parse_target
from aotc.manifest import ModelSpec
from aotc.models.calls import arguments_of, modes_of, signature_leaves
from aotc.models.factory import build_module
from aotc.models.regions import example_of, generalised, region_paths
from aotc.models.signature import make_signature
from aotc.records import tuned_dims


class Break(msgspec.Struct, frozen=True):
    """A failed export: the submodule ("" for the module itself), the line of the model, and the error."""

    where: str
    line: str
    message: str


class RegionCandidate(msgspec.Struct, frozen=True):
    """A pattern of repeated submodules: their number, their share of the parameters, the number of kinds to compile,
    and the problem if they cannot be regions ("" for none)."""

    pattern: str
    class_name: str
    count: int
    share: float
    kinds: int = 0
    problem: str = ""


class Suggestion(msgspec.Struct, frozen=True):
    """The suggestion for one model: the error of exporting it whole, every pattern that was tried, and the regions.

    `frozen`: the model's weights are frozen, and must be live for regions. `time` is the share of a call in eager that
    is spent within the regions, and `eager` are the outermost submodules outside of them.
    """

    model: str
    whole: Break | None
    candidates: tuple[RegionCandidate, ...]
    regions: tuple[str, ...]
    frozen: bool = False
    time: float = 0.0
    eager: tuple[str, ...] = ()


def suggest_regions(spec: ModelSpec, folder: Path) -> Suggestion:
    """Try the model's repeated submodules; nothing is compiled. Raises ManifestError where the model cannot be built,
    BuildError where it cannot be run."""
    device = parse_target(resolve_target(spec.targets[0])).device
    module = build_module(spec, folder).to(device)
    signature = make_signature(spec, module)
    leaves = signature_leaves(spec, signature, tuned_dims(spec.buckets[0]), device, 0, folder)
    args, kwargs = arguments_of(signature, leaves)
    with modes_of(spec, device):
        whole = export_break(module, args, kwargs)
    repeated = _repeated(module)
    tried: list[RegionCandidate] = []
    taken: list[RegionCandidate] = []
    todo = _outermost(repeated)
    while todo:
        pattern = todo.pop(0)
        candidate = _try(spec, folder, module, pattern, repeated[pattern], device)
        tried.append(candidate)
        if candidate.problem:
            inner = {other: paths for other, paths in repeated.items() if _within(paths, repeated[pattern])}
            todo += _outermost(inner)
        else:
            taken.append(candidate)
    taken.sort(key=lambda candidate: -candidate.share)
    regions = tuple(candidate.pattern for candidate in taken)
    paths = [path for pattern in regions for path in repeated[pattern]]
    with modes_of(spec, device), left_as_it_was(module):
        share = _share_of_time(module, paths, lambda: module(*args, **kwargs)) if paths else 0.0
    eager = tuple(_outside(module, paths))
    return Suggestion(spec.name, whole, tuple(tried), regions, spec.weights == "frozen", share, eager)


def _share_of_time(module: nn.Module, paths: Sequence[str], call: Callable[[], Any]) -> float:
    """The share of a call that is spent within these submodules, over CALLS calls."""
    inside: list[float] = []

    def now() -> float:
        if next(module.parameters(), torch.empty(0)).is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def count(sign: int) -> Callable[..., None]:
        return lambda *_: inside.append(sign * now())

    handles: list[Any] = []
    call()  # the first one of a process takes longer
    try:
        for path in paths:
            part = module.get_submodule(path)
            handles += [part.register_forward_pre_hook(count(-1)), part.register_forward_hook(count(1))]
        began = now()
        for _ in range(CALLS):
            call()
        return min(1.0, sum(inside) / (now() - began))
    finally:
        for handle in handles:
            handle.remove()


CALLS = 3


def _outside(module: nn.Module, paths: Sequence[str], within: str = "") -> Iterator[str]:
    """The outermost submodules that hold none of these, nor are one of them."""
    for name, part in module.named_children():
        path = f"{within}{name}"
        if any(other.startswith(f"{path}.") for other in paths):
            yield from _outside(part, paths, f"{path}.")
        elif path not in paths:
            yield path


def export_break(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Break | None:
    """Export the module. Returns the failure, or None."""
    inside: list[str] = []

    def leave(*_: Any) -> None:
        inside.pop()

    handles: list[Any] = []
    for path, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(lambda *_, path=path: inside.append(path)))
        handles.append(part.register_forward_hook(leave))
    try:
        with silent():
            torch.export.export(module, tuple(args), dict(kwargs), strict=False)
    except Exception as error:
        explained = explain_failure(error, "export")
        return Break(inside[-1] if inside else "", model_line(error), explained.message.splitlines()[0][:300])
    finally:
        for handle in handles:
            handle.remove()
    return None


@contextmanager
def silent() -> Iterator[None]:
    """While active, output is discarded: torch prints the whole graph when an export fails."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


def _repeated(module: nn.Module) -> dict[str, list[str]]:
    """Patterns that match several submodules, with a forward and children, and their paths."""
    found: dict[str, list[str]] = {}
    for path, part in module.named_modules():
        has_forward = not isinstance(part, nn.ModuleList | nn.ModuleDict)
        if (pattern := generalised(path)) != path and has_forward and any(True for _ in part.children()):
            found.setdefault(pattern, []).append(path)
    return {pattern: paths for pattern, paths in found.items() if len(paths) > 1}


def _outermost(repeated: Mapping[str, Sequence[str]]) -> list[str]:
    return [
        pattern
        for pattern, paths in repeated.items()
        if not any(_within(paths, others) for other, others in repeated.items() if other != pattern)
    ]


def _within(paths: Sequence[str], others: Sequence[str]) -> bool:
    """Whether any of the paths lies within one of the others."""
    return any(path.startswith(f"{other}.") for path in paths for other in others)


def _try(
    spec: ModelSpec, folder: Path, module: nn.Module, pattern: str, paths: Sequence[str], device: str
) -> RegionCandidate:
    parameters = {id(p): p.numel() for path in paths for p in module.get_submodule(path).parameters()}
    total = sum(p.numel() for p in module.parameters()) or 1
    kinds = Counter(type(module.get_submodule(path)).__qualname__ for path in paths)
    candidate = RegionCandidate(pattern, " and ".join(kinds), len(paths), sum(parameters.values()) / total)
    by_region = msgspec.structs.replace(spec, regions=(pattern,), weights="live")
    try:
        region_paths(by_region, module)
        count, problem = 0, ""
        for found in _kinds(by_region, folder, device):
            count, problem = count + 1, problem or found
    except AotcError as error:
        return msgspec.structs.replace(candidate, problem=error.message)
    return msgspec.structs.replace(candidate, kinds=count, problem=problem)


def _kinds(spec: ModelSpec, folder: Path, device: str) -> Iterator[str]:
    """For each kind of the spec's regions the error of its export, or ""."""
    module = build_module(spec, folder).to(device)
    parts = find_regions(spec, module, folder)
    signature = make_signature(spec, module)
    for region in regions_of(parts):
        sizes = next(part.sizes for part in parts if part.region is region)
        example = example_of(spec, module, signature, region, sizes, folder)
        args, kwargs = arguments_of(region.signature, example.leaves)
        with modes_of(spec, device):
            found = export_break(module.get_submodule(region.instances[0]), args, kwargs)
        inner = f"{region.name}.{found.where}" if found and found.where else region.name
        yield f"in `{inner}`, {found.line}: {found.message}" if found else ""
