"""What every command of the command line has in common."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from in_process import run_here
from processes import ZOO, environment, finish, run_aotc, start

from aotc.cli import main
from aotc.cli.verify import _show
from aotc.store.layout.store import Store
from aotc.verify.verdicts import VerifyReport


def run(*arguments: str, encoding: str) -> str:
    command = [sys.executable, "-m", "aotc", *arguments]
    ran = subprocess.run(command, env=environment(PYTHONIOENCODING=encoding), capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode(encoding)
    return ran.stdout.decode(encoding)


def test_a_terminal_without_a_character_gets_its_number() -> None:
    assert "https://, …." in run("build", "--help", encoding="utf-8")
    assert r"https://, \u2026." in run("build", "--help", encoding="latin-1")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("verify linear:v1 --tag v2", "a reference names its own: MODEL:TAG"),
        ("verify linear --tag v2", "a reference names its own: MODEL:TAG"),
        ("verify linear --model linear", "--model and --tag go with a manifest"),
        ("picks linear linear:v2 --diff --export picks.json", "give --diff or --export, not both"),
        ("picks linear --diff", "--diff compares two references"),
        ("build manifest.yaml --check --executor ray", "leave out --executor ray"),
    ],
)
def test_options_that_exclude_each_other_are_refused(arguments: str, told: str) -> None:
    ran = CliRunner().invoke(main, arguments.split())
    assert ran.exit_code == 2 and "Usage:" in ran.stderr
    assert told in ran.stderr


def test_an_empty_variable_names_no_store(tmp_path: Path) -> None:
    ran = run_aotc("ls", cwd=tmp_path, AOTC_STORE="")
    assert ran.returncode == 2
    assert f"no store at {tmp_path / 'aotc-store'}" in ran.stderr


def test_a_pipe_stays_a_pipe_and_a_link_a_link(zoo_store: Path, tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    link.symlink_to(target)
    export = ("picks", "linear", "--store", zoo_store, "--export")
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # both ways, so that nobody waits for the other
    assert run_aotc(*export, pipe).returncode == 0 and pipe.is_fifo()
    exported = json.loads(os.read(reader, 1 << 16))
    os.close(reader)
    assert run_aotc(*export, link).returncode == 0
    assert link.is_symlink() and json.loads(target.read_text()) == exported
    assert json.loads(run_aotc(*export, "/dev/stdout").stdout.partition("wrote ")[0]) == exported


SPEAKING = """
import os
import torch

def make():
    table = open("table.txt", "r+")
    os.write(1, b"on standard output")
    os.write(2, b"on standard error")
    return torch.nn.Linear(len(table.readline()), 2)

def call():
    return (torch.ones(1, 6),)
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_no_file_of_somebody_else(tmp_path: Path, closed: str) -> None:
    (tmp_path / "speaking.py").write_text(SPEAKING)
    table = tmp_path / "table.txt"
    table.write_text("table\n")
    aotc = [sys.executable, "-m", "aotc"]
    for arguments in (["schema"], ["init", "speaking:make", "--call", "speaking:call", "--no-check"]):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", *aotc, *arguments]
        ran = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
        assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
    assert table.read_text() == "table\n"
    assert "speaking:make" in (tmp_path / "manifest.yaml").read_text()


def test_an_output_in_a_folder_that_is_not_there_is_refused_and_no_folder_is_made(
    zoo_store: Path, tmp_path: Path
) -> None:
    export = ("picks", "linear", "--store", zoo_store, "--export")
    (tmp_path / "link").symlink_to(tmp_path / "missing" / "picks.json")
    for path in (tmp_path / "missing" / "picks.json", tmp_path / "link"):
        ran = run_aotc(*export, path)
        assert ran.returncode == 2
        assert f"cannot write {path}: there is no folder {tmp_path / 'missing'}" in ran.stderr
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_that_is_a_file_keeps_what_is_there_and_gets_what_is_said_next(
    zoo_store: Path, tmp_path: Path, name: str
) -> None:
    command = [sys.executable, "-m", "aotc", "picks", "linear", "--store", zoo_store, "--export", name]
    path = tmp_path / "output"
    with path.open("w") as output:
        output.write("before\n")
        output.flush()
        subprocess.run(command, env=environment(), stdout=output, check=True)
    before, _, rest = path.read_text().partition("\n")
    exported, _, said = rest.rpartition("wrote ")
    assert before == "before" and said.strip().endswith(f"to {name}")
    assert json.loads(exported)["units"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["schema"], ["gc", "--store", "."], ["build", "--help"]])
