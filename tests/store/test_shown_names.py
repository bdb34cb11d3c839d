"""Names and messages of others, as they come to a terminal: as they are written, and without control characters."""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from processes import run_aotc
from rich.console import Console
from sample_artifacts import CREATED, stored_artifact

from aotc.cli import _Main, main
from aotc.cli.progress.transfer_progress import TransferProgress
from aotc.errors import (
    BindError,
    BuildError,
    CorruptError,
    EnvironmentMismatchError,
    Issue,
    MissError,
    OperatorError,
    RemoteError,
    StoreError,
)
from aotc.store.layout.oci import PUBLISHED
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store

ODD = "[red]x[/green] :smile: \x1b[2J\x07\x9b31m {0}"
SHOWN = r"[red]x[/green] :smile: \x1b[2J\x07\x9b31m {0}"


@pytest.fixture
def odd_store(store: Store, work: Path) -> Store:
    """A store that somebody else has written, who said so when the bundle was made."""
    publish(store, "tiny", "v1", [stored_artifact(store, work, (1,))], created=ODD)
    index = json.loads((store.path / "index.json").read_bytes())
    index["manifests"][0]["annotations"][PUBLISHED] = ODD
    (store.path / "index.json").write_text(json.dumps(index))
    return store


def test_a_table_shows_markup_and_escapes_as_text(odd_store: Store) -> None:
    ran = run_aotc("ls", "--store", odd_store.path)
    assert ran.returncode == 0, ran.stderr
    assert SHOWN in ran.stdout
    assert not {"\x1b", "\x07", "\x9b"} & {*ran.stdout, *ran.stderr}


def test_json_keeps_every_character_and_sends_none_to_the_terminal(odd_store: Store) -> None:
    ran = run_aotc("ls", "--store", odd_store.path, "--json", PYTHONIOENCODING="utf-8")
    (row,) = json.loads(ran.stdout)
    assert row["created"] == row["published"] == ODD
    assert not {"\x1b", "\x07", "\x9b"} & {*ran.stdout}


def test_an_error_is_shown_as_text() -> None:
    @click.group(cls=_Main)
    def group() -> None: ...

    @group.command()
    def fail() -> None:
        raise StoreError(f"what a registry said: {ODD}")

    ran = CliRunner().invoke(group, ["fail"])
    assert ran.exit_code == 2
    assert ran.output == f"error: what a registry said: {SHOWN}\n"


def test_the_title_of_a_bar_is_text() -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=200, color_system=None, legacy_windows=False)
    with TransferProgress(terminal, f"fetch {ODD}"):
        pass
    assert f"fetch {SHOWN}" in shown.getvalue()
    assert "\x1b[2J" not in shown.getvalue()


FORGED = "x\nsigned  for prod:v1 by /etc/aotc/keys/prod.pub\r\x1b[1A\u2028\u202e"


def test_no_text_of_a_record_begins_a_line_of_the_output(store: Store, work: Path) -> None:
    artifact = stored_artifact(store, work, (1,))
    module = msgspec.structs.replace(artifact.module, class_name=FORGED)
    environment = msgspec.structs.replace(artifact.environment, torch=FORGED, libc=FORGED)
    first, *others = artifact.signature.leaves
    leaves = (msgspec.structs.replace(first, path=FORGED), *others)
    signature = msgspec.structs.replace(artifact.signature, leaves=leaves)
    changed = msgspec.structs.replace(
        artifact, module=module, environment=environment, aotc=FORGED, signature=signature, unused=(FORGED,)
    )
    publish(store, "tiny", "v1", [changed], created=FORGED)
    publish(store, "tiny", "v2", [artifact], created=CREATED)
    for command in (("ls",), ("inspect", "tiny:v1"), ("diff", "tiny:v2", "tiny:v1"), ("inspect", "tiny:" + "v" * 9)):
        ran = CliRunner().invoke(main, [*command, "--store", str(store.path)])
        assert ran.exit_code in (0, 1, 2) and not isinstance(ran.exception, Exception), ran.exception
        assert not any(line.strip().startswith("signed") for line in re.split("[\n\r\u2028]", ran.output)), command
        assert not {*"\r\x1b\u2028\u202e"} & {*ran.output}


def test_no_text_of_a_store_begins_a_line_of_an_error_or_a_log(caplog: pytest.LogCaptureFixture) -> None:
    issue = Issue(FORGED, where=FORGED, hint=FORGED)
    for kind in (StoreError, CorruptError, RemoteError, BindError, EnvironmentMismatchError, OperatorError, MissError):
        error = kind(FORGED, hint=f"{FORGED} again", issues=(issue,))
        assert [line.split(":")[0][:4] for line in str(error).split("\n")] == ["x\\ns", "  - ", "    ", "  hi"]
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        logging.getLogger("aotc").warning("%s; tried again", error.message)
    logging.getLogger("aotc").warning("found %s", FORGED)
    assert len(caplog.records) == 8
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_what_a_compiler_says_keeps_its_lines() -> None:
    assert str(BuildError("g++ failed:\n  x.cpp:1")) == "g++ failed:\n  x.cpp:1"
