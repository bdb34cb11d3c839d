"""Commands that show the contents of a store: `aotc ls`, `picks` and `diff`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aotc.amounts import counted, size_text
from aotc.cli.options import json_option, store_of, store_option
from aotc.cli.output import console, echo, print_json, print_table

if TYPE_CHECKING:
    from aotc.picks import UnitPicks
    from aotc.store.layout.store import Store
    from aotc.store.layout.tags import TagEntry
    from aotc.store.readable import ReadableStore
    from aotc.store.signing.trust import TrustedKeys
    from aotc.tools.inspection.artifact_picks import PickChange


@click.command("ls")
@click.argument("what", metavar="[[STORE#]MODEL]", required=False)
@store_option
@json_option
def list_store(what: str | None, store_path: Path | str, as_json: bool) -> None:
    """List the bundles of the store.

    `standalone` says of each target whether the code can run without torch: `yes`, `no` (`aotc inspect` says why) or
    `unknown`, of builds that did not record it.

    With MODEL: its tags, the one that was set last first, and whether each is signed for its name: `no`, `unchecked`
    (no AOTC_TRUSTED_KEYS are set), `trusted`, or why it is not; and whether each artifact has an attestation of
    `aotc verify`: `passed`, `failed`, `unmeasured` or `no`. Exit code 1 if files or
    records of a bundle are missing or a record is damaged; the others are still listed, and those that another version
    of aotc wrote are named. `aotc fsck` checks every byte.
    """
    from aotc.errors import CorruptError, RemoteError, SchemaVersionError, StoreError
    from aotc.store.opening import open_readable
    from aotc.store.reference import Reference, is_registry
    from aotc.store.signing.trust import read_trust
    from aotc.store.tagging import signed_as, tags_of

    before, _, model = (what or "").rpartition("#")
    if "://" in model:
        before, model = model, ""  # a store at a URL, all of it
    if before and not is_registry(before):
        store_of(store_path, Reference(before, "model", tag="latest"))
    where = before or str(store_path)
    store = open_readable(where)
    trust = read_trust() if model else None
    rows: list[dict[str, Any]] = []
    damaged: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    known: dict[tuple[str, str], dict[str, Any]] = {}
    entries = tags_of(store, where, model) if model else store.tags()
    bundles = Counter(str(entry) for entry in {(str(one), one.digest): one for one in entries}.values())
    for entry in entries:
        named = {"model": entry.model, "tag": entry.tag, "digest": entry.digest, "published": entry.published}
        try:
            if bundles[str(entry)] > 1:
                raise CorruptError(f"the tag {entry} names {bundles[str(entry)]} bundles")
            if (entry.model, entry.digest) not in known:
                known[entry.model, entry.digest] = _described(store, entry)
                if model:
                    known[entry.model, entry.digest]["verified"] = _verified(store, entry, trust)
            signed = {"signed": signed_as(store, where, entry, trust)} if model else {}
            rows.append({**named, **known[entry.model, entry.digest], **signed})
        except RemoteError:
            raise  # the next one would not be reached either
        except SchemaVersionError as error:
            others.append({**named, "error": error.message, "hint": error.hint})
        except StoreError as error:
            damaged.append({**named, "error": error.message})
    if as_json:
        print_json([*rows, *others, *damaged])
        sys.exit(1 if damaged else 0)
    print_table(
        (
            *("model:tag", "targets", "standalone", "buckets", "weights", "compressed", "published"),
            *(("verified", "signed") if model else ()),
            "digest",
        ),
        [
            (
                f"{r['model']}:{r['tag']}",
                " ".join(r["targets"]),
                " ".join(map(_fits, r["misfits"].values())),
                str(r["buckets"]),
                " ".join(r["weights"]),
                size_text(r["size"]),
                _moment(r["published"] or r["created"]),
                *((" ".join(dict.fromkeys(r["verified"].values())), r["signed"]) if model else ()),
                r["digest"][:19],
            )
            for r in rows
        ],
    )
    for one in others:
        echo(f"of another version: {one['model']}:{one['tag']}: {one['error']}", err=True)
        echo(f"  hint: {one['hint']}", err=True)
    for one in damaged:
        echo(f"error: {one['model']}:{one['tag']}: {one['error']}", err=True)
    if damaged:
        echo("  hint: `aotc fsck` lists all damage; build or fetch these bundles again", err=True)
    sys.exit(1 if damaged else 0)


def _fits(reasons: Sequence[str] | None) -> str:
    return "unknown" if reasons is None else "no" if reasons else "yes"


def _verified(store: ReadableStore, entry: TagEntry, trust: TrustedKeys | None) -> dict[str, str]:
    """By target, in the bundle's order, what has been attested of its artifact. Raises StoreError."""
    from aotc.store.layout.bundle import read_bundle
    from aotc.store.signing.verified import verified_in

    found = verified_in(store, entry.digest, trust)
    return {
        one.target: found[one.digest].verdict if one.digest in found else "no"
        for one in read_bundle(store, entry.reference, entry.bundle).artifacts
    }


