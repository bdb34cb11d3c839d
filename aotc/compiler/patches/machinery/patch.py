"""One patch of torch, as data: its targets, its torch versions, and the reason."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from aotc.advisories import within

PatchKind = Literal["bug", "performance", "determinism"]
Device = Literal["cpu", "cuda", "any"]
PatchStage = Literal["export", "export again", "compile"]
"""When a patch is applied: while torch.export runs, while it runs again after a refusal, or while Inductor runs."""
PatchSeverity = Literal["silent", "crash", "build"]
"""What a unit that is built without a bug's patch does: give wrong values, or read or write memory that is not its own
(`silent`); end the process, or fail a call that eager answers (`crash`); or nothing, since its build or smoke run fails
(`build`). The worst of several."""
UnitKind = Literal["range", "frozen"]
"""Units of a bucket with a range of sizes; of a model with frozen weights."""

NEWEST_TESTED = (2, 15)
"""The newest torch, major and minor, on which the reproducers were run: see the README in the folder above."""


@dataclass(frozen=True)
class Patch:
    """A change to torch, applied if the version is in `torch`, the device is `device`, and `wanted` accepts the unit's
    Inductor options.

    `module` is the patch's file, whose name is the patch's. The file has the fix, `apply()`, and for most bugs
    `reproduce(patches)`, which raises or ends the process where torch has the bug.

    `targets` are all attributes that `apply` replaces, in the notation of `flaw_of`. `upstream` is the issue or pull
    request, or `UPSTREAM.md` if the docstring of the module is the text of one that is not filed. With `of_graph`,
    `apply` takes the captured graph.

    Each bug has a `severity`. One that a built unit can have is an advisory, for `aotc audit`: `advisory` is its id,
    which never names another one, and `since` the first aotc with the patch. It concerns units of the patch's torch and
    device whose graph has one of `operators`: the beginnings of names as `operators_of` gives them, like `aten.conv`
    and `higher_order.`; no operators: any. The graph is both the captured one and what Inductor lowers, so that an
    operator which becomes one of them on the way counts. With `dtypes`, an operator counts if a tensor that it takes or
    gives has one of these. With `only`, a unit must be of all these kinds.

    With `complete`, no other operator can become one of `operators` on the way through Inductor: where torch lacks a
    target, units that are captured without any of them are built all the same.
    """

    module: str
    _: KW_ONLY
    kind: PatchKind = "bug"
    targets: tuple[str, ...]
    upstream: str = "UPSTREAM.md"
    torch: str = ">=2.11"
    device: Device = "any"
    stage: PatchStage = "compile"
    wanted: Callable[[Mapping[str, Any]], bool] = lambda options: True
    of_graph: bool = False
    severity: PatchSeverity | None = None
    advisory: str = ""
    since: str = "0.2.0"
    operators: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    only: tuple[UnitKind, ...] = ()
    complete: bool = False

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def text(self) -> str:
        """The docstring of its file: what is wrong with torch, or what the patch is for."""
        return inspect.getdoc(sys.modules[self.module]) or ""

    @property
    def title(self) -> str:
        """The first line of `text`."""
        return self.text.partition("\n")[0]

    def apply(self, graph: fx.Graph | None = None) -> AbstractContextManager[Any]:
        fix = sys.modules[self.module].apply
        made: AbstractContextManager[Any] = fix(graph) if self.of_graph else fix()
        return made

    @property
    def reproduce(self) -> Any:
        """The function that fails where torch has the bug; None if there is none, as of patches for GPUs."""
        return getattr(sys.modules[self.module], "reproduce", None)

    @property
    def can_be_off(self) -> bool:
        """Whether a manifest can leave it out, with `patches: {NAME: off}`."""
        return self.kind != "determinism" and self.stage == "compile"

    @property
    def link(self) -> str:
        number = self.upstream.removeprefix("pytorch#")
        found = number != self.upstream
        return f"https://github.com/pytorch/pytorch/issues/{number}" if found else f"{self.upstream}#{self.name}"

    def is_for(self, device: str, version: str | None = None) -> bool:
        return self.device in ("any", device) and within(self.torch, version or str(torch.__version__))

    def concerns(self, names: Collection[str] | None) -> bool:
        """Whether a unit needs it, by the names of its captured graph's operators; None before there is a graph, when
        only patches that every unit needs are looked at."""
        return not self.complete or any(name.startswith(self.operators) for name in names or ())

    def flaws(self) -> list[str]:
        """A text for each target that this torch lacks, or has with another signature."""
        return [flaw for target in self.targets if (flaw := flaw_of(target))]


_TARGET = re.compile(r"(?:(?P<module>[\w.]+):)?(?P<path>[\w.]+)(?:\[(?P<key>[\w.:]+)\])?(?:\((?P<parameters>.*)\))?")


class Parts(NamedTuple):
    """The parts of a target; None for absent ones."""

    module: str | None
    path: str
    key: str | None
    parameters: str | None


def parts_of(target: str) -> Parts:
    match = _TARGET.fullmatch(target)
    assert match is not None, target
    return Parts(**match.groupdict())


@functools.cache
def flaw_of(target: str) -> str:
    """How this torch differs from a target; "" if it has the target as expected.

    - `torch._inductor.lowering:view(x, sizes)`: a function, an attribute of a module or class. The parameters are the
      first ones, without `self`; others must be optional, unless `...` follows. Without parentheses, the signature is
      not checked.
    - `torch._inductor.lowering:lowerings[higher_order.cond]`: an operator's entry in a table, or a function's.
    - `aten.cat.default(tensors, dim)`: an operator's decomposition, in the tables of `decompositions.decomposed`.
    """
    try:
        found = _found(target)
        expected = parts_of(target).parameters
        return "" if expected is None else _signature_flaw(target, found, expected)
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        return f"{target.partition('(')[0]}: {error}"


def _found(target: str) -> Any:
    module, path, key, _ = parts_of(target)
    if module is None:
        return operator(path)
    value: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    return value[entry_of(key)] if key else value


def operator(name: str) -> Any:
    """An operator of torch by its name, like `aten.cat.default` or `higher_order.cond`. Raises AttributeError."""
    return functools.reduce(getattr, name.split("."), torch.ops)


def entry_of(key: str) -> Any:
    """The key of a table's entry: an operator, or a function given as `module:name`."""
    return _found(key) if ":" in key else operator(key)


