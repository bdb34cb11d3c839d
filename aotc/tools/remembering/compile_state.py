"""What `explain()` tells of a module that is compiled as it is used."""

from __future__ import annotations

import html
from typing import NamedTuple

from aotc.amounts import counted, listed
from aotc.tools.remembering.call_counts import CallCounts


class CompileState(NamedTuple):
    """What `explain()` tells: of the `forms` seen, `built` have code; `models` are loaded; `failed` has reasons by
    model; `notes` say why calls run in eager; and `calls` were made, as `stats()` counts them."""

    name: str
    store: str
    forms: int
    built: int
    building: bool
    models: tuple[str, ...]
    failed: dict[str, str]
    notes: tuple[str, ...]
    calls: CallCounts = CallCounts(0, 0, ())

    def line(self) -> str:
        return str(self).replace("\n  ", "; ")

    def __str__(self) -> str:
        being = f"; {self.forms - self.built} being built" if self.building else ""
        first = f"{self.name}: {self.built} of {counted(self.forms, 'form')} from {self.store}{being}"
        loaded = f"loaded: {listed(self.models, 3)}" if self.models else "nothing is loaded: calls run in eager"
        failed = [f"{model} failed: {in_line(reason)}" for model, reason in self.failed.items()]
        notes = [note for note in self.notes if not any(in_line(reason) in note for reason in self.failed.values())]
        return "\n  ".join([first, loaded, self.calls.line(), *failed, *notes])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        lines = "".join(f"<li>{html.escape(line.strip())}</li>" for line in str(self).split("\n"))
        return f"<ul>{lines}</ul>{self.calls._repr_html_()}"


def in_line(said: object) -> str:
    """An error, or another text of several lines, on one line of a log: hints after the rest."""
    return "; ".join(line.strip().removeprefix("- ") for line in str(said).split("\n") if line.strip())
