"""Commands that keep a store in order: `aotc fsck` and `aotc gc`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from aotc.amounts import counted, size_text
from aotc.cli.options import json_option, local_folder, store_option
from aotc.cli.output import echo, print_json

if TYPE_CHECKING:
    from aotc.store.maintenance.reports import Freed, FsckReport


@click.command()
@store_option
@click.option("--repair", is_flag=True, help="Remove damaged files, restore index.json, and list each change.")
@json_option
def fsck(store_path: Path | str, repair: bool, as_json: bool) -> None:
    """Check every byte of the store.

    Builds may run meanwhile. Exit code 1 on damage; garbage is not damage.
    """
    from aotc.store.maintenance.fsck import fsck as check

    report = check(local_folder(store_path), repair=repair)
    if as_json:
        print_json({**msgspec.to_builtins(report), "clean": not report.errors})
    else:
        _show_findings(report)
    sys.exit(1 if report.errors else 0)


def _show_findings(report: FsckReport) -> None:
    for done in report.repairs:
        echo(f"repaired: {done.path}: {done.action}")
    for found in report.findings:
        if found.severity == "garbage" or found.follows:  # the blob's finding says who needs it
            continue
        echo(f"{found.severity}: {found.kind}: {found.path}: {found.message}", err=True)
        if found.expected or found.actual:
            echo(f"    expected {found.expected or '-'}, found {found.actual or '-'}", err=True)
        if found.needed_by:
            echo(f"    needed by {', '.join(found.needed_by)}", err=True)
        if found.hint:
            echo(f"    hint: {found.hint}", err=True)
    garbage = [found for found in report.findings if found.severity == "garbage"]
    if garbage:
        size = size_text(sum(found.size for found in garbage))
        echo(f"garbage: {counted(len(garbage), 'file')}, {size}; `aotc gc` frees them")
    errors = counted(sum(not found.follows for found in report.errors), "error")
    echo(f"{report.folder}: {counted(report.blobs, 'blob')}, {size_text(report.size)} read, {errors}")


@click.command()
@store_option
@click.option(
    "--older-than", metavar="AGE", help="Remove units and logs (with --untag, tags too) not used for AGE, like 30d."
)
@click.option("--max-size", metavar="SIZE", help="Remove what was used least recently, until SIZE is left, like 20GiB.")
@click.option("--untag", is_flag=True, help="Remove tags too, by --keep, --keep-last, --older-than or --max-size.")
@click.option("--keep", metavar="PATTERN", multiple=True, help="With --untag: keep tags like 'model:*' (repeatable).")
@click.option(
    "--keep-last",
    type=click.IntRange(min=0),
    metavar="N",
    show_default="1",
    help="With --untag: keep the N versions of each model that were published last.",
)
@click.option("--grace", metavar="AGE", default="1h", show_default=True, help="Keep unreferenced blobs for AGE.")
@click.option("--dry-run", is_flag=True, help="List what would be removed; remove nothing.")
@json_option
def gc(
    store_path: Path | str,
    older_than: str | None,
    max_size: str | None,
    untag: bool,
    keep: Sequence[str],
    keep_last: int | None,
    grace: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove unreferenced blobs, and old units and tags by rules.

    Blobs that a tag reaches are kept. Exit code 1 if --max-size cannot be reached because of them.
    """
    from aotc.amounts import parse_age, parse_size
    from aotc.store.layout.store import Store
    from aotc.store.maintenance.gc import collect
    from aotc.store.maintenance.retention import Policy

    age, size = parse_age(older_than) if older_than else None, parse_size(max_size) if max_size else None
    policy = Policy(age, size, untag, tuple(keep), keep_last, parse_age(grace))
    freed = collect(Store.open(local_folder(store_path, _NO_GC)), policy, dry_run=dry_run)
    if as_json:
        print_json({**msgspec.to_builtins(freed), "freed": freed.freed})
    else:
        _show_freed(freed)
    sys.exit(1 if freed.over else 0)


_NO_GC = "aotc deletes nothing from a remote store: use its own tools"


def _show_freed(freed: Freed) -> None:
    for removal in freed.removed:
        size = f"  {size_text(removal.size)}" if removal.size else ""
        echo(f"{removal.kind} {removal.name}{size}: {removal.reason}")
    verb = "would be freed" if freed.dry_run else "freed"
    echo(f"{freed.folder}: {size_text(freed.freed)} {verb}, {size_text(freed.kept)} kept")
    if freed.waiting:
        echo(f"{size_text(freed.waiting)} more can be freed after the grace period: readers may still use them")
    for writer in freed.writers:
        echo(f"kept everything written since this writer began: {writer}")
    if freed.over:
        echo(f"error: {size_text(freed.over)} over the size limit", err=True)
        echo("  hint: the rest is tagged or in use: remove tags with --untag, or raise the limit", err=True)