def test_an_output_that_cannot_be_written_is_an_error_without_a_traceback(
    tmp_path: Path, arguments: list[str], unbuffered: str
) -> None:
    Store.create(tmp_path)
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "aotc", *arguments],
            cwd=tmp_path,
            env=environment(AOTC_CACHE_DIR=str(tmp_path), PYTHONUNBUFFERED=unbuffered),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (2, "error: cannot write to standard output: No space left on device\n")


def test_without_a_folder_for_temporary_files_the_error_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", nowhere)
    ran = CliRunner().invoke(main, ["build", str(ZOO / "manifest.yaml"), "--model", "linear", "--store", str(tmp_path)])
    assert ran.exit_code == 2 and "error: No usable temporary directory" in ran.stderr and "set TMPDIR" in ran.stderr


def test_what_is_printed_as_json_is_one_document(zoo_store: Path, tmp_path: Path) -> None:
    command = ("build", ZOO / "manifest.yaml", "--store", zoo_store, "--model", "linear", "--json")
    said = json.loads(run_here(*command, "--explain").stdout)
    assert [unit["cached"] for unit in said["plan"]] == [True, True] and len(said["units"]) == 2
    assert "plan" not in json.loads(run_here(*command).stdout)
    exported = run_here("picks", "linear", "--store", zoo_store, "--export", tmp_path / "picks.json", "--json")
    assert {unit["model"] for unit in json.loads(exported.stdout)} == {"linear"} and "wrote" in exported.stderr
    folder = Store.create(tmp_path / "Ñ🙂").path
    said = json.loads(run_aotc("gc", "--store", folder, "--json", PYTHONIOENCODING="iso8859-2").stdout)
    assert said["folder"] == str(folder)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_json_is_the_same_in_any_encoding(encoding: str) -> None:
    assert "…" in json.dumps(json.loads(run("schema", encoding=encoding)), ensure_ascii=False)


def test_an_error_under_json_is_a_document_too(tmp_path: Path) -> None:
    ran = run_aotc("inspect", "linear", "--store", tmp_path / "none", "--json")
    error = json.loads(ran.stdout)["error"]
    assert ran.returncode == 2 and f"error: {error['message']}" in ran.stderr
    assert error["type"] == "NotFoundError" and str(tmp_path / "none") in error["message"] and error["hint"]


def test_short_options_ask_for_help_the_log_and_silence(zoo_store: Path) -> None:
    build = ("build", ZOO / "manifest.yaml", "--store", zoo_store, "--model", "linear")
    assert run_here("build", "-h").stdout == run_here("build", "--help").stdout
    assert "2 of 2 units" not in run_here(*build, "-q").stderr
    assert "0 of 2 units to compile" in run_here(*build).stderr


@pytest.mark.parametrize(
    ("level", "shown"), [("info", {"INFO"}), ("debug", {"INFO", "DEBUG"}), ("", set()), ("x", {"WARNING"})]
)
def test_a_variable_asks_any_process_for_the_log(level: str, shown: set[str]) -> None:
    script = "import aotc, logging; log = logging.getLogger('aotc.load')\nlog.info('loaded'); log.debug('chosen')"
    ran = finish(start("-c", script, AOTC_LOG=level))
    levels = {word for line in ran.stderr.splitlines() for word in line.split() if word.isupper() and word.isalpha()}
    assert levels == (shown | {"INFO"} if level == "x" else shown), ran.stderr


