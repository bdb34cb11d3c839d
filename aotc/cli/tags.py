"""Commands that change tags, and what is attached to a bundle: `aotc tag`, `aotc rm` and `aotc prune`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aotc.amounts import size_text
from aotc.cli.options import json_option, keys_option, store_of, store_option
from aotc.cli.output import echo, print_json

if TYPE_CHECKING:
    from aotc.store.reference import Reference
    from aotc.store.tagging import Tagged, Untagged


@click.command()
@click.argument("ref")
@click.argument("names", metavar="NEW...", nargs=-1, required=True)
@store_option
@json_option
def tag(ref: str, names: Sequence[str], store_path: Path | str, as_json: bool) -> None:
    """Give the bundle of REF further names in its store.

    NEW is MODEL:TAG, or TAG alone. A tag that exists is moved, so `aotc tag model:previous model:latest` rolls back.
    No blob moves. Says so where the bundle is signed, but not for its new name.
    """
    from aotc.store.reference import parse_reference
    from aotc.store.signing.trust import read_trust
    from aotc.store.tagging import set_tags

    reference = parse_reference(ref)
    (where,) = store_of(store_path, reference)
    tagged = set_tags(where, reference, names, read_trust())
    if as_json:
        print_json(tagged)
        return
    for one in tagged:
        _show_tagged(one, where, reference)


def _show_tagged(one: Tagged, where: str, reference: Reference) -> None:
    was = "" if not one.before else "  (as before)" if one.before == one.digest else f"  (was {one.before})"
    echo(f"tagged {one.name}  {one.digest}{was}")
    if one.left:
        model = one.name.partition(":")[0]
        echo(f"  no tag names {one.before[:19]} now, so `aotc gc` may remove it; to keep it:")
        echo(f"  aotc tag {shlex.quote(where)}#{model}@{one.before} {model}:previous")
    if one.signing:
        echo(f"warning: {one.signing.message}", err=True)
        echo(f"  hint: {one.signing.hint}", err=True)


@click.command()
@click.argument("refs", metavar="MODEL:TAG...", nargs=-1, required=True)
@store_option
@json_option
def rm(refs: Sequence[str], store_path: Path | str, as_json: bool) -> None:
    """Remove tags.

    Removes names only. What no tag reaches any more stays until `aotc gc` removes it; of a remote store, aotc removes
    no blobs. Says how much that is, and which tags still name the bundle.
    """
    from aotc.store.reference import parse_reference
    from aotc.store.tagging import remove_tag

    references = [(ref, parse_reference(ref)) for ref in refs]
    for ref, reference in references:
        if reference.tag is not None and not ref.endswith(f":{reference.tag}"):
            raise click.UsageError(f"{ref} names no tag; write {ref}:{reference.tag} to remove that one")
    removed = []
    stores = store_of(store_path, *(reference for _, reference in references))
    for (_, reference), where in zip(references, stores, strict=True):
        removed.append(remove_tag(where, reference))
        if not as_json:
            _show_removed(removed[-1], where, reference)
    if as_json:
        print_json(removed)


def _show_removed(one: Untagged, where: str, reference: Reference) -> None:
    echo(f"removed {one.name}  {one.digest}")
    if one.others:
        echo(f"  {', '.join(one.others)} still {'names' if len(one.others) == 1 else 'name'} the bundle")
        return
    back = shlex.quote(where) + ("" if reference.in_registry else f"#{reference.model}") + f"@{one.digest}"
    if left := one.unreached:
        if left.free:
            echo(
                f"  {size_text(left.free)} that no tag reaches now: `aotc gc` removes them, not sooner than in an hour"
            )
        if left.in_units:
            echo(f"  {size_text(left.in_units)} that finished units keep, until `aotc gc --older-than AGE`")
    elif reference.in_registry:
        echo("  the registry's own garbage collection may remove what no tag names")
    elif "://" in where:
        echo("  no tag names the bundle now; aotc removes no blobs from there")
    echo(f"  until that is gone, the tag comes back by: aotc tag {back} {reference.tag}")


@click.command()
@click.argument("ref")
@keys_option
@store_option
@json_option
def prune(ref: str, store_path: Path | str, as_json: bool) -> None:
    """Remove the signatures and attestations of a bundle that no trusted key made.

    Of a bundle in a folder, a registry or object storage. Anyone who may push can attach some, and a bundle keeps 100
    of each kind. Signatures of cosign without a key go, too.
    """
    from aotc.store.pruning import prune as remove_others
    from aotc.store.reference import parse_reference
    from aotc.store.signing.trust import read_trust

    reference = parse_reference(ref)
    (where,) = store_of(store_path, reference)
    trust = read_trust()
    pruned = remove_others(where, reference, trust.keys if trust else ())
    if as_json:
        print_json(pruned)
        return
    for one in pruned:
        echo(f"{one.kind}: {one.removed} removed, {one.kept} kept")
    if not pruned:
        echo(f"{reference.name} has neither signatures nor attestations")
