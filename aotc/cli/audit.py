"""`aotc audit`: the advisories that are of the artifacts of a store."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aotc.amounts import counted
from aotc.cli.options import json_option, keys_option, store_option
from aotc.cli.output import echo, print_json, print_table
from aotc.cli.release import ask_password

if TYPE_CHECKING:
    from aotc.tools.audit.audit import Affection, Audit

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("what", metavar="[STORE|URL|REF]...", nargs=-1)
@store_option
@click.option("--advisories", "feed_at", metavar="STORE|URL", help="Also use the signed advisories of this store.")
@keys_option
@click.option("--rebuild", type=_FILE, metavar="MANIFEST", help="Print the commands that build what is affected again.")
@click.option("--sarif", "sarif_path", type=_FILE, help="Write SARIF 2.1.0 to this file.")
@click.option("--metrics", "metrics_path", type=_FILE, help="Write Prometheus' text format to this file.")
@click.option("--publish", "publish_at", metavar="STORE|URL", help="Put this aotc's advisories into a store instead.")
@click.option("--sign", "signing_key", metavar="FILE|env://NAME", help="With --publish: sign with this private key.")
@click.option("--expires", metavar="TIME", show_default="for ever", help="With --publish: the signature's lifetime.")
@json_option
def audit(
    what: Sequence[str],
    store_path: Path | str,
    feed_at: str | None,
    rebuild: Path | None,
    sarif_path: Path | None,
    metrics_path: Path | None,
    publish_at: str | None,
    signing_key: str | None,
    expires: str | None,
    as_json: bool,
) -> None:
    """List the advisories that are of the artifacts of live tags.

    An advisory is of a unit that was built without a patch of torch which its graph needs. `may apply` says that the
    build did not record the graph. Without arguments, the store is `--store`. Exit code 1 if an advisory applies or may
    apply, or an artifact cannot be read.
    """
    if bool(publish_at) != bool(signing_key):
        raise click.UsageError("--publish and --sign go together: a feed is read only if it is signed")
    if publish_at and signing_key:
        _publish(publish_at, signing_key, expires, as_json)
        return
    from aotc.advisories import own_feed
    from aotc.store.advisory_feed import read_feed
    from aotc.store.signing.trust import read_trust
    from aotc.tools.audit.audit import audit as run_audit

    feed = read_feed(feed_at, read_trust()) if feed_at else own_feed()
    done = run_audit(what or [str(store_path)], feed, str(store_path))
    if sarif_path:
        import aotc
        from aotc.tools.audit.sarif import sarif

        sarif_path.write_text(json.dumps(sarif(done.found, feed, aotc.__version__), indent=1) + "\n")
    if metrics_path:
        from aotc.telemetry.advisory_metrics import advisories_text

        metrics_path.write_text(advisories_text(done.found, len(done.artifacts) - len(done.unread)))
    if rebuild:
        _print_commands(done, rebuild)
    elif as_json:
        print_json({"advisories": len(feed.advisories), **done._asdict()})
    else:
        _show(done, len(feed.advisories))
    sys.exit(1 if done.found or done.unread else 0)


def _publish(where: str, signing_key: str, expires: str | None, as_json: bool) -> None:
    from aotc.advisories import own_feed
    from aotc.amounts import parse_age
    from aotc.store.advisory_feed import publish_feed
    from aotc.store.signing.keys import read_private_key

    key, feed = read_private_key(signing_key, ask_password), own_feed()
    digest = publish_feed(where, feed, key, parse_age(expires) if expires else None)
    if as_json:
        print_json({"digest": digest, "advisories": len(feed.advisories), "key": key.public.fingerprint})
    else:
        echo(f"published {len(feed.advisories)} advisories in {where}  {digest}  signed by {key.public.fingerprint}")


def _print_commands(done: Audit, manifest: Path) -> None:
    from aotc.manifest import read_manifest
    from aotc.tools.audit.rebuild import rebuild_commands

    models = {name: spec.patches_off for name, spec in read_manifest(manifest).models.items()}
    for line in rebuild_commands(done.found, manifest, models):
        echo(line)


def _show(done: Audit, known: int) -> None:
    if done.found:
        print_table(("reference", "target", "unit", "advisory", "effect", "", "operators"), map(_row, done.found))
        for one in {each.id: each for each in done.found}.values():
            fixed = f"; fixed in aotc {one.fixed}" if one.fixed else ""
            echo(f"{one.id}: {one.summary} (patch `{one.patch}`{fixed})")
    for unread in done.unread:
        echo(f"error: {unread.ref} {unread.target}: {unread.error}", err=True)
    of = f"{counted(len(done.artifacts), 'artifact')} by {known} advisories"
    sure = sum(each.sure for each in done.found)
    echo(
        f"{of}: found {sure} that apply, {len(done.found) - sure} that may apply"
        if done.found
        else f"{of}: none applies"
    )
    if done.found:
        echo("  hint: `--rebuild MANIFEST` prints the commands that build these again", err=True)


def _row(one: Affection) -> tuple[str, ...]:
    applies = "applies" if one.sure else "may apply"
    return one.ref, one.target, one.unit, one.id, one.effect, applies, " ".join(one.operators)
