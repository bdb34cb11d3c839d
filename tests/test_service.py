"""The example service, in a process where no compiler can be imported and no tool can be found."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT
from services import BANNED, RunningService, bare_environment, started

from examples.models import transformer_block


def options(store: Path) -> list[object]:
    return ["--store", store, "--ref", "quickstart", "--port", "0", "--drain", "2"]


@pytest.fixture(scope="module")
def service(quickstart_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with started(["examples/service.py", *options(quickstart_store)], tmp_path_factory.mktemp("service")) as running:
        yield running


def eager(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)  # the service's weights
    with torch.no_grad():
        return transformer_block().eval()(x)


def test_the_ban_works(tmp_path: Path) -> None:
    attempts = "".join(f"try: import {name}\nexcept ImportError as error: print(error)\n" for name in BANNED)
    done = subprocess.run(
        [sys.executable, "-c", attempts], cwd=ROOT, env=bare_environment(tmp_path), capture_output=True, text=True
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


def test_it_ends_by_the_rule_and_a_client_that_leaves_is_no_error(quickstart_store: Path, tmp_path: Path) -> None:
    with started(["-m", "examples.service", *options(quickstart_store)], tmp_path) as running:
        leave_early(running)
        assert running.end_by_the_rule("/predict", {"batch": 1}) == 0
    assert running.log[-1].endswith("stopped\n")
    assert "left before the answer" in running.text and "Traceback" not in running.text


def leave_early(running: RunningService) -> None:
    """As `curl … | head -c 300` does: the answer has megabytes. Several times, as now and then the system takes all of
    one at once, and no write fails."""
    body = b'{"batch": 4}'
    request = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    until = time.monotonic() + 30
    while "left before the answer" not in running.text and time.monotonic() < until:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect(("127.0.0.1", running.port))
            client.sendall(request)
            assert client.recv(300).startswith(b"HTTP/1.0 200 ")
        time.sleep(0.2)
