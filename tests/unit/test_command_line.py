"""What every command of the command line has in common."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from processes import environment


def run(*arguments: str, encoding: str) -> str:
    command = [sys.executable, "-m", "aotc", *arguments]
    ran = subprocess.run(command, env=environment(PYTHONIOENCODING=encoding), capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode(encoding)
    return ran.stdout.decode(encoding)


def test_a_terminal_without_a_character_gets_its_number() -> None:
    assert "https://, …." in run("build", "--help", encoding="utf-8")
    assert r"https://, \u2026." in run("build", "--help", encoding="latin-1")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_json_is_the_same_in_any_encoding(encoding: str) -> None:
    assert "…" in json.dumps(json.loads(run("schema", encoding=encoding)), ensure_ascii=False)
