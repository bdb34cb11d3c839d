"""Benchmarks on the CPU: while one runs, the other units of this machine are stopped, and go on whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from processes import start

from aotc.machine.benchmarking import device_alone, stoppable
from aotc.machine.resources import MemoryWatch, cores_here, families, memory_here

BUSY = "import time\nwhile True: time.sleep(0.01)"
BENCHMARK = """
import time
from aotc.machine.benchmarking import device_alone
with device_alone("cpu"):
    print("alone", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one in which builds of this machine are known, which may be running."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@contextmanager
def busy_session() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(process: int, stopped: bool) -> bool:
    deadline = time.monotonic() + 10
    while (state(process) == "T") is not stopped and time.monotonic() < deadline:
        time.sleep(0.01)
    return (state(process) == "T") is stopped


def test_other_units_are_stopped_while_one_is_timed() -> None:
    with busy_session() as unit, busy_session() as stranger, stoppable(unit):
        with device_alone("cpu"):
            assert wait_for(unit, stopped=True)
            assert state(stranger) != "T"  # no unit of any build
        assert wait_for(unit, stopped=False)


def test_a_unit_that_has_ended_is_known_no_more() -> None:
    with busy_session() as unit:
        with stoppable(unit):
            pass
        with device_alone("cpu"):
            time.sleep(0.1)
            assert state(unit) != "T"


def test_units_go_on_when_the_benchmark_that_stopped_them_is_killed(tmp_path: Path) -> None:
    watch = MemoryWatch()
    with busy_session() as unit, stoppable(unit), ExitStack() as watching:
        benchmark = start("-c", BENCHMARK)
        assert benchmark.stdout is not None and benchmark.stdout.readline() == "alone\n"
        assert wait_for(unit, stopped=True)
        watching.enter_context(watch.watching(unit))
        time.sleep(0.5)
        assert state(unit) == "T"  # as long as it is timing
        benchmark.send_signal(signal.SIGKILL)
        benchmark.communicate()
        assert wait_for(unit, stopped=False)


def test_the_memory_of_a_family_is_what_its_processes_have_of_their_own() -> None:
    size = 64 << 20
    code = f"import sys\nkept = bytearray(b'x') * {size}\nprint('ready', flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        watch = MemoryWatch()
        with watch.watching(process.pid):
            peak = watch.take(process.pid).memory
        assert size < peak < size + (60 << 20)
        assert families([process.pid])[process.pid].memory > size
        process.communicate()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux does not tell")
def test_processes_that_share_a_core_wait_for_it() -> None:
    spin = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    begin = f"import subprocess, sys\nfor _ in range(2): subprocess.Popen([sys.executable, '-c', {spin!r}])\ninput()"
    with subprocess.Popen([sys.executable, "-c", begin], stdin=subprocess.PIPE, start_new_session=True) as process:
        watch, waited = MemoryWatch(), 0.0
        try:
            with watch.watching(process.pid):
                while waited <= 0.1:
                    time.sleep(0.02)
                    waited += watch.take(process.pid).core
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_this_machine_has_cores_and_memory() -> None:
    assert 1 <= cores_here() <= 4096
    assert 1 << 20 < memory_here() < 1 << 50
