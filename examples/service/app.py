"""A service of an encoder with FastAPI: readiness, dynamic batching, and a switch to another release under load.

    python app.py --store aotc-store --model encoder --tag v1 --weights checkpoints --port 8000

A release is a tag: the bundle `MODEL:TAG` of the store, and the checkpoint `TAG.safetensors` in the folder of weights.

| endpoint | answer |
|---|---|
| `POST /embed` `{"ids": [2, 17, 42]}` | `{"embedding": […], "release": "v1"}` |
| `GET /healthz`, `GET /readyz` | whether the process lives; whether it is to get requests |
| `POST /release` `{"tag": "v2"}` | after the switch, the release that serves; 409 with the reason if there is none |
| `GET /metrics`, `GET /trace` | for Prometheus; sampled sizes of calls for `aotc advise` |

On SIGTERM `/readyz` fails first; after `--drain` seconds it stops listening, answers what it has, and ends.

Neither the model's code nor a compiler is imported.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

try:
    import prometheus_client
    import uvicorn
    from fastapi import FastAPI, HTTPException, Response
    from pydantic import BaseModel, Field, NonNegativeInt
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError as error:
    sys.exit(f"{error}\n  hint: pip install -r {Path(__file__).with_name('requirements.txt')}")

import aotc
from aotc.telemetry import ShapeSample, log_startup, sample_shapes
from aotc.telemetry.prometheus import StatsCollector

sys.path.insert(0, str(Path(__file__).resolve().parent))
from batching import Batcher, Buckets, Overloaded

log = logging.getLogger("service")


class Options(NamedTuple):
    store: str
    model: str
    tag: str
    weights: Path


class Release(NamedTuple):
    """A loaded tag. A batch keeps the release that it began with, so a switch takes nothing from under it."""

    tag: str
    compiled: aotc.Compiled
    buckets: Buckets
    shapes: ShapeSample

    def embed(self, texts: Sequence[list[int]]) -> list[dict[str, object]]:
        """One call for all texts; aotc pads it to a bucket, and cuts the result."""
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        mask = torch.tensor([[True] * len(text) + [False] * (longest - len(text)) for text in texts])
        _, means = self.compiled(ids, mask)
        return [{"embedding": mean, "release": self.tag} for mean in means.tolist()]


def load_release(options: Options, tag: str) -> Release:
    """Load, and call each bucket: what a first call does is done before a request comes, and the others are timed."""
    reference = f"{options.model}:{tag}"
    compiled = aotc.load(reference, weights=options.weights / f"{tag}.safetensors", store=options.store)
    seconds = {}
    for variant in compiled.artifact.variants:
        rows, length = (
            size if isinstance(size, int) else size.max for size in map(variant.bucket.get, ("batch", "seq"))
        )
        ids, mask = torch.zeros(rows, length, dtype=torch.int64), torch.ones(rows, length, dtype=torch.bool)
        seconds[rows, length] = min([timed_call(compiled, ids, mask) for _ in range(3)][1:])
    return Release(tag, compiled, Buckets(seconds), sample_shapes(compiled))


def timed_call(compiled: aotc.Compiled, ids: torch.Tensor, mask: torch.Tensor) -> float:
    began = time.perf_counter()
    compiled(ids, mask)[1].tolist()  # which waits for a GPU
    return time.perf_counter() - began


class Service:
    """The release that serves, and the queue before it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.release: Release | None = None
        self.is_draining = False
        self._calls = ThreadPoolExecutor(1, "calls")
        self._switching = asyncio.Lock()
        self.batcher = Batcher(self._choose, self._run)
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(StatsCollector(self.models))
        self.rows = prometheus_client.Histogram(
            "service_batch_requests", "Requests in a call.", buckets=(1, 2, 4, 8, 16, 32), registry=self.registry
        )
        self.seconds = prometheus_client.Histogram(
            "service_request_seconds", "From the request to its answer.", registry=self.registry
        )

    def models(self) -> dict[str, aotc.Compiled]:
        """What is exported: the release that serves."""
        return {f"{self.options.model}:{self.release.tag}": self.release.compiled} if self.release else {}

    async def start(self) -> None:
        """Load the first release; the process ends where that fails, for its supervisor to see."""
        try:
            self.release = await asyncio.to_thread(load_release, self.options, self.options.tag)
        except Exception:
            log.exception("the first release could not be loaded")
            os.kill(os.getpid(), signal.SIGTERM)
            return
        log_startup(self.models())

    async def switch(self, tag: str) -> None:
        """Serve another release. The old one answers until the new one is loaded and warm; requests that wait then run
        in the new one. Raises AotcError, and goes on with the old one, where the new one cannot take its place."""
        async with self._switching:
            new = await asyncio.to_thread(load_release, self.options, tag)
            if self.release and new.buckets.longest < self.release.buckets.longest:
                raise aotc.AotcError(
                    f"{tag} takes {new.buckets.longest} tokens, and {self.release.tag} {self.release.buckets.longest}: "
                    "requests that wait could not be answered",
                    hint="build it with the buckets that are served",
                )
            self.release = new

    def _serving(self) -> Release:
        assert self.release is not None, "the server answers 503 until a release is loaded"
        return self.release

    def _choose(self, waiting: Sequence[list[int]]) -> list[int]:
        return self._serving().buckets.choose([len(ids) for ids in waiting])

    async def _run(self, batch: list[list[int]]) -> list[dict[str, object]]:
        self.rows.observe(len(batch))
        return await asyncio.get_running_loop().run_in_executor(self._calls, self._serving().embed, batch)


