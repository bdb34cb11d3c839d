"""examples/service: a FastAPI service that batches into buckets, and switches to another release under load."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import ROOT
from safetensors.torch import save_file
from services import RunningService, started

sys.path.insert(0, str(ROOT / "examples" / "service"))

from batching import Batcher, Buckets, Overloaded
from load import drive, send, table

import aotc
from aotc.store.reference import parse_reference
from aotc.store.tagging import set_tags

# -- batching ---------------------------------------------------------------------------------------------------------

BUCKETS = Buckets({(1, 32): 1.0, (8, 32): 2.0, (1, 128): 3.0, (4, 128): 6.0})
OF_BERT_ON_A_CPU = Buckets({(1, 128): 0.121, (8, 128): 0.661})


@pytest.mark.parametrize(
    ("lengths", "chosen"),
    [
        ([5], [0]),
        ([5, 30, 100, 7], [0, 1, 3]),  # those of the oldest one's length; a longer one would make all of them longer
        ([100, 5], [0]),  # no row is free: the bucket of one row is run
        ([100, 90, 5, 6, 7], [0, 1, 2, 3]),  # two of the four rows would be padding: shorter ones fill them
        ([5] * 20, [*range(8)]),
        ([100] * 20, [*range(4)]),
    ],
)
def test_the_requests_of_a_batch(lengths: list[int], chosen: list[int]) -> None:
    assert BUCKETS.choose(lengths) == chosen


@pytest.mark.parametrize(("waiting", "together"), [(1, 1), (2, 1), (5, 1), (6, 6), (8, 8), (20, 8)])
def test_requests_run_together_only_where_that_is_faster_than_one_by_one(waiting: int, together: int) -> None:
    """Of five, the bucket of eight rows takes 132 ms for each, and that of one row 121."""
    assert OF_BERT_ON_A_CPU.choose([100] * waiting) == [*range(together)]


def test_no_bucket_takes_a_longer_request() -> None:
    with pytest.raises(ValueError):
        BUCKETS.length_for(129)


def batched(requests: Sequence[list[int]], fails: int = -1, most: int = 1000) -> tuple[list[Any], list[int]]:
    """The answers, each the sum of its request or an exception, and how many requests each call had."""
    calls: list[int] = []

    async def run(batch: list[list[int]]) -> list[int]:
        calls.append(len(batch))
        await asyncio.sleep(0)
        if any(fails in request for request in batch):
            raise ValueError(f"{fails}")
        return [sum(request) for request in batch]

    async def main() -> list[Any]:
        batcher = Batcher(lambda waiting: BUCKETS.choose([len(ids) for ids in waiting]), run, most)
        serving = asyncio.create_task(batcher.serve())
        try:
            return await asyncio.gather(*map(batcher.submit, requests), return_exceptions=True)
        finally:
            serving.cancel()

    return asyncio.run(main()), calls


def test_requests_that_wait_together_run_together() -> None:
    answers, calls = batched([[n] * 3 for n in range(11)])
    assert answers == [3 * n for n in range(11)] and calls == [8, 3]


def test_a_request_that_fails_fails_alone() -> None:
    answers, _ = batched([[1], [7], [2]], fails=7)
    assert [answers[0], answers[2]] == [1, 2] and isinstance(answers[1], ValueError)


def test_more_requests_than_may_wait_are_refused() -> None:
    answers, _ = batched([[1]] * 5, most=3)
    assert answers[:3] == [1, 1, 1] and all(isinstance(answer, Overloaded) for answer in answers[3:])


# -- the service ------------------------------------------------------------------------------------------------------

TEXTS = [[random.Random(seed).randrange(32) for _ in range(1 + seed % 16)] for seed in range(12)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two releases of the zoo's `pooled`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for tag in ("v1", "v2"):
        save_file(pooled(tag).state_dict(), folder / f"{tag}.safetensors")
    return folder


def pooled(tag: str) -> torch.nn.Module:
    sys.path.insert(0, str(ROOT / "tests" / "zoo"))
    try:
        from models import Pooled
    finally:
        sys.path.remove(str(ROOT / "tests" / "zoo"))
    torch.manual_seed({"v1": 1, "v2": 2}[tag])
    return Pooled().eval()


@pytest.fixture(scope="module")
def releases(zoo_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the tags v1 and v2, and v3, which has no checkpoint."""
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    store = tmp_path_factory.mktemp("releases") / "store"
    aotc.fetch(f"file://{zoo_store}#pooled", store=store)
    set_tags(str(store), parse_reference("pooled"), ["v1", "v2", "v3"])
    return store