def _signature_flaw(target: str, found: Any, expected: str) -> str:
    wanted = [name.strip() for name in expected.split(",") if name.strip()]
    others_may_be_required = wanted[-1:] == ["..."]
    wanted = wanted[: len(wanted) - others_may_be_required]
    if isinstance(found, torch._ops.OpOverload):
        names = [argument.name for argument in found._schema.arguments]
        required = {argument.name for argument in found._schema.arguments if not argument.has_default_value()}
    else:
        signature = inspect.signature(inspect.unwrap(found))
        parameters = [each for each in signature.parameters.values() if each.name != "self"]
        stars: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        names = [stars.get(each.kind, "") + each.name for each in parameters]
        required = {each.name for each in parameters if each.default is each.empty and each.kind not in stars}
    if names[: len(wanted)] == wanted and (others_may_be_required or required <= set(wanted)):
        return ""
    return f"{target.partition('(')[0]} takes ({', '.join(names)}), expected ({expected})"


def chosen(
    patches: Iterable[Patch],
    device: str,
    options: Mapping[str, Any],
    off: Collection[str] = (),
    version: str | None = None,
) -> list[Patch]:
    """The patches of a unit: those within their bounds, wanted by its options, and not switched off."""
    return [
        patch for patch in patches if patch.is_for(device, version) and patch.wanted(options) and patch.name not in off
    ]
