"""Options that several commands share, and the parsing of a store's path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aotc.cli.output import QUIET
from aotc.errors import StoreError

if TYPE_CHECKING:
    from aotc.store.reference import Reference

DEFAULT_STORE = "aotc-store"


class StorePath(click.Path):
    """A folder, or the URL of a remote store. A URL stays a string: a Path would drop one of its slashes."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        return value if "://" in str(value) else super().convert(value, parameter, context)


store_option = click.option(
    "--store",
    "store_path",
    type=StorePath(path_type=Path, file_okay=False),
    default=lambda: os.environ.get("AOTC_STORE") or DEFAULT_STORE,
    show_default=f"$AOTC_STORE, else {DEFAULT_STORE}",
    help="The store's folder, or its URL: s3://BUCKET/PREFIX, gs://, az://, https://, ….",
)

compat_option = click.option(
    "--compat",
    type=click.Choice(["minor", "abi"]),
    default="minor",
    show_default=True,
    help="As aotc.load(…, compat=…). abi: also code of another torch minor, by torch's C shim.",
)


def store_of(store_path: Path | str, *references: Reference) -> list[str]:
    """The store of each reference: its own, else `--store`.

    Raises ReferenceFormatError where `--store` is given, and every reference names another.
    """
    from click.core import ParameterSource

    from aotc.store.reference import store_named

    given = click.get_current_context().get_parameter_source("store_path") is ParameterSource.COMMANDLINE
    if given and all(reference.store is not None for reference in references):
        return [str(store_named(reference, str(store_path), "--store")) for reference in references]
    return [reference.store or str(store_path) for reference in references]


def _trust(context: click.Context, parameter: click.Parameter, keys: Sequence[str]) -> None:
    """For the time of the command, in the environment: the processes that it starts read it too."""
    if keys:
        before = os.environ.get("AOTC_TRUSTED_KEYS")
        os.environ["AOTC_TRUSTED_KEYS"] = os.pathsep.join(keys)
        if before is None:
            context.call_on_close(lambda: os.environ.pop("AOTC_TRUSTED_KEYS"))
        else:
            context.call_on_close(lambda: os.environ.update(AOTC_TRUSTED_KEYS=before))


keys_option = click.option(
    "--key",
    multiple=True,
    expose_value=False,
    callback=_trust,
    show_default="$AOTC_TRUSTED_KEYS",
    help="Refuse bundles that this public key has not signed (repeatable).",
)
page_option = click.option(
    "--html", "page", type=click.Path(path_type=Path), help="Write a page for a browser to this file."
)


def valid_tag(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback: refuse an invalid tag before anything is compiled or downloaded."""
    from aotc.store.layout.names import name_flaw

    if value is not None and (flaw := name_flaw(value)):
        raise click.BadParameter(f"{value!r} is not a tag name: {flaw}")
    return value


def _note_json(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    context.find_root().meta[_JSON] = value
    return value


def wants_json(context: click.Context) -> bool:
    """Whether the command was given `--json`."""
    return bool(context.find_root().meta.get(_JSON))


_JSON = "aotc.json"
json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    callback=_note_json,
    help='Print one JSON document instead of tables; an error is the document {"error": …}.',
)


def log_options(command: click.Command) -> click.Command:
    """Give a command `-v` and `-q`."""

    def log(context: click.Context, parameter: click.Parameter, count: int) -> None:
        if count:
            from aotc.log import log_to_stderr

            log_to_stderr("INFO" if count == 1 else "DEBUG")

    def be_quiet(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        context.find_root().meta[QUIET] = value

    for option in (
        click.option(
            "-v",
            "--verbose",
            count=True,
            expose_value=False,
            callback=log,
            help="Log what is done; -vv: each decision.",
        ),
        click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=be_quiet, help="Show no progress."),
    ):
        option(command)
    return command


_FETCH_FIRST = "fetch the bundle into a folder first: `aotc fetch {}#MODEL:TAG --all --store FOLDER`"


def local_folder(store: Path | str, hint: str = _FETCH_FIRST) -> Path:
    """The folder of a store. Raises StoreError for a URL; `{}` in the hint is replaced by it."""
    if "://" not in str(store):
        return Path(store)
    scheme, _, rest = str(store).partition("://")
    if scheme == "file":
        hint = f"name the folder itself: {rest}"
    raise StoreError(f"{store} is not a folder, and this command works on one", hint=hint.replace("{}", str(store)))


def is_manifest(what: Path) -> bool:
    """Whether `what` is a file, or named like a manifest that should exist."""
    try:
        return what.suffix in (".yaml", ".yml") or what.is_file()
    except OSError:  # longer than a file's name
        return False
