"""Names and messages of others, as they come to a terminal: as they are written, and without control characters."""

from __future__ import annotations

import io
import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from processes import run_aotc
from rich.console import Console
from sample_artifacts import stored_artifact

from aotc.cli import _Main
from aotc.errors import StoreError
from aotc.store import Store, publish
from aotc.transfer_progress import TransferProgress

ODD = "[red]x[/green] :smile: \x1b[2J\x07\x9b31m {0}"
SHOWN = r"[red]x[/green] :smile: \x1b[2J\x07\x9b31m {0}"


@pytest.fixture
def odd_store(store: Store, work: Path) -> Store:
    """A store that somebody else has written, who said so when the bundle was made."""
    publish(store, "tiny", "v1", [stored_artifact(store, work, (1,))], created=ODD)
    return store


def test_a_table_shows_markup_and_escapes_as_text(odd_store: Store) -> None:
    ran = run_aotc("ls", "--store", odd_store.path)
    assert ran.returncode == 0, ran.stderr
    assert SHOWN in ran.stdout
    assert not {"\x1b", "\x07", "\x9b"} & {*ran.stdout, *ran.stderr}


def test_json_keeps_every_character_and_sends_none_to_the_terminal(odd_store: Store) -> None:
    ran = run_aotc("ls", "--store", odd_store.path, "--json", PYTHONIOENCODING="utf-8")
    assert json.loads(ran.stdout)[0]["created"] == ODD
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
    with TransferProgress(terminal, f"pull {ODD}"):
        pass
    assert f"pull {SHOWN}" in shown.getvalue()
    assert "\x1b[2J" not in shown.getvalue()
