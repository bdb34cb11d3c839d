"""`aotc verify`: compiled code against eager, for a reference or for all models of a manifest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from aotc.amounts import counted
from aotc.cli.gate import limits_by_bundle, show_limits, write_report
from aotc.cli.options import compat_option, is_manifest, json_option, keys_option, store_of, store_option
from aotc.cli.output import echo, print_json, print_table, progress_console
from aotc.cli.signals import end_on_sigterm
from aotc.errors import one_line

if TYPE_CHECKING:
    from aotc.store.signing.keys import PrivateKey
    from aotc.tools.bench.subject import BenchSubject
    from aotc.tools.gate.gate_document import Gate
    from aotc.verification import Limit
    from aotc.verify.verdicts import VerifyReport


@click.command()
@click.argument("what", metavar="REF|MANIFEST")
@store_option
@click.option("--model", "models", multiple=True, help="With a manifest: verify only this model (repeatable).")
@click.option("--tag", show_default="latest", help="With a manifest: the tag to verify.")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="The number of sets of random inputs."
)
@keys_option
@compat_option
@click.option("--standalone", is_flag=True, help="Compare what runs without torch, by aotc.standalone.")
@click.option("--python", metavar="COMMAND", help="With --standalone: another Python, as of aarch64 in an emulator.")
@click.option("--bisect", is_flag=True, help="Where it differs: find the step, the smallest part, and what mends it.")
@click.option("--gate", "gate_file", type=click.Path(path_type=Path, dir_okay=False), help="Limits: a gate.yaml.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write a report in Markdown.")
@click.option("--attest", is_flag=True, help="Attach the result to the bundle, for loads that require it.")
@click.option("--sign", "signing_key", metavar="FILE|env://NAME", help="With --attest: sign with this private key.")
@json_option
def verify(
    what: str,
    store_path: Path | str,
    models: Sequence[str],
    tag: str | None,
    seeds: int,
    compat: Literal["minor", "abi"],
    standalone: bool,
    python: str | None,
    bisect: bool,
    gate_file: Path | None,
    report: Path | None,
    attest: bool,
    signing_key: str | None,
    as_json: bool,
) -> None:
    """Compare compiled code with eager, bucket by bucket.

    Runs in a fresh process, with random inputs. With --bisect, says of each artifact that differs why it does. Exit
    code 1 if a bucket differs or a limit of the gate is not kept, 2 if a bucket could not run or a limit could not be
    measured.
    """
    from aotc.store.reference import parse_reference
    from aotc.verify.run import verify_manifest, verify_reference

    if signing_key and not attest:
        raise click.UsageError("--sign goes with --attest")
    if compat == "abi" and (bisect or gate_file or attest):
        raise click.UsageError("--bisect, --gate and --attest need the torch minor of the build, not --compat abi")
    private, gate = _private_key(signing_key), _gate(gate_file)
    if standalone and (bisect or gate_file or attest):
        raise click.UsageError("--bisect, --gate and --attest are of code with torch, not of --standalone")
    if python and not standalone:
        raise click.UsageError("--python goes with --standalone: it has no torch")
    by = python or "" if standalone else None
    if is_manifest(Path(what)):
        where = str(store_path)
        found = verify_manifest(Path(what), models, store_path, tag or "latest", seeds, compat, by)
    elif models or tag is not None:
        raise click.UsageError("--model and --tag go with a manifest; a reference names its own: MODEL:TAG")
    else:
        (given,) = store_of(store_path, parse_reference(what))
        where = str(given)
        found = verify_reference(what, where, seeds, compat, by)
    if gate and gate_file:
        _check_gate(gate, gate_file, where, what, models)
    end_on_sigterm()
    reports: list[VerifyReport] = []
    try:
        with closing(found), _progress(quiet=as_json) as show:
            for one in found:
                reports.append(one)
                show(reports)
    except BaseException:
        if reports and not as_json:  # half a JSON document would be taken for the whole
            _show(reports)
        raise
    if not as_json:
        _show(reports)
    if bisect:
        folder = Path(what).resolve().parent if is_manifest(Path(what)) else Path.cwd()
        reports = _bisect(where, reports, folder, seeds, quiet=as_json)
    elif not as_json and any(one.status == "failed" for one in reports):
        hint = "the same command with --bisect finds the step that is wrong, and what mends it"
        if standalone:
            hint = "compare with torch, by the same command without --standalone: is it right there?"
        if compat == "abi":
            hint = "build it with this torch, or verify it with the torch of its build: --bisect needs one of the two"
        echo(f"  hint: {hint}", err=True)
    names = {one.bundle: one.model for one in reports if one.bundle}
    limits: dict[str, list[Limit]] = {}
    if gate and gate_file and names:
        subjects = _subjects(what, models, where, tag or "latest")
        limits = limits_by_bundle(gate, gate_file.parent, subjects, reports, where, quiet=as_json)
        if not as_json:
            show_limits(names, limits)
    if as_json:
        print_json({"reports": reports, "limits": limits} if gate else reports)
    if report:
        write_report(report, names, reports, limits)
    if attest:
        _attest(where, reports, limits, private)
    statuses = {one.status for one in reports}
    if "could not run" in statuses or not reports:
        sys.exit(2)
    verdicts = {one.verdict for each in limits.values() for one in each}
    if statuses != {"ok"} or "not kept" in verdicts:
        sys.exit(1)
    sys.exit(2 if "unmeasured" in verdicts else 0)


def _gate(path: Path | None) -> Gate | None:
    """Read before anything is compared, too."""
    if path is None:
        return None
    from aotc.tools.gate.gate_document import read_gate

    return read_gate(path)


def _check_gate(gate: Gate, path: Path, where: str, what: str, models: Sequence[str]) -> None:
    """A trace or a baseline that is not there must not cost a verification, either."""
    from aotc.manifest import read_manifest
    from aotc.store.reference import parse_reference
    from aotc.tools.gate.gate_inputs import check_inputs

    manifest = read_manifest(Path(what), models).models if is_manifest(Path(what)) else [parse_reference(what).model]
    check_inputs(gate, path, where, manifest)


def _subjects(what: str, models: Sequence[str], where: str, tag: str) -> list[BenchSubject]:
    from aotc.tools.bench.subject import subject_of, subjects_of_manifest

    if is_manifest(Path(what)):
        return list(subjects_of_manifest(Path(what), models, where, tag))
    return [subject_of(what, where)]


def _bisect(where: str, reports: Sequence[VerifyReport], folder: Path, seeds: int, quiet: bool) -> list[VerifyReport]:
    """The reports, with the bisections of those that were bisected; prints these, unless `quiet`."""
    import msgspec

    from aotc.tools.bisection.bisect_run import bisect_reports, to_bisect

    found = {}
    with progress_console(quiet).status(f"bisecting {counted(len(to_bisect(reports)), 'artifact')}"):
        for report, bisection in bisect_reports(where, reports, folder, seeds):
            found[id(report)] = msgspec.structs.replace(report, bisection=msgspec.to_builtins(bisection))
            if not quiet:
                for line in bisection.lines():
                    echo(line)
    return [found.get(id(report), report) for report in reports]


def _private_key(text: str | None) -> PrivateKey | None:
    """Read before anything is compared: a wrong password must not cost a verification."""
    if text is None:
        return None
    from aotc.cli.release import ask_password
    from aotc.store.signing.keys import read_private_key

    return read_private_key(text, ask_password)


def _attest(
    where: str, reports: Sequence[VerifyReport], limits: Mapping[str, Sequence[Limit]], key: PrivateKey | None
) -> None:
    from aotc.verify.attesting import attest_reports

    for one in attest_reports(where, reports, limits, key):
        signed = f", signed by {key.public.fingerprint}" if key else ""
        echo(f"attested {one.model} for {one.target}: {one.verdict}{signed}", err=True)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[Sequence[VerifyReport]], None]]:
    """On a terminal: a line that says how many sizes are done, and how the last of them ended."""
    from rich.text import Text

    with progress_console(quiet).status("verifying") as line:

        def show(reports: Sequence[VerifyReport]) -> None:
            last = reports[-1]
            at = f"{last.model} {last.bucket} {last.target} at {last.sizes}: {last.status}"
            line.update(Text(one_line(f"{counted(len(reports), 'size')} verified; {at}")))

        yield show


_WEIGHTS = {"own": "own", "other": "changed", "swapped": "update_weights"}


def _show(reports: Sequence[VerifyReport]) -> None:
    """The weights only where they tell rows of the same sizes apart; no row for what could not be compared."""
    everything, reports = reports, [report for report in reports if not (report.extremes and report.status == "ok")]
    swapped = any(report.weights != "own" for report in reports)
    print_table(
        (
            *("model", "bucket", "target", "sizes"),
            *(("weights",) if swapped else ()),
            *("error", "eager's", "allowed", "result"),
        ),
        [
            (
                *(r.model, r.bucket, r.target, r.sizes),
                *((_WEIGHTS[r.weights],) if swapped else ()),
                *(_error(r.error), _error(r.eager_error), _error(r.allowed), r.status),
            )
            for r in reports
        ],
    )
    for report in everything:
        if report.status != "ok" or report.detail:
            first, *more = report.detail.split("\n")
            known = (part for part in (report.model, report.bucket, report.target, report.sizes) if part != "-")
            echo(f"{report.status}: {' '.join(known)}: {first}", err=True)
            for line in more:
                echo(f"    {line}", err=True)


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"
