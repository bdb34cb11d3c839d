"""examples/warm: workers that are forked from a process that has prepared, as its three programs start them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from processes import ROOT
from safetensors.torch import save_file
from services import RunningService, started

from examples.models import transformer_block

WARM = ROOT / "examples" / "warm"
ASKED = {"batch": 4, "seed": 7}


def block(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return transformer_block(width=256, heads=4).eval()


def expected(seed: int) -> list[float]:
    """Of eager, for what is asked."""
    x = torch.randn(4, 128, 256, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return block(seed)(x)[0, 0, :4].tolist()


@contextmanager
def serving(store: Path, folder: Path, *program: object) -> Iterator[RunningService]:
    """A program of the example, with two models of which only the weights differ."""
    models = {}
    for seed, name in enumerate(("first", "second")):
        save_file(block(seed).state_dict(), folder / f"{name}.safetensors")
        models[name] = {"ref": f"{store}#quickstart", "weights": str(folder / f"{name}.safetensors")}
    (folder / "models.json").write_text(json.dumps(models))
    variables = {
        "WARM_DRAIN": "2",
        "WARM_MODELS": str(folder / "models.json"),
        "PYTHONPATH": f"{folder}/ban:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    with started(program, folder, cwd=WARM, **variables) as service:
        yield service


def ask(service: RunningService, path: str, seed: int, within: float = 60) -> int:
    """The process that answers, rightly."""
    deadline = time.monotonic() + within
    while True:
        status, said = service.post(path, ASKED)
        if status != 503 or time.monotonic() > deadline:
            break
    assert status == 200, said
    assert said["y"] == pytest.approx(expected(seed), abs=1e-4)
    return int(said["process"])


def metric(service: RunningService, name: str) -> float:
    _, text = service.request("GET", "/metrics")
    return float(re.findall(rf"^{re.escape(name)} (.+)$", text, re.MULTILINE)[0])


def wait_for_end(process: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{process}").exists()


def workers_that_loaded(service: RunningService) -> set[str]:
    """Those of gunicorn that did so in a fork of what is prepared."""
    return set(re.findall(r"worker (\d+) loaded Loaded\(.*forked=True\)", service.text))


def test_a_worker_starts_at_the_first_request_and_ends_when_it_is_idle(quickstart_store: Path, tmp_path: Path) -> None:
    program = (WARM / "host.py", "--models", tmp_path / "models.json", "--idle", "2", "--port", "0", "--drain", "2")
    with serving(quickstart_store, tmp_path, *program) as service:
        assert metric(service, "warm_workers") == 0
        first, second = ask(service, "/models/first", 0), ask(service, "/models/second", 1)
        assert first != second
        assert ask(service, "/models/first", 0) == first
        assert metric(service, 'warm_starts_total{model="first"}') == 1
        assert service.post("/models/first", {"batch": 3})[0] == 422
        assert service.post("/models/third", ASKED)[0] == 404
        wait_for_end(first)
        wait_for_end(second)
        assert metric(service, "warm_workers") == 0
        again = ask(service, "/models/first", 0)
        assert again != first
        assert metric(service, 'warm_starts_total{model="first"}') == 2
        # A worker that imports torch itself, and is not forked from what is prepared, takes a second to load.
        assert metric(service, 'warm_start_seconds{model="first",part="load"}') < 0.5
        os.kill(again, signal.SIGKILL)
        assert service.post("/models/first", ASKED)[0] == 503
        assert ask(service, "/models/first", 0) != again
        assert service.end_by_the_rule("/models/first", ASKED) == 0


def test_workers_that_are_forked_share_a_socket_and_are_replaced(quickstart_store: Path, tmp_path: Path) -> None:
    program = (WARM / "prefork.py", "second", "--workers", "2", "--port", "0", "--drain", "2")
    with serving(quickstart_store, tmp_path, *program) as service:
        first = ask(service, "/", 1)
        assert first != service.process.pid
        os.kill(first, signal.SIGKILL)
        until = time.monotonic() + 60
        while len(loaded := set(re.findall(r"worker (\d+) loaded in", service.text))) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(loaded) == 3
        second = ask(service, "/", 1)
        assert second not in (first, service.process.pid)
        assert service.end_by_the_rule("/", ASKED) == 0
        wait_for_end(second)


def test_gunicorn_forks_workers_from_the_application_that_it_has_imported(
    quickstart_store: Path, tmp_path: Path
) -> None:
    pytest.importorskip("gunicorn")
    with serving(quickstart_store, tmp_path, "-m", "gunicorn", "app:app", "--bind", "127.0.0.1:0") as service:
        assert ask(service, "/", 0) != service.process.pid
        deadline = time.monotonic() + 30
        while len(loaded := workers_that_loaded(service)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(loaded) == 2
        assert service.end_by_the_rule("/", ASKED) == 0
