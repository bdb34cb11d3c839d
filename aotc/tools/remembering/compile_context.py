"""What the parts of one `aotc.compile` share: the module, what was asked, what is known, and what is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from aotc.errors import ManifestError
from aotc.reads.sources import cells_file
from aotc.runtime.state.read_write_lock import ReadWriteLock
from aotc.tools.remembering.building.builds import Builds
from aotc.tools.remembering.call_counts import CallCounter, CallCounts
from aotc.tools.remembering.compile_options import Options
from aotc.tools.remembering.compile_state import CompileState, in_line
from aotc.tools.remembering.known_module import KnownModule
from aotc.tools.remembering.memory.memory import Place

if TYPE_CHECKING:
    from aotc.tools.recording.module_factories import Made

_log = logging.getLogger("aotc")

MOST_NOTES = 64
"""Reasons that are told of one module; `stats()` has those of all forms."""
FAILED = "failed "
"""Begins what notes of builds that failed are about."""


def _nothing() -> None:
    """Before any call is remembered."""


class CompileContext:
    """The module, or its `method` whose calls these are; and `ended`, which is called with each build that ended."""

    def __init__(
        self, module: nn.Module, method: MethodType | None, options: Options, ended: Callable[[Place, int], None]
    ) -> None:
        name = method.__name__ if method is not None and method.__name__ != "forward" else ""
        self.module, self.options = module, options._replace(method=name)
        self.own: Callable[..., Any] = method or module
        self.known = KnownModule(self.own)
        """Of the module as it is now."""
        self.aside: dict[str, KnownModule] = {}
        """Of the module as it was before, by its name then."""
        self.by_calls: dict[str, str | None] = {}
        """The attributes that calls in eager have changed, as they were before: these make no other name."""
        self.makers: dict[str, Made] = {}
        """How a build makes the module, by its facts without the mode. It is found out once, before calls change
        attributes: transformers' models write the kind of their labels into their configuration."""
        self._told: set[str] = set()
        """The reasons that were logged. Each is logged once, also if the module has changed."""
        self.no_cells: ManifestError | OSError | None = None
        """Why the classes that a notebook's cells define cannot be written into a file."""
        self.device = "cpu"
        self.store = options.store
        """What code is loaded from: of a remote one, its copy on this host, or itself where nothing is built."""
        self.gate = ReadWriteLock()
        """Inside are calls that record gradients: while code is loaded into regions, it would lose them."""
        self.lock = threading.RLock()
        self.counter = CallCounter("train" if options.train else "inference")
        self.write: Callable[[], None] = _nothing
        """Writes the calls that are remembered and not written yet."""
        self.builds = Builds(options, self.note, ended, before=lambda: self.write())

    @property
    def method(self) -> Callable[..., Any] | None:
        """The method whose calls these are; None where they are the module's own."""
        return None if self.own is self.module else self.own

    def put_place(self, place: Place | None) -> None:
        """Where what is remembered of the module as it is lies; None where nothing is, or is built."""
        self.known.place = self.builds.place = place

    def parameters(self) -> list[Mapping[str, Any]]:
        """The tables of parameters of the module's parts."""
        return [part._parameters for part in self.module.modules()]

    def forget_code(self) -> None:
        """Let go of the code that is loaded, and keep how many calls it ran."""
        self.counter.keep(self.known.compiled)
        self.known.forget_code()

    def note(self, text: str, about: str = "") -> None:
        """Tell a reason why calls of the module as it is run in eager, once; of several `about` the same, the first."""
        notes = self.known.notes
        if len(notes) >= MOST_NOTES or about in notes or (text := in_line(text)) in notes:
            return
        notes[about or text] = text
        if text not in self._told and len(self._told) < MOST_NOTES:
            self._told.add(text)
            _log.warning("aotc.compile: %s: %s", self.called(), text)

    def note_failure(self, place: Place, model: str, reason: str) -> None:
        again = f"to try again, remove {place.folder}/{model}.failed"
        self.note(f"{model} cannot be built, and its calls run in eager: {reason}\n{again}", f"{FAILED}{model}")

    def called(self) -> str:
        """The module's name in the store, or as long as there is none its class's."""
        return self.known.name or type(self.module).__name__

    def state(self) -> CompileState:
        """As `Remembered.explain`."""
        self.write()
        place = self.known.place
        memory = place.read() if place is not None else None
        kinds = memory.kinds if memory is not None else []
        failed = {place.model(n): why for n in range(len(kinds)) if (why := place.failed(n))} if place else {}
        return CompileState(
            name=self.called(),
            store=self.options.store,
            forms=sum(len(kind.calls) for kind in kinds),
            built=sum(kind.built for kind in kinds),
            building=place is not None and place.is_being_built(),
            models=tuple(compiled.artifact.model for compiled in self.known.compiled),
            failed=failed,
            notes=tuple(self.known.notes.values()),
            calls=self.stats(),
        )

    def stats(self) -> CallCounts:
        """As `Remembered.stats`."""
        states = [self.known, *self.aside.values()]
        for known in states:
            self._ask_for_forms(known)
        return self.counter.counts([call for known in states for call in known.compiled])

    def _ask_for_forms(self, known: KnownModule) -> None:
        """Find out which forms whose calls ran in eager the code takes that is loaded now."""
        if not known.compiled or known.regions:
            return
        for form in self.counter.eager_forms().intersection([*known.like]) - known.asked:
            taker = known.like[form].taker(known.compiled)
            if taker.call is not None:
                self.counter.takes(form, taker.call, taker.said)
            if taker.call is not None or known is self.known:
                known.asked.add(form)

    @contextmanager
    def in_cells(self) -> Iterator[None]:
        """Within, a file stands for the notebook that defines the module's classes, if one does."""
        from aotc.tools.remembering.making.cells import module_of_cells

        file, self.no_cells = None, None
        try:
            file = module_of_cells(self.module)
        except (ManifestError, OSError) as error:  # told where the module is to be made again
            self.no_cells = error
        before = cells_file.set(file)
        try:
            yield
        finally:
            cells_file.reset(before)

    def changed_names(self) -> list[str]:
        """The attributes that calls change."""
        return [name.removeprefix("attribute ") for name in self.by_calls]

    def renew(self) -> None:
        """A child that is forked may have got the locks locked."""
        self.lock = threading.RLock()
        self.counter.renew()
        self.builds.renew()
