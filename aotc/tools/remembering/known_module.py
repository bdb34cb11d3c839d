"""What is known of a module as it is, or as it was at some time: its facts, the code for it, and what ran its calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from aotc.reads.module_identity import IdentityFacts
from aotc.runtime.call import CompiledCall
from aotc.tools.remembering.building.counting_attributes import Counting
from aotc.tools.remembering.forms import CallLike
from aotc.tools.remembering.memory.memory import Memory, Place
from aotc.tools.remembering.module_look import ModuleLook
from aotc.tools.remembering.region_calls import RegionCode

if TYPE_CHECKING:
    from aotc.tools.remembering.memory.kind_index import KindIndex


class KnownModule:
    """All that is put aside while the module is another one, and taken up when it is as it was. Many threads may call
    the module: this object is replaced as a whole."""

    def __init__(self, eager: Callable[..., Any]) -> None:
        """`eager`: the module, or the method whose calls these are. Nothing is known yet."""
        self.facts: IdentityFacts = {}
        self.name = ""
        self.look: ModuleLook | None = None
        self.tables: list[Mapping[str, Any]] = []
        self.place: Place | None = None
        self.made: Memory | None = None
        self.only: CompiledCall | None = None
        """All the code that there is: it is asked at once, and a call that it does not take is a miss."""
        self.eager = eager
        """Runs a call in eager, and its regions, too."""
        self.regions: list[RegionCode] = []
        self.runs: dict[Hashable, Callable[..., Any]] = {}
        """The code that runs the calls of each form that came."""
        self.whys: dict[Hashable, str] = {}
        """Why the calls of a form run in eager."""
        self.compiled: list[CompiledCall] = []
        self.misses: Counter[Hashable] = Counter()
        self.like: dict[Hashable, CallLike] = {}
        """Of the forms that were remembered, a call each: by these `wait` tries the code."""
        self.built_then: list[int] = []
        """How many forms of each kind had code when code was loaded."""
        self.former: list[CompiledCall] = []
        """Code that refused what the module's look does not show, as a global variable: it may be as it was again."""
        self.is_stale = False
        """Whether the next call loads what there is."""
        self.counting: Counting | None = None
        self.notes: dict[str, str] = {}
        """Reasons why calls run in eager, by what they are about."""
        self.asked: set[Hashable] = set()
        """The forms of which it was asked whether the code that is loaded takes them."""
        self.index: KindIndex | None = None
        """Of what is remembered, with the calls that are not written yet; None before the first of them."""

    def choose(self) -> None:
        """Let calls ask the code that is loaded now."""
        self.only = self.compiled[0] if len(self.compiled) == 1 and not self.regions else None
        self.runs.clear()
        self.whys.clear()

    def let_load(self) -> None:
        """Let the next call load what there is."""
        self.only, self.is_stale = None, True
        self.runs.clear()
        self.whys.clear()

    def forget_code(self) -> None:
        self.only, self.compiled, self.regions, self.former, self.is_stale = None, [], [], [], False
        self.runs.clear()
        self.whys.clear()
        self.misses.clear()
        self.asked.clear()

    def regions_for(self, kind: int | None) -> RegionCode | None:
        """The code by regions for calls of the kind with this number."""
        if len(self.regions) < 2 or self.place is None:
            return self.regions[0] if self.regions else None
        return next((code for code in self.regions if code.kind == kind), None)

    def unbuilt(self, kind: int) -> None:
        assert self.place is not None
        self.place.change(None, lambda memory: setattr(memory.kinds[kind], "built", 0))
        self.built_then[kind] = 0
