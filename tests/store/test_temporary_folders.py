"""Temporary folders of processes that were killed are removed by the next process that makes one, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from processes import ROOT

from aotc.store.files.temporary_folders import TemporaryFolder

MAKE = """
import sys, time
from aotc.store.files.temporary_folders import TemporaryFolder
folder = TemporaryFolder("aotc-test-", sys.argv[1])
(folder.path / "file").write_text("x")
print(folder.path, flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_uses_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKE, str(tmp_path)]
    makers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    killed, living = (Path(maker.stdout.readline().strip()) for maker in makers if maker.stdout)
    other = tmp_path / "another-folder"
    link = tmp_path / "aotc-test-link"
    other.mkdir()
    link.symlink_to(other)
    makers[0].send_signal(signal.SIGKILL)
    makers[0].wait()
    try:
        own = TemporaryFolder("aotc-test-", str(tmp_path))
        assert sorted(tmp_path.iterdir()) == sorted([living, own.path, other, link])
        own.remove()
        assert not own.path.exists()
    finally:
        makers[1].kill()
        makers[1].wait()
    assert living.exists() and not killed.exists()


def test_a_forked_child_keeps_its_parents_folder(tmp_path: Path) -> None:
    """The parent has ended, and the child may still read there."""
    ready, done = os.pipe(), os.pipe()
    parent = os.fork()
    if parent == 0:
        folder = TemporaryFolder("aotc-test-", str(tmp_path))
        if os.fork() == 0:
            os.write(ready[1], b"x")
            os.read(done[0], 1)
        os._exit(0 if folder else 1)
    os.waitpid(parent, 0)
    os.read(ready[0], 1)
    (kept,) = tmp_path.iterdir()
    own = TemporaryFolder("aotc-test-", str(tmp_path))
    assert kept.exists()
    os.write(done[1], b"x")
    own.remove()