@pytest.mark.parametrize("level", ["json", "json:debug", "info"])
def test_the_log_may_be_lines_of_json_and_what_is_json_is_always_a_line_of_its_own(level: str) -> None:
    script = """import aotc, logging; log = logging.getLogger('aotc'); log.debug('chosen'); log.info('loaded %s', 'it')
try: 1 / 0
except ZeroDivisionError: log.exception('failed')
from aotc.telemetry import log_startup; log_startup({})"""
    lines = finish(start("-c", script, AOTC_LOG=level)).stderr.splitlines()
    assert json.loads(lines[-1])["event"] == "aotc.startup" and json.loads(lines[-1])["compilers_imported"] == []
    if level == "info":
        assert "INFO aotc: loaded it" in lines[0]
        return
    found = [json.loads(line) for line in lines]
    assert [(one["level"], one.get("message")) for one in found if one["level"] != "INFO" or "message" in one] == [
        *([("DEBUG", "chosen")] if level == "json:debug" else []),
        ("INFO", "loaded it"),
        ("ERROR", "failed"),
    ]
    assert "ZeroDivisionError" in found[-2]["exception"] and all(one["time"].endswith("Z") for one in found)


def test_picks_fit_a_terminal_of_80_columns(zoo_store: Path) -> None:
    shown = run_here("picks", "frozen", "--store", zoo_store).stdout
    assert " ms  " in shown and max(map(len, shown.splitlines())) <= 80, shown


@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cpu:x86-64-v4"])
def test_a_target_on_the_command_line_takes_the_place_of_native(tmp_path: Path, target: str) -> None:
    command = ("build", ZOO / "manifest.yaml", "--model", "linear", "--store", tmp_path / "store", "--dry-run")
    shown = run_here(*command, "--target", target).stdout
    assert f"2 of 2 units to compile for {target}, time and disk unknown: no such unit was built before\n" in shown
    refused = run_here(*command[:3], "older-cpu", *command[4:], "--target", "cpu:amx")
    assert refused.returncode == 2 and "no model of the manifest is for cpu:amx" in refused.stderr


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        (
            "gpu",
            "hint: known, of each architecture from the least capable: cpu:x86-64-v3, cpu:x86-64-v4, cpu:amx, cpu:neon",
        ),
        (
            "cpu:x86-64-v2",
            "hint: known, of each architecture from the least capable: cpu:x86-64-v3",
        ),  # no misspelt v3 or v4
        ("cpu:aarch64", "hint: known, of each architecture from the least capable: cpu:x86-64-v3"),
        ("x86-64-v4", "hint: did you mean `cpu:x86-64-v4`?"),
        ("cuda:sm90", "hint: did you mean `cuda:sm_90`?"),
        ("natve", "hint: did you mean `native`?"),
    ],
)
def test_a_mistyped_target_is_an_error_with_a_hint(tmp_path: Path, target: str, hint: str) -> None:
    command = ("build", ZOO / "manifest.yaml", "--model", "linear", "--store", tmp_path / "store", "--dry-run")
    ran = run_here(*command, "--target", target)
    assert ran.returncode == 2 and f"error: `{target}` is not a target" in ran.stderr and "Traceback" not in ran.stderr
    assert hint in ran.stderr


def test_rows_of_verify_say_the_weights_where_those_of_one_size_differ(capsys: pytest.CaptureFixture[str]) -> None:
    right = VerifyReport("small", "batch=4", "cpu", "batch=4", "ok", 1e-7, 1e-7, 4e-7)
    wrong = msgspec.structs.replace(right, status="failed", weights="swapped", detail="rms error 5e-05")
    _show([right, msgspec.structs.replace(wrong, weights="other"), wrong])
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header[4] == "weights" and [row[4] for row in rows] == ["own", "changed", "update_weights"]
    _show([right])
    assert "weights" not in capsys.readouterr().out
