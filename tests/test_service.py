"""The example service, in a process where no compiler can be imported and no tool can be found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.models import transformer_block

REPOSITORY = Path(__file__).resolve().parents[1]
STARTUP_LIMIT = 120
"""Seconds; a service starts in about two."""
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
            if "listening on" in line:
                self._listening.set()
        self._listening.set()

    def _wait_for_port(self) -> int:
        self._listening.wait(STARTUP_LIMIT)
        found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.text)
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

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def predict(self, body: Any) -> tuple[int, Any]:
        status, text = self.request("POST", "/predict", body)
        return status, json.loads(text)

    def counters(self) -> dict[str, int]:
        _, text = self.request("GET", "/metrics")
        return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}


def bare_environment(folder: Path) -> dict[str, str]:
    """No tools, no compiler, a new home and none of the caller's settings; banned imports raise."""
    (folder / "ban").mkdir()
    (folder / "ban" / "sitecustomize.py").write_text(BAN)
    (folder / "home").mkdir()
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "VIRTUAL_ENV") if name in os.environ}
    return {**kept, "PATH": "", "CXX": "/bin/false", "HOME": str(folder / "home"), "PYTHONPATH": str(folder / "ban")}


@contextmanager
def started(program: list[str], store: Path, folder: Path) -> Iterator[RunningService]:
    command = [sys.executable, *program, "--store", str(store), "--ref", "quickstart", "--port", "0"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=bare_environment(folder), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield RunningService(process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def service(quickstart_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with started(["examples/service.py"], quickstart_store, tmp_path_factory.mktemp("service")) as running:
        yield running


def eager(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)  # the service's weights
    with torch.no_grad():
        return transformer_block().eval()(x)


def test_the_ban_works(tmp_path: Path) -> None:
    attempts = "".join(f"try: import {name}\nexcept ImportError as error: print(error)\n" for name in BANNED)
    done = subprocess.run(
        [sys.executable, "-c", attempts], cwd=REPOSITORY, env=bare_environment(tmp_path), capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [f"{name} is banned here" for name in BANNED], done.stderr


def test_health(service: RunningService) -> None:
    assert service.request("GET", "/healthz") == (200, '{"status": "ok"}')


def test_startup_is_logged_part_by_part(service: RunningService) -> None:
    parts = re.findall(r"startup: (.+) \d+\.\d{3} s", service.text)
    assert parts[:5] == ["import torch", "import aotc", "model", "load", "first call"]
    if sys.platform == "linux":
        assert parts[5:] == ["total since process start"]


@pytest.mark.parametrize("batch", [1, 4])
def test_a_prediction_equals_eager(service: RunningService, batch: int) -> None:
    x = torch.randn(batch, 128, 256)
    status, answer = service.predict({"x": x.tolist()})
    assert status == 200
    torch.testing.assert_close(torch.tensor(answer["y"]), eager(x), rtol=1e-4, atol=1e-4)


def test_a_prediction_of_made_up_inputs_equals_eager(service: RunningService) -> None:
    status, answer = service.predict({"batch": 4, "seed": 7})
    x = torch.randn(4, 128, 256, generator=torch.Generator().manual_seed(7))
    assert status == 200
    torch.testing.assert_close(torch.tensor(answer["y"]), eager(x), rtol=1e-4, atol=1e-4)


def test_a_miss_names_the_buckets(service: RunningService) -> None:
    status, answer = service.predict({"batch": 8})
    assert status == 422
    assert "batch=1,seq=128, batch=4,seq=128" in answer["error"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([1], "JSON object"),
        ({"x": [[1, 2], [3]]}, "nested lists"),
        ({"x": [[[float("nan")]]]}, "finite"),
        ({"x": "a"}, "nested lists"),
        ({"batch": -1}, "`batch`"),
        ({"batch": 1 << 30}, "batch × seq"),
    ],
)
def test_a_request_that_cannot_be_read(service: RunningService, body: Any, reason: str) -> None:
    status, answer = service.predict(body)
    assert status == 400
    assert reason in answer["error"]


def test_unknown_paths(service: RunningService) -> None:
    assert service.request("GET", "/")[0] == 404
    assert service.request("POST", "/", {})[0] == 404


def test_metrics_count(service: RunningService) -> None:
    before = service.counters()
    assert service.predict({"batch": 1})[0] == 200
    assert service.predict({"batch": 4})[0] == 200
    assert service.predict({"batch": 8})[0] == 422
    after = service.counters()
    assert after["aotc_calls_total"] - before["aotc_calls_total"] == 2
    assert after["aotc_misses_total"] - before["aotc_misses_total"] == 1


def test_it_stops_cleanly(quickstart_store: Path, tmp_path: Path) -> None:
    with started(["-m", "examples.service"], quickstart_store, tmp_path) as running:
        assert running.predict({"batch": 1})[0] == 200
        assert running.stop() == 0
    assert running.log[-1].endswith("stopped\n")
    assert "Traceback" not in running.text
