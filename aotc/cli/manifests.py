"""Commands that help to write a manifest: `aotc init` and `aotc schema`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from aotc.cli.output import echo, echo_lines, print_json, printing_to_stderr


@click.command()
@click.argument("factory", metavar="[FACTORY]", required=False)
@click.option(
    "--call",
    metavar="FUNCTION",
    show_default="the model is asked",
    help="package.module:function that gives the arguments of one call.",
)
@click.option(
    "--kwarg",
    "kwargs",
    multiple=True,
    metavar="NAME=VALUE",
    help="An argument of the factory, as in YAML (repeatable).",
)
@click.option(
    "--from-store",
    metavar="[STORE#]NAME",
    help="Instead of FACTORY: what `aotc.compile` remembers in a store, by the name that its log and `aotc ls` say.",
)
@click.option("--name", show_default="the factory's", help="The model's name.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("manifest.yaml"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Capture the model, in another process for at most a minute; write buckets or regions that can be captured.",
)
def init(
    factory: str | None,
    call: str | None,
    kwargs: Sequence[str],
    from_store: str | None,
    name: str | None,
    output: Path,
    check: bool,
) -> None:
    """Write a first manifest from one example call.

    FACTORY is package.module:name, a callable that returns the model.
    """
    if (factory is None) == (from_store is None):
        raise click.UsageError("give FACTORY or --from-store")
    given = _read_kwargs(kwargs)
    with printing_to_stderr():
        if from_store is not None:
            from aotc.tools.remembering.compile import default_store
            from aotc.tools.remembering.memory.manifest import write_remembered

            if call or given or name:
                raise click.UsageError("--call, --kwarg and --name do not go with --from-store, which knows them")
            store, _, remembered = from_store.rpartition("#")
            written = write_remembered(output, store or default_store(), remembered, check=check)
        else:
            from aotc.tools.recording.first_manifest import write_first_manifest

            written = write_first_manifest(output, str(factory), call, given, name, check=check)
    echo_lines(written, nl=False)
    echo(f"wrote {output}", err=True)


def _read_kwargs(texts: Sequence[str]) -> dict[str, Any]:
    import yaml

    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--kwarg")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise click.BadParameter(f"{name}: {error}", param_hint="--kwarg") from None
    return found


@click.command()
def schema() -> None:
    """Print the JSON Schema of manifests, for editors."""
    from aotc.manifest import editor_schema

    print_json(editor_schema())
