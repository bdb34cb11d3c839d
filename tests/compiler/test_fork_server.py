"""A fork server's processes are to themselves, and to who waits for them, like those of `python -m`."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import wait_until_none_names

from aotc.compiler.workers import fork_server
from aotc.compiler.workers.unit_servers import ForkServers
from aotc.machine.processes import child_environment, whole_lines

SERVED = """
import os, subprocess, sys, time, __main__
import slow_to_import

first, *_ = sys.argv[1:]
said = __main__.__spec__.name, slow_to_import.imported_in, os.environ.get("GIVEN")
print(os.getpid(), os.getsid(0), *said, flush=True)
if first == "echo":
    print(repr(sys.stdin.read()))
    print("an error", file=sys.stderr)
elif first == "kill":
    os.kill(os.getpid(), 9)
elif first == "wait":
    time.sleep(60)
elif first == "family":
    print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
    time.sleep(60)
elif first == "leaves":
    print(subprocess.Popen(["sleep", "3598"]).pid, flush=True)
elif first == "raise":
    raise ValueError("no good")
else:
    sys.exit(int(first))
"""
NO_ROOM = """
import os

fork = os.fork


def fork_if_there_is_room():
    if os.path.exists(os.environ["NO_ROOM"]):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()


os.fork = fork_if_there_is_room
"""
SLOW = """
import os, time
time.sleep(0.3)
imported_in = os.getpid()

def is_ready_in():
    global imported_in
    imported_in = -os.getpid()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "served.py").write_text(SERVED)
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    own = child_environment()
    return {**own, "PYTHONPATH": f"{tmp_path}{os.pathsep}{own['PYTHONPATH']}"}


def started(environment: dict[str, str], *preload: str) -> ForkServers:
    servers = ForkServers({"served": preload}, ())
    servers.begin(environment)
    return servers


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[ForkServers]:
    server = started(environment, "slow_to_import")
    yield server
    server.close()


def run(server: ForkServers, environment: dict[str, str], log: Path, *arguments: str) -> tuple[list[str], int]:
    with log.open("ab") as errors:
        process = server.server("served", environment).start(arguments, environment, errors)
    with process.stdout:
        said = process.stdout.read().splitlines()
        assert int(said[0].split()[0]) == process.pid
        return said, process.wait()


def test_a_process_is_as_if_started_alone(server: ForkServers, environment: dict[str, str], tmp_path: Path) -> None:
    said, status = run(server, {**environment, "GIVEN": "yes"}, tmp_path / "log", "echo")
    pid, session, name, imported_in, given = said[0].split()
    assert (pid, name, given) == (session, "served", "yes") and said[1:] == ["''"] and status == 0
    assert int(imported_in) not in (int(pid), os.getpid())
    assert (tmp_path / "log").read_text() == "an error\n"


def test_what_is_to_be_called_is_called_once_for_all_processes(environment: dict[str, str], tmp_path: Path) -> None:
    server = started(environment, "slow_to_import:is_ready_in")
    called_in = {int(run(server, environment, tmp_path / "log", "0")[0][0].split()[3]) for _ in range(2)}
    server.close()
    assert len(called_in) == 1 and called_in.pop() < 0


@pytest.mark.parametrize(("what", "status"), [("0", 0), ("3", 3), ("kill", -signal.SIGKILL), ("raise", 1)])
def test_how_it_ended_is_told(
    server: ForkServers, environment: dict[str, str], tmp_path: Path, what: str, status: int
) -> None:
    assert run(server, environment, tmp_path / "log", what)[1] == status
    assert ("ValueError: no good" in (tmp_path / "log").read_text()) == (what == "raise")


@pytest.mark.parametrize("written", ['{"stage": "compile"}\n', ""])
@pytest.mark.parametrize("torn", ['{"done": true, "autotuned": {"pick', ""])
def test_a_message_that_a_killed_process_wrote_by_half_is_none(written: str, torn: str) -> None:
    assert list(whole_lines(io.StringIO(written + torn))) == written.splitlines(keepends=True)
    assert list(whole_lines(io.BytesIO((written + torn).encode()))) == written.encode().splitlines(keepends=True)


def test_many_are_started_at_once(server: ForkServers, environment: dict[str, str], tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        ran = list(pool.map(lambda n: run(server, environment, tmp_path / f"log{n}", str(n)), range(24)))
    assert [status for _, status in ran] == list(range(24))
    assert len({said[0].split()[0] for said, _ in ran}) == 24
    assert len({said[0].split()[3] for said, _ in ran}) == 1


def test_what_several_modules_need_is_imported_once(environment: dict[str, str], tmp_path: Path) -> None:
    for name in ("light", "heavy"):
        (tmp_path / f"of_{name}.py").write_text("")
        (tmp_path / f"{name}.py").write_text(
            "import sys, slow_to_import\n"
            "print(slow_to_import.imported_in, *(m for m in ('of_light', 'of_heavy') if m in sys.modules))\n"
        )
    servers = ForkServers({"light": ["of_light"], "heavy": ["of_heavy"]}, ["slow_to_import"])
    said = {}
    for module in ("heavy", "light"):
        with (tmp_path / "log").open("ab") as errors:
            process = servers.server(module, environment).start([], environment, errors)
        said[module] = process.stdout.read().split()
        assert process.wait() == 0
    servers.close()
    assert said == {"light": [said["heavy"][0], "of_light"], "heavy": [said["light"][0], "of_heavy"]}


def test_where_cuda_is_spoilt_a_process_starts_from_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "spoils.py").write_text("import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n")
    server = started(environment, "slow_to_import", "spoils")
    said, status = run(server, {**environment, "GIVEN": "yes"}, tmp_path / "log", "echo")
    pid, session, name, imported_in, given = said[0].split()
    assert (session, name, imported_in, given) == (pid, "served", pid, "yes") and said[1:] == ["''"]
    assert status == 0 and (tmp_path / "log").read_text() == "an error\n"
    server.close()