@contextmanager
def serving(releases: Path, weights: Path, folder: Path, tag: str) -> Iterator[RunningService]:
    """A process that serves this release, and is ready."""
    options = ["--store", releases, "--model", "pooled", "--tag", tag, "--weights", weights, "--port", "0"]
    with started(["examples/service/app.py", *options, "--drain", "2"], folder, OMP_NUM_THREADS="1") as running:
        wait_until_ready(running)
        yield running


@pytest.fixture(scope="module")
def service(releases: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with serving(releases, weights, tmp_path_factory.mktemp("service"), "v1") as running:
        yield running


def wait_until_ready(running: RunningService) -> None:
    until = time.monotonic() + 60
    while running.request("GET", "/readyz")[0] == 503 and time.monotonic() < until:
        time.sleep(0.05)


def expected(tag: str) -> list[torch.Tensor]:
    module = pooled(tag)
    with torch.no_grad():
        return [module(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool))[1][0] for ids in TEXTS]


def test_the_startup_report_says_what_was_loaded_and_that_no_compiler_was_imported(service: RunningService) -> None:
    line = next(line for line in service.log if line.startswith('{"event": "aotc.startup"'))
    report = json.loads(line)
    assert report["compilers_imported"] == [] and report["seconds_since_process_start"] > 0
    model = report["models"]["pooled:v1"]
    assert model["ref"] == "pooled:v1" and model["digest"].startswith("sha256:") and model["buckets"] == 1
    assert set(model["load_ms"]) == {"record", "module", "libraries", "graphs"}


def test_a_request_that_no_bucket_takes_and_one_that_is_wrong_are_refused(service: RunningService) -> None:
    for ids, reason in (([1] * 17, "17 tokens; the longest bucket takes 16"), ([], "at least 1"), ([99], "99")):
        status, answer = service.post("/embed", {"ids": ids})
        assert status == 422 and reason in str(answer["detail"])


@pytest.mark.parametrize(("tag", "reason"), [("v9", "pooled:v9"), ("v3", "v3.safetensors")])
def test_a_release_that_cannot_be_loaded_leaves_the_one_that_serves(
    service: RunningService, tag: str, reason: str
) -> None:
    """One without a bundle, one without a checkpoint."""
    status, answer = service.post("/release", {"tag": tag})
    assert status == 409 and reason in answer["detail"]
    assert service.post("/embed", {"ids": [1]})[1]["release"] == "v1"