def _moment(text: str) -> str:
    """A time in whole seconds; as it is if it is not a time."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return text


def _is_sparse(store: Store, entry: TagEntry) -> bool:
    """Whether the tag says that the store holds only some artifacts of the bundle."""
    from aotc.store.layout import oci

    return any(one.digest == entry.digest and one.annotation(oci.SPARSE) for one in store.entries())


def _described(store: ReadableStore, entry: TagEntry) -> dict[str, Any]:
    """What a row says of a bundle. Raises StoreError."""
    from aotc.errors import NotFoundError
    from aotc.standalone.misfits import misfits
    from aotc.store.layout.built import read_built
    from aotc.store.layout.bundle import each_file, read_bundle
    from aotc.store.layout.compiler_cache import read_cache
    from aotc.store.layout.store import Store

    bundle = read_bundle(store, entry.reference, entry.bundle)
    entries = bundle.artifacts
    if isinstance(store, Store):
        there = tuple(one for one in entries if store.blobs.has(one.digest, one.size))
        if there and there != entries and _is_sparse(store, entry):
            entries = there  # `aotc fetch` brought what this machine runs
    artifacts = [read_built(store, entry) for entry in entries if not entry.is_cache]
    files = [file for artifact in artifacts for file in each_file(artifact)]
    files += [read_cache(store, entry).pack for entry in entries if entry.is_cache]
    if isinstance(store, Store):
        missing = sorted({file.name for file in files if not store.blobs.has(file.blob, file.blob_size)})
        if missing:
            raise NotFoundError(f"missing files: {', '.join(missing)}", known=())
    blobs = {file.blob: file.blob_size for file in files}
    return {
        "created": bundle.created,
        "targets": [entry.target for entry in entries],
        "misfits": {artifact.target: misfits(artifact) for artifact in artifacts},
        "buckets": max((len(artifact.variants) for artifact in artifacts), default=0),
        "weights": sorted({artifact.weights for artifact in artifacts}),
        "size": sum(blobs.values()),
    }


@click.command()
@click.argument("refs", metavar="REF...", nargs=-1, required=True)
@store_option
@click.option("--diff", is_flag=True, help="Compare two REFs: show where the second decided otherwise, and the cost.")
@click.option(
    "--export", type=click.Path(path_type=Path, dir_okay=False), help="Write a file for `aotc build --picks`."
)
@json_option
def picks(refs: Sequence[str], store_path: Path | str, diff: bool, export: Path | None, as_json: bool) -> None:
    """Show what autotuning decided in REF.

    For each decision: the winner, the runner-up, the margin, and how often it is used.
    """
    from aotc.store.files.writing import write_output
    from aotc.store.reference import parse_reference
    from aotc.tools.inspection.artifact_picks import changes, exported, picks_of

    if diff and len(refs) != 2:
        raise click.UsageError("--diff compares two references")
    if diff and export:
        raise click.UsageError("give --diff or --export, not both")
    stores = store_of(store_path, *map(parse_reference, refs))
    found = [picks_of(ref, store) for ref, store in zip(refs, stores, strict=True)]
    if diff:
        _show_pick_changes(changes(*found), as_json)
        return
    units = [unit for bundle in found for unit in bundle]
    if export:
        write_output(export, exported(units))
        wrote = counted(sum(len(unit.picks) for unit in units), "pick")
        echo(f"wrote {wrote} of {counted(len(units), 'unit')} to {export}", err=as_json)
    if as_json:
        print_json(units)
    if export or as_json:
        return
    for unit in units:
        _show_unit_picks(unit)


def _show_unit_picks(unit: UnitPicks) -> None:
    elsewhere = sum(bool(pick.measured_in) for pick in unit.picks)
    shared = f", {elsewhere} of the picks measured in other units of the build" if elsewhere else ""
    echo()
    echo(unit.name)
    echo(f"  on {unit.device}, torch {unit.torch}{shared}")
    if not unit.picks:
        echo("  nothing was decided by measurement")
    for pick in unit.picks:
        about = " ".join((*(text.partition(" stride")[0] for text in pick.inputs), *pick.arguments))
        echo(_cut(f"  {pick.uses} × {pick.kind} {pick.subject}  {about}", LINE))
        for chosen in filter(None, (pick.winner, pick.runner_up)):
            margin = f"  {pick.margin:+.1%}" if chosen is pick.runner_up and pick.margin is not None else ""
            if margin and pick.within_spread:
                margin += ", not decided by time"
            echo(_cut(f"      {_ms(chosen.ms)} ms  {chosen}", LINE - len(margin)) + margin)
        if pick.on_busy_machine:
            echo("      measured on a busy machine")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


LINE = 80
"""Characters of a line of `aotc picks`; `--json` has all of them."""


def _show_pick_changes(found: Sequence[PickChange], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    print_table(
        ("unit", "kind", "what", "first", "ms", "second", "ms", "cost"),
        [
            (
                change.unit,
                change.kind,
                change.subject,
                str(change.first) if change.first else "-",
                _ms(change.first.ms if change.first else None),
                str(change.second) if change.second else "-",
                _ms(change.second.ms if change.second else None),
                "-" if change.cost is None else f"{change.cost:+.1%}",
            )
            for change in found
        ],
    )
    if not found:
        echo("the same picks")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@store_option
@click.option("--target", help="Compare only the artifacts for this target.")
@click.option("--sources", is_flag=True, help="Show how the sources of changed kernels differ.")
@click.option(
    "--bytes", "in_bytes", is_flag=True, help="Show the sections, symbols and texts that differ in libraries."
)
@json_option
def diff(
    a: str, b: str, store_path: Path | str, target: str | None, sources: bool, in_bytes: bool, as_json: bool
) -> None:
    """Show what differs between two bundles, and why.

    Exit code 0 if nothing differs, 1 if anything does.
    """
    from aotc.store.opening import open_readable
    from aotc.store.reference import parse_reference
    from aotc.tools.inspection.compare import compare_bundles, open_side
    from aotc.tools.inspection.tree import difference_tree

    references = [parse_reference(ref) for ref in (a, b)]
    stores = store_of(store_path, *references)
    sides = [open_side(open_readable(store), ref) for store, ref in zip(stores, references, strict=True)]
    difference = compare_bundles(sides[0], sides[1], target)
    if as_json:
        print_json({"equal": difference.equal, **msgspec.to_builtins(difference)})
    else:
        console().print(difference_tree(a, b, difference, sources=sources, in_bytes=in_bytes), soft_wrap=True)
    sys.exit(0 if difference.equal else 1)
