"""`aotc doctor`: what this machine can load and build. Printed without rich: a machine that only serves may lack it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from aotc.cli.options import compat_option, is_manifest, json_option, store_of, store_option
from aotc.cli.output import echo, print_json, printing_to_stderr

if TYPE_CHECKING:
    from aotc.tools.doctor.checks import Check


@click.command()
@click.argument("what", metavar="[REF|MANIFEST]", required=False)
@compat_option
@store_option
@json_option
def doctor(what: str | None, compat: Literal["minor", "abi"], store_path: Path | str, as_json: bool) -> None:
    """Check this machine: can it load and build?

    With REF: would that bundle load here, rule by rule; by --compat abi, with each symbol that this torch lacks. With
    MANIFEST: can it be built here. Where torch is not installed: can aotc.standalone load it. Each check is ok, warn
    or fail, with what to do. Writes nothing. Exit code 1 if a check fails, 2 if the checks could not run.
    """
    with printing_to_stderr():
        checks = _checks(what, store_path, compat)
    if as_json:
        print_json(
            {
                "ok": all(check.status != "fail" for check in checks),
                "checks": [msgspec.structs.asdict(check) for check in checks],
            }
        )
    else:
        _show(checks)
    sys.exit(1 if any(check.status == "fail" for check in checks) else 0)


def _checks(what: str | None, store_path: Path | str, compat: Literal["minor", "abi"]) -> list[Check]:
    from aotc.tools.doctor.torch_import import check_torch

    torch = check_torch()
    if torch.status == "fail":
        return [torch]
    if what is None:
        from aotc.tools.doctor.machine import check_machine

        return [torch, *check_machine(str(store_path), with_torch=torch.status == "ok")]
    if is_manifest(Path(what)):
        if torch.status == "warn":
            return [msgspec.structs.replace(torch, status="fail")]
        from aotc.tools.doctor.build_checks import check_manifest

        return [torch, *check_manifest(Path(what), str(store_path))]
    from aotc.store.reference import parse_reference

    reference = parse_reference(what)
    if torch.status == "warn":
        from aotc.tools.doctor.standalone_checks import check_standalone_bundle

        return [torch, *check_standalone_bundle(reference, store_of(store_path, reference)[0])]
    from aotc.tools.doctor.bundle_checks import check_bundle

    return [torch, *check_bundle(reference, store_of(store_path, reference)[0], compat)]


def _show(checks: Sequence[Check]) -> None:
    width = max(len(check.name) for check in checks)
    ordered = sorted(checks, key=lambda check: [one.part for one in checks].index(check.part))
    for part, group in groupby(ordered, key=lambda check: check.part):
        echo(part)
        for check in group:
            needed = f"needs {check.needed}; here " if check.needed else ""
            echo(f"  {check.status:4}  {check.name:{width}}  {needed}{check.found}")
            if check.hint and check.status != "ok":
                echo(f"  {'':4}  {'':{width}}  hint: {check.hint}")
    count = Counter(check.status for check in checks)
    echo(f"{count['ok']} ok, {count['warn']} warn, {count['fail']} fail")
