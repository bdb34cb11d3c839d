"""The gate of `aotc verify`: limits, and the report for a pull request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aotc.cli.output import echo, print_table, progress_console

if TYPE_CHECKING:
    from aotc.tools.bench.subject import BenchSubject
    from aotc.tools.gate.gate_document import Gate
    from aotc.verification import Limit
    from aotc.verify.verdicts import VerifyReport


def limits_by_bundle(
    gate: Gate, folder: Path, subjects: Sequence[BenchSubject], reports: Sequence[VerifyReport], where: str, quiet: bool
) -> dict[str, list[Limit]]:
    """The limits of each bundle, by its digest. Raises as `limits_of` does."""
    from aotc.tools.gate.limits import limits_of

    found = {}
    for subject in subjects:
        ours = [report for report in reports if report.bundle == subject.digest]
        with progress_console(quiet).status(f"measuring {subject.spec.name} for the gate"):
            found[subject.digest] = limits_of(gate, subject, ours, where, folder)
    return found


def show_limits(names: Mapping[str, str], limits: Mapping[str, Sequence[Limit]]) -> None:
    """`names`: the model of each bundle, by its digest."""
    rows = [
        (names[digest], one.name, one.limit, one.found, one.verdict) for digest, each in limits.items() for one in each
    ]
    if rows:
        print_table(("model", "limit", "allowed", "found", "result"), rows)
    if any(one.verdict == "unmeasured" for each in limits.values() for one in each):
        echo("unmeasured: a limit is neither kept nor missed", err=True)
        echo("  hint: run it again on a machine that does nothing else, or allow more", err=True)


def write_report(
    path: Path, names: Mapping[str, str], reports: Sequence[VerifyReport], limits: Mapping[str, Sequence[Limit]]
) -> None:
    """Raises StoreError where the file cannot be written."""
    from aotc.store.files.writing import write_output
    from aotc.tools.gate.markdown import markdown

    text = markdown(reports, {names[digest]: each for digest, each in limits.items()}, _machine(reports))
    write_output(path, text.encode())
    echo(f"wrote {path}", err=True)


def _machine(reports: Sequence[VerifyReport]) -> str:
    from aotc.machine.environment import this_environment

    on_gpu = any(report.target.startswith("cuda:") for report in reports)
    here = this_environment("cuda" if on_gpu else "cpu")
    return f"{here.gpu or here.machine}, torch {here.torch}"