@pytest.mark.parametrize(("gpus", "seen"), [(-1, ""), (2, "0,1"), (0, "0,1")])
def test_where_nvml_cannot_be_asked_cuda_is_not_either_during_the_imports(
    gpus: int, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without a driver, with a torch for GPUs: it would spoil CUDA for every fork."""
    (tmp_path / "looks_for_gpus.py").write_text("import os\nseen = os.environ['CUDA_VISIBLE_DEVICES']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "looks_for_gpus", raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: gpus)
    monkeypatch.setattr(fork_server.gc, "freeze", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    fork_server._prepare(["looks_for_gpus"])
    assert sys.modules["looks_for_gpus"].seen == seen
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_where_the_system_has_no_room_what_runs_goes_on(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "limited.py").write_text(NO_ROOM)
    full = tmp_path / "full"
    environment["NO_ROOM"] = str(full)
    server = started(environment, "slow_to_import", "limited")
    log = tmp_path / "log"
    with log.open("ab") as errors:
        running = server.server("served", environment).start(["wait"], environment, errors)
        full.touch()
        with pytest.raises(BlockingIOError, match="temporarily unavailable"):
            server.server("served", environment).start(["0"], environment, errors)
    full.unlink()
    assert run(server, environment, log, "0")[1] == 0
    os.killpg(running.pid, signal.SIGTERM)
    assert running.wait() == -signal.SIGTERM, "it had run on"
    running.stdout.close()
    server.close()


def test_what_a_process_leaves_running_ends_with_it(
    server: ForkServers, environment: dict[str, str], tmp_path: Path
) -> None:
    with (tmp_path / "log").open("ab") as errors:
        process = server.server("served", environment).start(["leaves"], environment, errors)
    assert process.wait() == 0
    assert wait_until_none_names("sleep 3598", 10) == []
    assert len(process.stdout.read().splitlines()) == 2  # to its end: nobody holds it open
    process.stdout.close()


def test_closing_ends_what_runs(environment: dict[str, str], tmp_path: Path) -> None:
    server = started(environment, "slow_to_import")
    with (tmp_path / "log").open("ab") as errors:
        process = server.server("served", environment).start(["wait"], environment, errors)
    assert process.stdout.readline()
    server.close()
    assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while is_running(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(process.pid)


def test_a_server_that_cannot_import_says_why(environment: dict[str, str], tmp_path: Path) -> None:
    server = started(environment, "no_such_module")
    with (tmp_path / "log").open("ab") as errors, pytest.raises(OSError, match="No module named 'no_such_module'"):
        server.server("served", environment).start(["0"], environment, errors)
    server.close()


def test_a_server_that_was_killed_is_made_anew(
    server: ForkServers, environment: dict[str, str], tmp_path: Path
) -> None:
    first, status = run(server, environment, tmp_path / "log", "0")
    assert status == 0
    os.kill(int(first[0].split()[3]), signal.SIGKILL)  # the process that has imported
    time.sleep(0.1)
    again = [run(server, environment, tmp_path / "log", "0")[0] for _ in range(2)]
    assert len({said[0].split()[3] for said in (first, *again)}) == 2


def test_of_two_servers_one_that_was_killed_is_found_when_it_is_asked_and_the_other_runs_on(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "light.py").write_text("import os\nprint(os.getppid(), flush=True)\n")
    servers = ForkServers({"light": [], "served": ["slow_to_import"]}, ())

    def light() -> str:
        with (tmp_path / "log").open("ab") as errors:
            process = servers.server("light", environment).start([], environment, errors)
        with process.stdout:
            return process.stdout.read().strip()

    with (tmp_path / "log").open("ab") as errors:
        running = servers.server("served", environment).start(["wait"], environment, errors)
    killed = light()
    os.kill(int(killed), signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(ChildProcessError, match="the process that starts light has died"):
        light()
    assert light() != killed
    assert is_running(running.pid)
    servers.close()
    assert running.wait() == -signal.SIGKILL


def test_a_build_that_is_killed_leaves_no_server_and_nothing_that_it_started(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code = f"""
import sys, time
from aotc.compiler.workers.unit_servers import ForkServers
environment = {environment!r}
server = ForkServers({{"served": ["slow_to_import"]}}, ())
with open({str(tmp_path / "log")!r}, "ab") as errors:
    process = server.server("served", environment).start(["family"], environment, errors)
process.stdout.readline()
print(process.pid, server.begin().process.pid, process.stdout.readline(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as build:
        assert build.stdout is not None
        pids = build.stdout.readline().split()
        assert len(pids) == 3 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        build.kill()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: str | int) -> bool:
    """Not where nobody has asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