def test_a_release_for_shorter_texts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait could not be answered in it."""
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    import app

    def load(options: Any, tag: str) -> Any:
        return SimpleNamespace(tag=tag, buckets=Buckets({(1, {"v1": 128, "v2": 64, "v3": 256}[tag]): 1.0}))

    async def switched() -> list[str]:
        service = app.Service(app.Options("store", "pooled", "v1", Path()))
        service.release = load(service.options, "v1")
        with pytest.raises(aotc.AotcError, match="v2 takes 64 tokens, and v1 128"):
            await service.switch("v2")
        served = [service.release.tag]
        await service.switch("v3")
        return [*served, service.release.tag]

    monkeypatch.setattr(app, "load_release", load)
    assert asyncio.run(switched()) == ["v1", "v3"]


def test_under_load_the_switch_to_another_release_drops_no_request(service: RunningService) -> None:
    """Every answer is that of the release which it names; none of the old one is sent after the switch."""
    answers, switch = drive(f"http://127.0.0.1:{service.port}", TEXTS, 2.0, 8, "v2")
    assert switch is not None and (switch.status, json.loads(switch.text)) == (200, {"release": "v2"}), switch
    assert {answer.status for answer in answers} == {200}, table(answers, switch)
    right = {tag: expected(tag) for tag in ("v1", "v2")}
    served: Counter[str] = Counter()
    for answer in answers:
        found = json.loads(answer.text)
        served[found["release"]] += 1
        torch.testing.assert_close(torch.tensor(found["embedding"]), right[found["release"]][answer.body])
        assert found["release"] == "v2" or answer.sent < switch.ended
    assert served["v1"] > 10 and served["v2"] > 10


def test_what_it_exports(service: RunningService) -> None:
    """After the tests above: batches, calls of the release that serves, and a trace of its sizes."""
    _, text = service.request("GET", "/metrics")
    calls = int(float(re.search(r'aotc_calls_total{bucket="batch=4,seq=16",model="pooled:v2"} (\S+)', text)[1]))  # type: ignore[index]
    assert calls > 1 and "service_batch_requests_bucket" in text
    _, trace = service.request("GET", "/trace")
    lines = [json.loads(line) for line in trace.splitlines()]
    assert sum(line["count"] for line in lines) == calls - 3  # those were made to warm up
    assert max(line["batch"] for line in lines) > 1


def test_it_ends_by_the_rule(service: RunningService) -> None:
    assert service.end_by_the_rule("/embed", {"ids": [1]}) in (0, -15) and "Traceback" not in service.text


# -- a rollout --------------------------------------------------------------------------------------------------------


class Balancer:
    """What clients send requests through, over connections that are kept alive. It retries nothing."""

    def __init__(self, clients: int) -> None:
        self.endpoints: list[int] = []
        self.answers: list[tuple[int, str]] = []
        """The status, or 0 where there was none, and the release or the error."""
        self._ends = threading.Event()
        self._clients = [threading.Thread(target=self._send, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Balancer:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for client in self._clients:
            client.join()

    def _send(self, number: int) -> None:
        connections: dict[int, http.client.HTTPConnection] = {}
        while not self._ends.wait(0.01):
            number += 1
            port = self.endpoints[number % len(self.endpoints)]
            connection = connections.setdefault(port, http.client.HTTPConnection("127.0.0.1", port, timeout=60))
            try:
                status, text = send(connection, "/embed", {"ids": [1, 2]})
                self.answers.append((status, json.loads(text).get("release", text)))
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self.answers.append((0, repr(error)))


def test_a_rollout_and_its_rollback_lose_no_request(releases: Path, weights: Path, tmp_path: Path) -> None:
    """Three processes, of which one after the other is replaced, as by Kubernetes: it is told to end, and the balancer
    hears of it a second later."""
    with ExitStack() as stack:

        def start(tag: str) -> RunningService:
            folder = tmp_path / f"{len([*tmp_path.iterdir()])}"
            folder.mkdir()
            return stack.enter_context(serving(releases, weights, folder, tag))

        def replace(old: RunningService, tag: str) -> RunningService:
            new = start(tag)
            balancer.endpoints = [*balancer.endpoints, new.port]
            old.process.send_signal(signal.SIGTERM)
            time.sleep(1)
            balancer.endpoints = [port for port in balancer.endpoints if port != old.port]
            assert old.process.wait(30) in (0, -15)
            return new

        pods = [start("v1") for _ in range(3)]
        balancer = Balancer(clients=4)
        balancer.endpoints = [pod.port for pod in pods]
        with balancer:
            pods = [*(replace(pod, "v2") for pod in pods[:2]), pods[2]]
            during = len(balancer.answers)
            pods = [*(replace(pod, "v1") for pod in pods[:2]), pods[2]]  # back, in the middle
        assert [answer for answer in balancer.answers if answer[0] != 200] == []
        served = Counter(release for _, release in balancer.answers)
        assert served["v2"] > 100 and served["v1"] > 100 and during > 1000 and len(balancer.answers) > during + 1000


# -- many releases ----------------------------------------------------------------------------------------------------

LARGE = """
version: 1
defaults: {mode: default}
models:
  encoder:
    factory: encoder.py:encoder
    kwargs: {layers: 1, width: 1024}
    inputs:
      ids: {shape: [batch, seq], dtype: int64, init: {randint: [0, 1000]}, pad: {batch: 0, seq: 0}}
      mask: {shape: [batch, seq], dtype: bool, init: ones, pad: {batch: true, seq: false}}
    outputs: {crop: [batch, seq]}
    buckets: [{batch: 2, seq: 8}]
"""


def resident(running: RunningService) -> float:
    """MB, of which pages of mapped checkpoints are a part."""
    pages = int(Path(f"/proc/{running.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ten_switches_of_a_release_take_no_more_memory_than_one_release(built: Any, tmp_path: Path) -> None:
    """The weights are 55 MB: one release that is kept after a switch is over the bound."""
    for name in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    from encoder import encoder

    (tmp_path / "manifest.yaml").write_text(LARGE)
    shutil.copy(ROOT / "examples" / "service" / "encoder.py", tmp_path)
    store = built(tmp_path, "store", tmp_path / "manifest.yaml")
    set_tags(str(store), parse_reference("encoder"), ["v1", "v2", "v3"])
    weights = encoder(layers=1, width=1024).state_dict()
    for tag in ("v1", "v2"):
        save_file(weights, tmp_path / f"{tag}.safetensors")
    options = ["--store", store, "--model", "encoder", "--tag", "v1", "--weights", tmp_path, "--port", "0"]
    with started(["examples/service/app.py", *options], tmp_path) as running:
        wait_until_ready(running)
        running.post("/embed", {"ids": [1, 2]})
        of_one = resident(running)
        for number in range(10):
            tag = f"v{1 + (number + 1) % 2}"
            assert running.post("/release", {"tag": tag}) == (200, {"release": tag})
            assert running.post("/release", {"tag": "v3"})[0] == 409  # it has no checkpoint
            assert running.post("/embed", {"ids": [1, 2]})[1]["release"] == tag
            assert running.post("/embed", {"ids": [5000]})[0] == 422
            assert "aotc_calls_total" in running.request("GET", "/metrics")[1]
        assert resident(running) < 1.15 * of_one
