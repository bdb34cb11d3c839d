"""The example services, in processes where no compiler can be imported and no tool can be found."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT

STARTUP_LIMIT = 120
"""Seconds; a service starts in about two."""
LISTENING = re.compile(r"(?:listening on|running on|Listening at:) http://127\.0\.0\.1:(\d+)")
BANNED = ("torch._dynamo", "torch._inductor", "triton", "sympy", "aotc.compiler")

# The modules are found and cannot be executed: `import torch` itself may look some of them up.
BAN = f"""
import importlib.machinery, sys

class Ban:
    def find_spec(self, name, path=None, target=None):
        if any(name == banned or name.startswith(banned + ".") for banned in {BANNED!r}):
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise ImportError(spec.name + " is banned here")

    def exec_module(self, module):
        raise ImportError(module.__name__ + " is banned here")

sys.meta_path.insert(0, Ban())
"""


class RunningService:
    """A started service: its process, what it logged, and requests to it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = self._wait_for_port()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if LISTENING.search(line):
                self._listening.set()
        self._listening.set()

    def _wait_for_port(self) -> int:
        self._listening.wait(STARTUP_LIMIT)
        found = LISTENING.search(self.text)
        assert found, f"the service did not start:\n{self.text}"
        return int(found[1])

    @property
    def text(self) -> str:
        return "".join(self.log)

    def stop(self) -> int:
        """Ask it to end, as a supervisor does; gives the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self._reader.join(10)
        return code

    def end_by_the_rule(self, path: str, body: Any) -> int:
        """Ask it to end, with a request half sent; gives the exit code. Readiness fails first, while new requests are
        answered; then it stops listening, answers the one that it has, and ends."""
        content = json.dumps(body).encode()
        assert self.request("GET", "/readyz")[0] == 200
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content[:1])
            time.sleep(0.2)
            self.process.send_signal(signal.SIGTERM)
            until = time.monotonic() + 30
            while self.request("GET", "/readyz")[0] == 200 and time.monotonic() < until:
                time.sleep(0.02)
            assert self.request("GET", "/readyz")[0] == 503
            assert self.post(path, body)[0] == 200
            with pytest.raises(OSError):  # refused; or not taken, where a busy worker still holds the socket
                while time.monotonic() < until:
                    self.request("GET", "/readyz", timeout=2)
                    time.sleep(0.05)
            client.sendall(content[1:])
            assert b" 200 " in client.recv(100).splitlines()[0]
        code = self.process.wait(30)
        self._reader.join(10)
        return code

    def request(self, method: str, path: str, body: Any = None, timeout: float = 60) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        status, text = self.request("POST", path, body)
        return status, json.loads(text)

    def predict(self, body: Any) -> tuple[int, Any]:
        return self.post("/predict", body)

    def counters(self) -> dict[str, int]:
        _, text = self.request("GET", "/metrics")
        return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}


def bare_environment(folder: Path) -> dict[str, str]:
    """No tools, no compiler, a new home and of the caller's settings only where modules are; banned imports raise."""
    (folder / "ban").mkdir()
    (folder / "ban" / "sitecustomize.py").write_text(BAN)
    (folder / "home").mkdir()
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "VIRTUAL_ENV") if name in os.environ}
    paths = os.pathsep.join([str(folder / "ban"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PATH": "", "CXX": "/bin/false", "HOME": str(folder / "home"), "PYTHONPATH": paths}


@contextmanager
def started(
    program: Sequence[object], folder: Path, *, python: str | Path = sys.executable, cwd: Path = ROOT, **variables: str
) -> Iterator[RunningService]:
    """Run Python with these arguments, which make a service listen on a free port, in a bare environment."""
    command = [str(python), *map(str, program)]
    with subprocess.Popen(
        command, cwd=cwd, env={**bare_environment(folder), **variables}, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield RunningService(process)
        finally:
            process.kill()
