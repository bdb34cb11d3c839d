"""Commands that pass a built bundle on: `aotc merge`, `sign`, `push`, `fetch` and `export`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from aotc.amounts import counted, size_text
from aotc.cli.options import StorePath, compat_option, json_option, local_folder, store_of, store_option, valid_tag
from aotc.cli.output import echo, print_json, progress_console
from aotc.cli.signals import end_on_sigterm
from aotc.errors import SignatureError, UnverifiedError

if TYPE_CHECKING:
    from aotc.store.remote.copied import Copied


@click.command()
@click.argument("stores", metavar="STORE...", nargs=-1, required=True, type=StorePath(path_type=Path, file_okay=False))
@click.option("--into", type=StorePath(path_type=Path, file_okay=False), required=True, help="The store to publish in.")
@click.option(
    "--tag",
    default="latest",
    show_default=True,
    callback=valid_tag,
    help="The tag to merge and publish.",
)
@json_option
def merge(stores: Sequence[Path | str], into: Path | str, tag: str, as_json: bool) -> None:
    """Publish the contents of several STOREs as one bundle per model.

    The stores are shards, or hold whole bundles for other targets. All or nothing: if a unit is missing that a shard's
    build had planned, no tag moves.
    """
    from aotc.compiler.publish.merging import merge_stores

    target = local_folder(into, "merge into a folder, and `aotc push` from there")
    merged = merge_stores([local_folder(store) for store in stores], target, tag)
    if as_json:
        print_json({**msgspec.to_builtins(merged), "store": str(into)})
        return
    echo(f"merged {counted(merged.units, 'unit')}; blobs copied: {sum(merged.copied.values())}")
    for model, digest in merged.bundles.items():
        echo(f"published {into}#{model}:{tag}  {digest}")


@click.command()
@click.argument("ref", required=False)
@store_option
@click.option("--key", metavar="FILE|env://NAME", help="The private key: cosign's, or PEM (ECDSA P-256, RSA, Ed25519).")
@click.option(
    "--as",
    "names",
    multiple=True,
    metavar="MODEL:TAG",
    show_default="REF itself",
    help="Sign for this name (repeatable).",
)
@click.option("--expires", metavar="TIME", show_default="for ever", help="The signature's lifetime, like 30d.")
@click.option("--identity", metavar="HOST/REPO", help="The signature's docker-reference, for policies of other tools.")
@click.option("--generate-key-pair", "prefix", metavar="PREFIX", help="Make PREFIX.key and PREFIX.pub instead.")
@json_option
def sign(
    ref: str | None,
    store_path: Path | str,
    key: str | None,
    names: Sequence[str],
    expires: str | None,
    identity: str | None,
    prefix: str | None,
    as_json: bool,
) -> None:
    """Sign a bundle with a key, in cosign's format.

    The key's password is $COSIGN_PASSWORD; without that variable it is asked for.
    """

    from aotc.amounts import parse_age
    from aotc.store.layout.store import Store
    from aotc.store.reference import parse_reference
    from aotc.store.signing.keys import generate_key_pair, read_private_key
    from aotc.store.signing.release import sign_release

    if prefix is not None:
        echo(" ".join(map(str, generate_key_pair(prefix, ask_password(confirm=True)))))
        return
    if ref is None or key is None:
        raise click.UsageError("give REF and --key, or --generate-key-pair")
    reference, lifetime = parse_reference(ref), parse_age(expires) if expires else None
    store = Store.open(local_folder(*store_of(store_path, reference)))
    private = read_private_key(key, ask_password)
    claims = sign_release(store, reference, private, names=names, lifetime=lifetime, identity=identity)
    if as_json:
        print_json({"key": private.public.fingerprint, "signatures": claims})
        return
    for claim in claims:
        until = f", until {claim.expires:%FT%TZ}" if claim.expires else ""
        echo(f"signed {claim.name or claim.digest}  {claim.digest}  by {private.public.fingerprint}{until}")


def ask_password(confirm: bool = False) -> bytes:
    """The password of a private key: `$COSIGN_PASSWORD`, else asked for. Raises SignatureError without a terminal."""
    if (given := os.environ.get("COSIGN_PASSWORD")) is not None:
        return given.encode()
    if not sys.stdin.isatty():
        raise SignatureError(
            "the key has a password, and there is no terminal to ask for it", hint="set COSIGN_PASSWORD"
        )
    asked: str = click.prompt("Password of the key", hide_input=True, confirmation_prompt=confirm, err=True, default="")
    return asked.encode()


@click.command()
@click.argument("ref")
@click.argument("destination", metavar="oci://HOST/REPO:TAG|URL[#MODEL:TAG]")
@click.option("--unsigned-name", is_flag=True, help="Push a signed bundle also to a name that it is not signed for.")
@store_option
@json_option
def push(ref: str, destination: str, unsigned_name: bool, store_path: Path | str, as_json: bool) -> None:
    """Upload a bundle to a registry or object storage.

    Only missing blobs are sent; the tag is set last. Signatures and attestations go along; an attestation that a key of
    $AOTC_TRUSTED_KEYS has signed replaces older ones by the same key. A bundle that is signed, but not for the name of
    the destination, is refused: no service with trusted keys would load it.
    """

    from aotc.cli.progress.transfer_progress import TransferProgress
    from aotc.store.layout.bundle import read_bundle
    from aotc.store.layout.store import Store
    from aotc.store.reference import parse_reference
    from aotc.store.remote.push import parse_destination
    from aotc.store.remote.push import push as run_push
    from aotc.store.signing.trust import read_trust
    from aotc.store.tagging import check_signed_for

    end_on_sigterm()
    reference = parse_reference(ref)
    to = parse_destination(destination, reference)
    store = Store.open(local_folder(*store_of(store_path, reference)))
    trust = read_trust()
    if not unsigned_name:
        check_signed_for(store, read_bundle(store, reference), to)
    with TransferProgress(progress_console(), f"push {reference.name}") as progress:
        copied = run_push(store, reference, to, keys=trust.keys if trust else (), on_event=progress.show)
    _show_copied("pushed", copied, as_json)


@click.command()
@click.argument("source", metavar="oci://HOST/REPO:TAG|URL#MODEL[:TAG]")
@click.option(
    "--store",
    "store_path",
    type=StorePath(path_type=Path, file_okay=False),
    help="The folder to fetch into.  [default: $AOTC_STORE, else $AOTC_CACHE_DIR/store]",
)
@click.option("--tag", show_default="the source's", callback=valid_tag, help="The tag in the local store.")
@click.option("--target", "targets", multiple=True, help="Fetch the artifact for this target (repeatable).")
@click.option("--all", "everything", is_flag=True, help="Fetch the artifacts for all targets.")
@compat_option
@json_option
def fetch(
    source: str,
    store_path: Path | str | None,
    tag: str | None,
    targets: Sequence[str],
    everything: bool,
    compat: Literal["minor", "abi"],
    as_json: bool,
) -> None:
    """Download a bundle from a registry or object storage.

    Fetches the artifacts that this machine runs, or those of --target or --all, into a local store. Only missing blobs
    are fetched. Signatures and attestations come along; signatures are checked if $AOTC_TRUSTED_KEYS is set. The tag is
    set last.
    """

    from aotc.cli.progress.transfer_progress import TransferProgress
    from aotc.runtime.fetch import local_store, runnable
    from aotc.store.reference import parse_reference
    from aotc.store.remote.fetching import fetch as run_fetch
    from aotc.store.remote.fetching import of_targets
    from aotc.store.signing.trust import read_trust

    end_on_sigterm()
    reference = parse_reference(source)
    target = local_store(store_path and local_folder(store_path, "fetch into a folder, and `aotc push` from there"))
    choose = of_targets(*targets) if targets or everything else functools.partial(runnable, compat=compat)
    with TransferProgress(progress_console(), f"fetch {reference.name}") as progress:
        copied = run_fetch(reference, target, choose, tag=tag, trust=read_trust(), on_event=progress.show)
    _show_copied("fetched", copied, as_json)


def _show_copied(did: str, copied: Copied, as_json: bool) -> None:
    if as_json:
        print_json(copied)
        return
    echo(f"{did} {copied.reference}  {copied.digest}")
    echo(
        f"  {copied.moved} of {copied.blobs} blobs moved; {size_text(copied.sent)} sent, "
        f"{size_text(copied.received)} received in {counted(copied.requests, 'request')} and {copied.seconds:.1f} s"
    )


@click.command()
@click.argument("ref")
@click.option(
    "--pt2",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write: an AOTInductor package, which torch's AOTIModelPackageLoader opens in C++.",
)
@click.option(
    "--standalone",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder to write: code and weights with a runtime, a C header and a Python file, which need no torch.",
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path, exists=True),
    help="With --standalone: a safetensors file, a shard index, or their folder.  [default: (frozen weights)]",
)
@click.option("--target", show_default="the bundle's, if it has one", help="The artifact for this target.")
@click.option("--allow-untested", is_flag=True, help="Also code that has never run: of another CPU or GPU.")
@store_option
@json_option
def export(
    ref: str,
    pt2: Path | None,
    standalone: Path | None,
    weights: Path | None,
    target: str | None,
    allow_untested: bool,
    store_path: Path | str,
    as_json: bool,
) -> None:
    """Write an artifact for programs without aotc: a file for torch in C++, or a folder that needs no torch.

    A package has no guards: the program passes the right tensors, and each library's metadata says which. Weights are
    arguments. A folder has the call table, compares every call with it, and holds the weights. With $AOTC_TRUSTED_KEYS,
    the bundle must be signed.
    """
    from aotc.machine.cpp_compiler import is_foreign
    from aotc.store.layout.bundle import read_artifact, read_bundle
    from aotc.store.layout.store import Store
    from aotc.store.reference import parse_reference
    from aotc.store.signing.trust import check_bundle
    from aotc.store.signing.verified import check_verified

    if (pt2 is None) == (standalone is None):
        raise click.UsageError("give one of --pt2 and --standalone")
    if weights and not standalone:
        raise click.UsageError("--weights goes with --standalone: a package takes weights as arguments")
    reference = parse_reference(ref)
    store = Store.open(local_folder(*store_of(store_path, reference)))
    bundle = read_bundle(store, reference)
    check_bundle(store, bundle, reference)  # as a load: a program without aotc would not ask
    artifacts = bundle.artifacts
    entries = [one for one in artifacts if target in (None, one.target)]
    if len(entries) != 1:
        known = ", ".join(one.target for one in artifacts)
        given = f"{reference} holds no artifact for {target}; " if target and not entries else ""
        raise click.UsageError(f"{given}name one of the bundle's targets with --target: {known}")
    artifact = read_artifact(store, entries[0])
    if artifact.untested and not allow_untested:
        try:
            check_verified(store, bundle.digest, entries[0], ref)
        except UnverifiedError as error:
            way = "write it with --allow-untested, and test it there"
            foreign = is_foreign(artifact.environment.machine)  # `aotc verify` does not run there
            error.hint = way if foreign else f"{error.hint}; or {way}"
            raise
    if standalone:
        from aotc.standalone.exporting.exported_folder import export_folder

        written = export_folder(artifact, store.blobs, weights, standalone)
        if as_json:
            print_json(written)
            return
        echo(f"wrote {standalone}  {size_text(sum(written.files.values()))} for {written.target}")
        for name, size in written.files.items():
            echo(f"  {name}  {size_text(size)}")
    elif pt2:
        from aotc.pt2 import write_package

        named = write_package(artifact, store.blobs, pt2)
        if as_json:
            print_json({"file": str(pt2), "target": entries[0].target, "models": list(named)})
            return
        echo(f"wrote {pt2}  {size_text(pt2.stat().st_size)} for {entries[0].target}")
        for name in named:
            echo(f"  {name}")
