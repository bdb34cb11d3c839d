"""A small HTTP service that starts with compiled code and no compiler: the block of `manifests/quickstart.yaml`.

    aotc build manifests/quickstart.yaml
    python examples/service.py --port 8000
    curl -s localhost:8000/predict -d '{"batch": 1, "seed": 7}'

It logs its startup seconds part by part. `POST /predict` takes `{"x": [[[…]]]}`, nested lists of numbers, or
`{"batch": 1, "seq": 128, "seed": 0}` for random ones, and answers `{"y": [[[…]]]}`; a call that no compiled variant may
run is answered 422 with the reason. `GET /healthz` and `GET /readyz` are for probes, `GET /metrics` for Prometheus.

On SIGTERM `/readyz` fails first; after `--drain` seconds it stops listening, answers what it has, and ends.

It needs nothing but aotc. The folder `examples/service` has one with batching, readiness and releases.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from aotc import Compiled
    from aotc.runtime.stats import Stats

WIDTH, SEQ = 256, 128
BODY_LIMIT = 16 << 20
"""Bytes that a request's body may have."""
RANDOM_LIMIT = 1 << 20
"""Elements that a request may ask to have made up."""

log = logging.getLogger("service")


# -- startup ----------------------------------------------------------------------------------------------------------


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Log how long a part of the startup took."""
    start = time.perf_counter()
    yield
    log.info("startup: %s %.3f s", part, time.perf_counter() - start)


def start(ref: str, store: str | None) -> Compiled:
    """The compiled model, loaded and warm. The imports are in here to be timed."""
    with timed("import torch"):
        import torch
    with timed("import aotc"):
        from aotc import load
    with timed("model"):
        if not __package__:  # run as a file: its own folder is on the path, and the package's is not
            sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from examples.models import transformer_block

        torch.manual_seed(0)  # in place of a checkpoint
        module = transformer_block(width=WIDTH).eval()
    with timed("load"):
        compiled = load(ref, module, store=store)
    with timed("first call"):
        compiled(torch.zeros(1, SEQ, WIDTH))
    from aotc.telemetry.startup import seconds_since_process_start

    if (total := seconds_since_process_start()) is not None:
        log.info("startup: total since process start %.3f s", total)
    return compiled


# -- requests ---------------------------------------------------------------------------------------------------------


def metrics(stats: Stats) -> str:
    """The counters, and what calls took as a histogram by bucket, as Prometheus reads them."""
    from aotc.runtime.stats import CALL_SECONDS

    lines = [f"# TYPE {name} counter\n{name} {value}\n" for name, value in stats.counters().items()]
    lines.append("# TYPE aotc_call_seconds histogram\n")
    for bucket, calls in stats.buckets.items():
        ends = zip((*CALL_SECONDS, "+Inf"), itertools.accumulate(calls.spans), strict=True)
        lines += [f'aotc_call_seconds_bucket{{bucket="{bucket}",le="{end}"}} {count}\n' for end, count in ends]
        lines.append(f'aotc_call_seconds_sum{{bucket="{bucket}"}} {calls.seconds}\n')
        lines.append(f'aotc_call_seconds_count{{bucket="{bucket}"}} {sum(calls.spans)}\n')
    return "".join(lines)


class BadRequest(ValueError):
    """The request cannot be read; the text is for the client."""


def read_input(body: bytes) -> Tensor:
    """The model's input from a request's JSON. Raises BadRequest."""
    import torch

    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise BadRequest("the body must be a JSON object")
    if "x" not in request:
        batch, seq, seed = _integer(request, "batch", 1), _integer(request, "seq", SEQ), _integer(request, "seed", 0)
        if batch * seq * WIDTH > RANDOM_LIMIT:
            raise BadRequest(f"batch × seq may be {RANDOM_LIMIT // WIDTH} at most")
        return torch.randn(batch, seq, WIDTH, generator=torch.Generator().manual_seed(seed))
    try:
        x = torch.tensor(request["x"], dtype=torch.float32)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise BadRequest(f"`x` must be nested lists of numbers, all of one length at each level: {error}") from error
    if not torch.isfinite(x).all():
        raise BadRequest("`x` must hold finite numbers")
    return x


def _integer(request: dict[str, Any], name: str, default: int) -> int:
    value = request.get(name, default)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise BadRequest(f"`{name}` must be an integer of at least 0")
    return value


class Service(ThreadingHTTPServer):
    """The server with its model. Closing it waits for the requests that are being answered."""

    daemon_threads = False

    def __init__(self, address: tuple[str, int], compiled: Compiled) -> None:
        super().__init__(address, Handler)
        self.compiled = compiled
        self.is_draining = False

    def drain(self, seconds: float) -> None:
        """Fail the readiness probe, and go on for so long: until then, balancers send requests here."""
        self.is_draining = True
        # In a thread: shutdown() waits for serve_forever(), which a signal's handler interrupts.
        threading.Timer(seconds, self.shutdown).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """It is not an error here if a client leaves before it has read the answer."""
        if isinstance(sys.exception(), ConnectionError):
            log.info("%s left before the answer", client_address[0])
        else:
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Service
    timeout = 10  # seconds; a silent client must not hold up the shutdown

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self.answer_json(200, {"status": "ok"})
        elif self.path == "/readyz":
            is_ready = not self.server.is_draining
            self.answer_json(200 if is_ready else 503, {"status": "ready" if is_ready else "shutting down"})
        elif self.path == "/metrics":
            self.answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics(self.server.compiled.stats()))
        else:
            self.answer_json(404, {"error": f"there is no {self.path}"})

    def do_POST(self) -> None:
        if self.path != "/predict":
            self.answer_json(404, {"error": f"there is no {self.path}"})
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self.answer_json(411, {"error": "the request must say its Content-Length"})
        elif int(length) > BODY_LIMIT:
            self.answer_json(413, {"error": f"the body may have {BODY_LIMIT} bytes at most"})
        else:
            self.answer_json(*self.predict(self.rfile.read(int(length))))

    def predict(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and answer. What is wrong with the request is told; what is wrong in here is logged only."""
        from aotc import MissError

        try:
            return 200, {"y": self.server.compiled(read_input(body)).tolist()}
        except BadRequest as error:
            return 400, {"error": str(error)}
        except MissError as error:
            return 422, {"error": str(error)}
        except Exception:
            log.exception("a request failed")
            return 500, {"error": "internal error"}

    def answer_json(self, status: int, content: dict[str, Any]) -> None:
        self.answer(status, "application/json", json.dumps(content))

    def answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.info("%s %s", self.address_string(), format % args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ref", default="quickstart", help="what to load: [STORE#]model[:tag] (default: quickstart)")
    parser.add_argument("--store", help="the store's folder (default: $AOTC_STORE, else aotc-store)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one; the log names it (default: 8000)")
    parser.add_argument("--drain", type=float, default=5, help="seconds to go on after SIGTERM, unready (default: 5)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    with Service((options.host, options.port), start(options.ref, options.store)) as service:
        signal.signal(signal.SIGTERM, lambda *_: service.drain(options.drain))
        signal.signal(signal.SIGINT, lambda *_: service.drain(0))
        log.info("listening on http://%s:%d", *service.server_address[:2])
        service.serve_forever()
    log.info("stopped")


if __name__ == "__main__":
    main()
