"""`aotc cache`: the caches of torch.compile, Triton and vLLM in a store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aotc.amounts import counted, size_text
from aotc.cli.options import json_option, log_options, store_of, store_option
from aotc.cli.output import echo, echo_lines, print_json, progress_console
from aotc.cli.signals import end_on_sigterm

if TYPE_CHECKING:
    from aotc.store.reference import Reference
    from aotc.store.remote.transfer import OnTransfer
    from aotc.tools.caches.restore import Restored
    from aotc.tools.caches.save import SavedCache

_cache_option = click.option(
    "--cache",
    "given",
    multiple=True,
    metavar="KIND[=FOLDER]",
    show_default="inductor, triton and vllm, where this process would look for them",
    help="Whose cache, and its folder (repeatable): inductor, triton, vllm, flashinfer, deepgemm, tilelang, cutedsl, "
    "helion, computecache.",
)
_code_option = click.option(
    "--code",
    default="",
    metavar="TEXT",
    help="The version of the code that is compiled, like a commit: part of the key.",
)


@click.group()
def cache() -> None:
    """Keep the caches of torch.compile, Triton, vLLM and others that compile at run time in a store.

    For models that cannot be exported. A start with a restored cache compiles less, and may still compile.
    """


_require_option = click.option(
    "--require",
    "required",
    multiple=True,
    type=click.Choice(["used", "no-compiler"]),
    help="Exit with 1 where a restored file was replaced, another one was written, or none was used; where a compiler "
    "ran (repeatable).",
)


@cache.command()
@click.argument("ref")
@_cache_option
@_code_option
@click.option(
    "--prune",
    metavar="RECEIPT",
    type=click.Path(path_type=Path),
    help="Save only the files that the start of this receipt used. Refused where that start compiled.",
)
@store_option
@json_option
def save(ref: str, given: Sequence[str], code: str, prune: Path | None, store_path: Path | str, as_json: bool) -> None:
    """Save what compilers left in their cache folders as the bundle REF.

    Without a tag, the tag is the key: GPU or CPU, versions of torch, Triton, vLLM and Python, and --code. A remote
    store gets what it lacks.
    """
    from aotc.tools.caches.origin import HEADERS, this_origin

    end_on_sigterm()
    origin = this_origin(code)
    saved = _saved(ref, given, code, prune, store_path)
    if as_json:
        print_json(saved._asdict())
        return
    _show_saved(saved, given, err=False)
    if saved.files.get("inductor") and origin.variables.get(HEADERS) != "0":
        echo("warning: where there is C++ code, each start with this cache runs a C++ compiler for a header", err=True)
        echo(f"  hint: export {HEADERS}=0 where the program compiles, where it is saved, and where it starts", err=True)


def _saved(ref: str, given: Sequence[str], code: str, prune: Path | None, store_path: Path | str) -> SavedCache:
    from aotc.tools.caches.folders import cache_folders
    from aotc.tools.caches.origin import this_origin
    from aotc.tools.caches.receipt import read
    from aotc.tools.caches.stores import reference_of, save_as

    folders, origin = cache_folders(given), this_origin(code)
    reference = reference_of(ref, origin)
    where = _store_of(reference, store_path)
    receipt = read(prune) if prune is not None else None
    with _transfer("push", reference, where) as on_event:
        return save_as(reference, where, folders, origin, receipt, on_event)


def _show_saved(saved: SavedCache, given: Sequence[str], err: bool) -> None:
    from aotc.tools.caches.folders import cache_folders

    echo(f"saved {saved.reference}  {saved.digest}", err=err)
    for kind, folder in cache_folders(given).items():
        if count := saved.files[kind]:
            echo(f"  {kind}: {counted(count, 'file')} of {folder}", err=err)
    echo(f"  {size_text(saved.size)}, {size_text(saved.stored)} compressed", err=err)
    if saved.left_out:
        echo(f"  left out: {counted(saved.left_out, 'link or file')} that cannot be kept", err=err)


@cache.command()
@click.argument("ref")
@_cache_option
@_code_option
@click.option(
    "--receipt",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Begin a receipt there, for `aotc cache receipt`.",
)
@store_option
@json_option
def restore(
    ref: str, given: Sequence[str], code: str, receipt: Path | None, store_path: Path | str, as_json: bool
) -> None:
    """Write the files of the cache REF to the compilers' cache folders.

    Without a tag, REF is the cache of this machine's key. Versions and digests are compared before anything is written;
    files that are there stay. The files are pickles and libraries, which compilers run: set $AOTC_TRUSTED_KEYS.
    """
    end_on_sigterm()
    watched = _restored(ref, given, code, receipt, store_path, as_json=as_json, err=False)
    if watched and not as_json:
        echo(f"  receipt: export {' '.join(f'{name}={value}' for name, value in watched.items())}")


def _restored(
    ref: str,
    given: Sequence[str],
    code: str,
    receipt: Path | None,
    store_path: Path | str,
    *,
    as_json: bool,
    err: bool,
) -> dict[str, str]:
    """Restore, and say so, on standard error with `err`. Returns the variables by which a program is watched."""
    from aotc.errors import NotFoundError
    from aotc.store.signing.trust import read_trust
    from aotc.tools.caches.folders import cache_folders
    from aotc.tools.caches.origin import this_origin, variable_rules
    from aotc.tools.caches.receipt import begin
    from aotc.tools.caches.restore import cache_of
    from aotc.tools.caches.restore import restore as run_restore
    from aotc.tools.caches.stores import opened, reference_of

    folders, here = cache_folders(given), this_origin(code)
    reference = reference_of(ref, here)
    where = _store_of(reference, store_path)
    try:
        with _transfer("fetch", reference, where) as on_event:
            store, bundle = opened(reference, where, on_event)
    except NotFoundError as error:
        if reference.tag == here.tag():
            error.message += "; that tag is the key of this machine, its versions and --code"
            error.hint += f"; `aotc doctor {reference.model or where}:TAG` compares one of them with this machine"
        raise
    done = run_restore(store, bundle, folders, here)
    kept = cache_of(store, bundle)
    watched = begin(receipt, kept, folders) if receipt is not None else {}
    if as_json:
        files = {kind: one._asdict() for kind, one in done.items()}
        print_json({"digest": bundle.digest, "files": files, "variables": watched})
        return watched
    echo(f"restored {reference}  {bundle.digest}", err=err)
    for kind, one in done.items():
        if any(one):
            _show(kind, one, folders[kind], err)
    for rule in variable_rules(kept, here):
        if rule.issue is not None:
            echo(f"warning: {rule.issue.message}: what depends on it is compiled again", err=True)
            echo(f"  hint: {rule.issue.hint}", err=True)
    if read_trust() is None:
        echo("warning: no signature was asked for, and compilers run what these files hold", err=True)
        echo("  hint: sign the cache with `aotc sign`, and set AOTC_TRUSTED_KEYS", err=True)
    return watched


@cache.command()
@click.argument("folder", type=click.Path(path_type=Path))
@_require_option
@json_option
def receipt(folder: Path, required: Sequence[str], as_json: bool) -> None:
    """Show what became of a restored cache: how many of its files were used, and what was compiled all the same.

    FOLDER is that of `aotc cache restore --receipt`. Python programs write down there what they do, with the variables
    that the restore prints; of any other, what they have written to the cache folders is seen.
    """
    if not _receipt_holds(folder, required, as_json=as_json, err=False):
        raise click.exceptions.Exit(1)


@cache.command(context_settings={"ignore_unknown_options": True})
@click.argument("ref")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@_cache_option
@_code_option
@_require_option
@click.option(
    "--save",
    "saving",
    is_flag=True,
    help="Save the cache as REF where COMMAND has compiled and ended with 0; REF need not exist before.",
)
@store_option
def run(
    ref: str,
    command: Sequence[str],
    given: Sequence[str],
    code: str,
    required: Sequence[str],
    saving: bool,
    store_path: Path | str,
) -> None:
    """Restore the cache REF, run COMMAND from it, and show the receipt: `aotc cache run REF -- python app.py`.

    What this prints itself goes to standard error. The exit code is that of COMMAND, or 1 by --require.
    """
    import os
    import subprocess
    import tempfile

    from aotc.errors import NotFoundError
    from aotc.tools.caches.folders import VARIABLES, cache_folders
    from aotc.tools.caches.receipt import REQUIREMENTS, begin, read

    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="aotc-receipt-") as folder:
        try:
            watched = _restored(ref, given, code, Path(folder), store_path, as_json=False, err=True)
        except NotFoundError as error:
            if not saving:
                raise
            echo(f"nothing is restored: {error.message}", err=True)
            watched = begin(Path(folder), None, cache_folders(given))
        named = {VARIABLES[kind]: str(path) for kind, path in cache_folders(given).items()} if given else {}
        try:
            process = subprocess.Popen(command, env={**os.environ, **named, **watched})
        except OSError as error:
            raise click.UsageError(f"{command[0]} cannot be run: {error.strerror}") from error
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        holds = _receipt_holds(Path(folder), required, as_json=False, err=True)
        if saving and status == 0 and read(Path(folder)).flaws(REQUIREMENTS):
            _show_saved(_saved(ref, given, code, None, store_path), given, err=True)
    if status:
        raise click.exceptions.Exit(status if status > 0 else 128 - status)
    if not holds:
        raise click.exceptions.Exit(1)


def _receipt_holds(folder: Path, required: Sequence[str], *, as_json: bool, err: bool) -> bool:
    """Show a receipt, and whether it is as required."""
    import msgspec

    from aotc.tools.caches.receipt import read

    found = read(folder)
    flaws = found.flaws(required)
    if as_json:
        print_json({**msgspec.to_builtins(found), "flaws": msgspec.to_builtins(flaws)})
        return not flaws
    used = f"{len(found.used)} of {counted(found.restored, 'restored file')} used" if found.processes else "use unknown"
    echo(
        f"receipt: {used}, {len(found.written)} written anew, {len(found.replaced)} replaced, "
        f"{counted(len(found.compilers), 'compile')}, seen by {counted(found.processes, 'Python interpreter')}",
        err=err,
    )
    for path in found.written:
        echo(f"  written anew: {path}", err=err)
    for path in found.replaced:
        echo(f"  replaced: {path}", err=err)
    for each in found.compilers:
        echo(f"  {each.compiler}: {', '.join(each.sources)}", err=err)
    for flaw in flaws:
        echo_lines(f"not as required: {flaw}", err=True)
    return not flaws


def _show(kind: str, one: Restored, folder: Path, err: bool) -> None:
    there = f", {one.equal} were there" if one.equal else ""
    echo(f"  {kind}: {counted(one.written, 'file')} written{there}: {folder}", err=err)
    if one.other:
        echo(f"warning: {kind}: {counted(one.other, 'file')} of other contents stayed as before in {folder}", err=True)
        echo(f"  hint: for those of the cache, restore into an empty folder: --cache {kind}=FOLDER", err=True)


def _store_of(reference: Reference, store_path: Path | str) -> str:
    return store_of(store_path, reference)[0]


@contextlib.contextmanager
def _transfer(verb: str, reference: Reference, where: str) -> Iterator[OnTransfer | None]:
    """The progress of a transfer from or to a remote store."""
    from aotc.cli.progress.transfer_progress import TransferProgress
    from aotc.store.reference import is_remote

    if not is_remote(where):
        yield None
        return
    with TransferProgress(progress_console(), f"{verb} {reference.name}") as progress:
        yield progress.show


for _command in (save, restore, receipt, run):
    log_options(_command)
