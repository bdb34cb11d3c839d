"""Why arguments of `aotc.load` and `update_weights` cannot be used, and which names were meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aotc.amounts import listed
from aotc.errors import BindError, EnvironmentMismatchError, Issue
from aotc.machine.targets import CPU_FEATURES
from aotc.records import Artifact

COMPARED = 10
"""Unknown names for each of which the nearest known one is looked for."""


def options_error(wrong: Sequence[tuple[str, Any, str]], function: str = "load") -> BindError:
    """Of options of a function: the name of each, its value and what it may be."""
    issues = [
        Issue(f"{name} is {_shown(value)}, and may be {expected}", expected=expected, actual=_shown(value))
        for name, value, expected in wrong
    ]
    swapped = any(name == "ref" and isinstance(value, nn.Module) for name, value, _ in wrong)
    hint = 'the reference comes first: aotc.load("STORE#model:tag", module)' if swapped else ""
    return BindError(f"aotc.{function} was called with what it does not take", issues=tuple(issues), hint=hint)


_MOVED = {
    "trusted_keys": ("trust", "Trust", "keys="),
    "signed_after": ("trust", "Trust", "signed_after="),
    "require_verified": ("trust", "Trust", "require_verified="),
    "allow_untested": ("trust", "Trust", "allow_untested="),
    "cuda_graphs": ("graphs", "Graphs", "use="),
    "capture": ("graphs", "Graphs", "capture="),
    "outputs": ("graphs", "Graphs", "outputs="),
    "group": ("ranks", "Ranks", "group="),
    "group_timeout": ("ranks", "Ranks", "timeout="),
}
"""Of the options of 0.1 that are in a group now: which option that is, its class, and how they are written there."""


def unknown_options(function: Callable[..., Any], given: Mapping[str, Any]) -> BindError:
    """Of options that `function` does not have: in the hint, how those of 0.1 are written now, and who takes them."""
    declared, name_here = inspect.signature(function).parameters.values(), function.__qualname__
    known = [each.name for each in declared if each.kind is not each.VAR_KEYWORD and each.name != "self"]
    elsewhere = "prepare" if name_here == "Prepared.load" else "load"
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(_MOVED.keys() & given.keys(), key=[*_MOVED].index):
        option, group, prefix = _MOVED[name]
        groups.setdefault((option, group), []).append(f"{prefix}{_shown(given[name])}")
    if "group_timeout" in given and "group" not in given:
        groups["ranks", "Ranks"].insert(0, "group=GROUP")
    written = {option: f"{option}=aotc.{group}({', '.join(values)})" for (option, group), values in groups.items()}
    here, there = ([text for option, text in written.items() if (option in known) is own] for own in (True, False))
    hints = [f"write {', '.join(here)}"] if here else []
    hints += [f"give {', '.join(there)} to aotc.{elsewhere}"] if there else []
    for name in sorted(given.keys() - _MOVED.keys()):
        hints += [f"did you mean {near}?" for near in difflib.get_close_matches(name, known, n=1)]
    message = f"aotc.{name_here} has no option {listed(sorted(given), 10)}"
    return BindError(message, hint="; ".join(hints), expected=", ".join(known), actual=", ".join(sorted(given)))


def _shown(value: Any) -> str:
    """Not the whole `repr` of a module or of tensors, which has many lines."""
    if isinstance(value, nn.Module | Tensor | Mapping):
        return f"a {type(value).__qualname__}"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def group_error(artifact: Artifact) -> BindError:
    """Of code for several ranks that is loaded without a group."""
    parallel = artifact.parallel
    assert parallel is not None
    return BindError(
        f"`{artifact.model}` is the code of one of {parallel.size} ranks, and no group was given",
        hint=f"start {parallel.size} processes (torchrun --nproc-per-node={parallel.size}), and give each its process "
        "group: aotc.load(…, ranks=aotc.Ranks(torch.distributed.group.WORLD))",
        expected=str(parallel.size),
        actual="no group",
    )


def devices_error(devices: Collection[torch.device], empty: Sequence[str]) -> BindError:
    """Of a module on several devices, or with tensors without values, of these names."""
    where = f"several devices: {', '.join(sorted(map(str, devices)))}" if len(devices) > 1 else "the device meta"
    return BindError(
        f"the module's tensors are on {where}" + (f"; without values are {listed(empty, 3)}" if empty else ""),
        hint="give it values: module.to_empty(device=…), then load_state_dict; or leave the module out, and give "
        "its checkpoint: aotc.load(REF, weights=…)"
        if empty
        else "move it to one with .to()",
    )


def target_error(target: str | None, held: Sequence[str]) -> EnvironmentMismatchError:
    """Of a `target` that is not among those that the bundle holds."""
    hint = "leave `target` out: then the most capable one that this machine runs is taken"
    known = [*held, *CPU_FEATURES]
    meant = [name for name in known if name.partition(":")[2] == target] or difflib.get_close_matches(
        str(target), known, n=1, cutoff=0.8
    )
    if target not in known and meant:
        hint = f"did you mean {meant[0]!r}? Or {hint}"
    return EnvironmentMismatchError(f"the bundle holds {', '.join(held)}, and nothing for {target!r}", hint=hint)


def mistyped(names: Sequence[str], known: Collection[str]) -> list[str]:
    """A hint for each unknown name: the known one that it most likely stands for, or ""."""
    if len(names) > COMPARED:  # the names of another model
        return [""] * len(names)
    prefixed = any(f".{name}".endswith(f".{one}") or f".{one}".endswith(f".{name}") for name in names for one in known)
    if prefixed:  # those of a model around this one or inside it
        return [""] * len(names)
    found = (difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in names)
    return [f"did you mean `{matches[0]}`?" if matches else "" for matches in found]
