"""The options of `aotc.load`: those that belong together as one argument each, and all of them as one value.

Torch is not imported with this module: `aotc.fetch` uses it without one.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from aotc.errors import BindError, Issue
from aotc.machine.this_host import Compat
from aotc.store.reference import Reference, parse_reference, store_named, store_of
from aotc.store.signing.policy import Trust

if TYPE_CHECKING:
    import torch

    from aotc.reads.module_check import ModuleCheck
    from aotc.runtime.call import OnMiss
    from aotc.runtime.checkpoints.checkpoint_files import Checkpoint, Weights
    from aotc.runtime.checkpoints.state import CheckpointState
    from aotc.runtime.libraries.required_operators import Imports

    Given = Weights | Checkpoint | CheckpointState | None

Use = Literal["picked", "always", "never"]
GraphCapture = Literal["eager", "lazy"]
OutputMode = Literal["copy", "view"]


class Graphs(msgspec.Struct, frozen=True, kw_only=True):
    """How a GPU launches compiled code.

    Attributes:
        use: launch as a CUDA graph what measured faster so at build ("picked"), or all, or nothing.
        capture: capture the graphs now ("eager"), or each at its first call ("lazy").
        outputs: of a graph: copies that are the caller's to keep, or views that the next call overwrites, as
            torch.compile's CUDA graphs give (then only one thread may call; in another one it is a LibraryError).
    """

    use: Use = "picked"
    capture: GraphCapture = "eager"
    outputs: OutputMode = "copy"


class Ranks(msgspec.Struct, frozen=True):
    """The ranks of a model that was built for several (`parallel:` in its manifest).

    Attributes:
        group: the process group of this one, of any backend that runs on the device, or a DeviceMesh. Every rank of the
            group must load, and call, alike.
        timeout: seconds that this rank waits for the others, in a load and in a call.
    """

    group: Any
    timeout: float = 300.0


class LoadOptions(msgspec.Struct, frozen=True):
    """The arguments of `aotc.load` except the module, as documented there; `aotc.prepare` takes some of them."""

    ref: str = ""
    weights: Given = None
    store: str | os.PathLike[str] | None = None
    device: torch.device | str | None = None
    target: str | None = None
    on_miss: OnMiss = "error"
    concurrency: int = 1
    ignore: Collection[ModuleCheck] = ()
    cache: str | os.PathLike[str] | None = None
    trust: Trust | None = None
    graphs: Graphs | None = None
    ranks: Ranks | None = None
    allow_imports: Imports = False
    compat: Compat = "minor"

    def place(self) -> tuple[Reference, str]:
        """The reference, and the store that it is in."""
        reference = parse_reference(self.ref)
        store = os.fspath(self.store) if self.store else None
        return reference, store_of(store_named(reference, store, "store="))

    @property
    def signers(self) -> tuple[Any, Any, Any]:
        """The keys, the time and the folder that `read_trust` takes."""
        return (self.trust.keys, self.trust.signed_after, self.cache) if self.trust else (None, None, self.cache)


# -- what an option may be --------------------------------------------------------------------------------------------

OptionCheck = tuple[str, Any, bool, str]
"""Of an option: its name, its value, whether it may be that, and what it may be."""


def check_options(options: LoadOptions, module: Any) -> None:
    """Raises BindError for options of a wrong type, which would otherwise be ignored on some machines."""
    from torch import nn

    from aotc.reads.module_check import ModuleCheck

    one_text = isinstance(options.ignore, str)
    checks: list[OptionCheck] = [
        ("ref", options.ref, isinstance(options.ref, str), "a text: [STORE#]model[:tag]"),
        ("module", module, module is None or isinstance(module, nn.Module), "a torch.nn.Module"),
        (
            "device",
            options.device,
            _is_device(options.device),
            "a torch.device, or a text like 'cpu', 'cuda' or 'cuda:0'",
        ),
        ("cache", options.cache, "\0" not in str(options.cache), "a folder"),
        ("concurrency", options.concurrency, _is_count(options.concurrency), "1 or more"),
        _choice("compat", options.compat, get_args(Compat)),
        ("ignore", options.ignore, not one_text, f"a list, like [{options.ignore!r}]"),
        *(_choice("ignore", each, get_args(ModuleCheck)) for each in ([] if one_text else options.ignore)),
    ]
    if (options.trust, options.graphs, options.ranks) != (None, None, None):
        checks += _checks_of_groups(options)
    if wrong := [(name, value, expected) for name, value, fits, expected in checks if not fits]:
        raise options_error(wrong)


def _checks_of_groups(options: LoadOptions) -> Iterator[OptionCheck]:
    for name, value, group in (
        ("trust", options.trust, Trust),
        ("graphs", options.graphs, Graphs),
        ("ranks", options.ranks, Ranks),
    ):
        yield name, value, value is None or isinstance(value, group), f"an aotc.{group.__name__}"
    if isinstance(options.graphs, Graphs):
        for name, of in (("use", Use), ("capture", GraphCapture), ("outputs", OutputMode)):
            yield _choice(f"graphs.{name}", getattr(options.graphs, name), get_args(of))
    if isinstance(options.ranks, Ranks):
        seconds = options.ranks.timeout
        fits = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds < math.inf
        yield "ranks.timeout", seconds, fits, "seconds, more than 0"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _is_device(value: Any) -> bool:
    import torch

    try:
        return value is None or torch.device(value) is not None
    except (RuntimeError, TypeError):
        return False


def _choice(name: str, value: Any, choices: Sequence[str]) -> OptionCheck:
    return name, value, value in choices, " or ".join(map(repr, choices))


def options_error(wrong: Sequence[tuple[str, Any, str]], function: str = "load") -> BindError:
    """Of options of a function: the name of each, its value and what it may be."""
    issues = [
        Issue(f"{name} is {_shown(value)}, and may be {expected}", expected=expected, actual=_shown(value))
        for name, value, expected in wrong
    ]
    torch = sys.modules.get("torch")
    module = torch.nn.Module if torch else ()
    swapped = any(name == "ref" and isinstance(value, module) for name, value, _ in wrong)
    hint = 'the reference comes first: aotc.load("STORE#model:tag", module)' if swapped else ""
    return BindError(f"aotc.{function} was called with what it does not take", issues=tuple(issues), hint=hint)


def _shown(value: Any) -> str:
    """Not the whole `repr` of a module or of tensors, which has many lines."""
    torch = sys.modules.get("torch")
    if isinstance(value, (Mapping, torch.nn.Module, torch.Tensor) if torch else Mapping):
        return f"a {type(value).__qualname__}"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def refuse_unknown(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises BindError for options that `function` does not have. The hint says how options of 0.1 are written now,
    and which function takes them."""
    if not given:
        return
    # Of the options of 0.1 that are in a group now: which option that is, its class, and how they are written there.
    moved = {
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
    declared, name_here = inspect.signature(function).parameters.values(), function.__qualname__
    known = [each.name for each in declared if each.kind is not each.VAR_KEYWORD and each.name != "self"]
    elsewhere = "prepare" if name_here == "Prepared.load" else "load"
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(moved.keys() & given.keys(), key=[*moved].index):
        option, group, prefix = moved[name]
        groups.setdefault((option, group), []).append(f"{prefix}{_shown(given[name])}")
    if "group_timeout" in given and "group" not in given:
        groups["ranks", "Ranks"].insert(0, "group=GROUP")
    written = {option: f"{option}=aotc.{group}({', '.join(values)})" for (option, group), values in groups.items()}
    here, there = ([text for option, text in written.items() if (option in known) is own] for own in (True, False))
    hints = [f"write {', '.join(here)}"] if here else []
    hints += [f"give {', '.join(there)} to aotc.{elsewhere}"] if there else []
    for name in sorted(given.keys() - moved.keys()):
        hints += [f"did you mean {near}?" for near in difflib.get_close_matches(name, known, n=1)]
    from aotc.amounts import listed

    message = f"aotc.{name_here} has no option {listed(sorted(given), 10)}"
    raise BindError(message, hint="; ".join(hints), expected=", ".join(known), actual=", ".join(sorted(given)))