# -- HTTP -------------------------------------------------------------------------------------------------------------


class EmbedRequest(BaseModel):
    ids: list[NonNegativeInt] = Field(min_length=1)


class ReleaseRequest(BaseModel):
    tag: str = Field(pattern=r"^\w[\w.-]*$")


class CloseWhileDraining:
    """Tells clients to make their next request elsewhere: a connection that is kept alive outlasts its endpoint."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self.app(scope, receive, send_closing if self.service.is_draining else send)


class Server(uvicorn.Server):
    """uvicorn's, which on SIGTERM goes on for `drain` seconds while `/readyz` fails: so long, balancers send requests.
    A second signal, or Ctrl-C, does not wait."""

    def __init__(self, config: uvicorn.Config, service: Service, drain: float) -> None:
        super().__init__(config)
        self.service, self.drain = service, drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM and self.service.release and not self.service.is_draining:
            self.service.is_draining = True
            threading.Timer(self.drain, super().handle_exit, (sig, frame)).start()
        else:
            super().handle_exit(sig, frame)


def create_app(service: Service) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading, serving = asyncio.create_task(service.start()), asyncio.create_task(service.batcher.serve())
        yield  # the server answers from here on; it has answered all requests when this goes on
        loading.cancel()
        serving.cancel()

    app = FastAPI(title="encoder", lifespan=lifespan)
    app.add_middleware(CloseWhileDraining, service=service)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        if service.is_draining:
            raise HTTPException(503, "it is shutting down")
        return {"status": "ready", "release": ready().tag}

    @app.post("/embed")
    async def embed(request: EmbedRequest) -> dict[str, list[float] | str]:
        began = time.perf_counter()
        if (longest := ready().buckets.longest) < len(request.ids):
            raise HTTPException(422, f"{len(request.ids)} tokens; the longest bucket takes {longest}")
        try:
            answer = await service.batcher.submit(request.ids)
        except Overloaded as error:
            raise HTTPException(503, str(error), headers={"Retry-After": "1"}) from None
        except (aotc.MissError, aotc.LibraryError) as error:  # a token that the embedding does not have, for one
            raise HTTPException(422, str(error)) from None
        service.seconds.observe(time.perf_counter() - began)
        return answer

    @app.post("/release")
    async def release(request: ReleaseRequest) -> dict[str, str]:
        ready()
        try:
            await service.switch(request.tag)
        except aotc.AotcError as error:
            raise HTTPException(409, str(error)) from None
        return {"release": ready().tag}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(prometheus_client.generate_latest(service.registry), media_type="text/plain; version=0.0.4")

    @app.get("/trace")
    async def trace() -> Response:
        return Response("".join(f"{line}\n" for line in ready().shapes.lines()), media_type="application/x-ndjson")

    def ready() -> Release:
        if service.release is None:
            raise HTTPException(503, "the first release is loading")
        return service.release

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="aotc-store")
    parser.add_argument("--model", default="encoder")
    parser.add_argument("--tag", default="latest", help="the first release (default: latest)")
    parser.add_argument("--weights", type=Path, default=Path("checkpoints"), help="the folder of TAG.safetensors")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--drain", type=float, default=5, help="seconds to go on after SIGTERM, unready (default: 5)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    service = Service(Options(options.store, options.model, options.tag, options.weights))
    config = uvicorn.Config(
        create_app(service),
        host=options.host,
        port=options.port,
        access_log=False,
        timeout_keep_alive=75,  # longer than balancers keep a connection: they must not use one that is being closed
        timeout_graceful_shutdown=20,  # with `--drain`, below the pod's grace period
    )
    Server(config, service, options.drain).run()


if __name__ == "__main__":
    main()
