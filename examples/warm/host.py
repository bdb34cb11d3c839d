"""A host of several models, scaled to zero: a worker for a model starts at its first request and ends when it is idle.

    python host.py --models models.json --idle 30 --port 8000
    curl -s localhost:8000/models/first -d '{"batch": 4, "seed": 7}'

This process imports neither torch nor aotc. The fork server of `multiprocessing` imports `prepared.py`, which prepares
all models, and forks a worker for each model that is asked for. `GET /healthz` and `GET /readyz` are for probes;
`GET /metrics` has how many workers run and started, and the seconds of each model's last start by part.

On SIGTERM `/readyz` fails first; after `--drain` seconds it stops listening, answers what it has, and ends.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
log = logging.getLogger("warm")
forks = multiprocessing.get_context("forkserver")


def run_worker(connection: Connection, name: str, asked: float) -> None:
    """In the worker, which finds `prepared` in its memory."""
    from prepared import serve

    serve(connection, name, asked)


class Worker(NamedTuple):
    process: BaseProcess
    connection: Connection


class Model:
    """A model, with its worker while it has one. One request at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker: Worker | None = None
        self.starts, self.seconds = 0, {"process": 0.0, "load": 0.0, "first call": 0.0}
        self._used = 0.0
        self._turn = threading.Lock()

    def answer(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """The worker's answer; 503 where it has ended: the next request starts another one."""
        with self._turn:
            try:
                worker = self.worker or self._start()
                worker.connection.send_bytes(body)
                status, content = worker.connection.recv()
            except (EOFError, OSError):
                self._end()
                return 503, {"error": f"the worker of {self.name} has ended"}
            self._used = time.monotonic()
            return status, content

    def _start(self) -> Worker:
        ours, theirs = forks.Pipe()
        process = forks.Process(target=run_worker, args=(theirs, self.name, time.monotonic()), daemon=True)
        process.start()
        theirs.close()
        self.worker = Worker(process, ours)
        self.seconds = ours.recv()
        self.starts += 1
        log.info("%s: worker %d started, %s", self.name, process.pid, self.seconds)
        return self.worker

    def _end(self) -> None:
        if self.worker is not None:
            self.worker.connection.close()
            self.worker.process.join()
            log.info("%s: worker %d ended", self.name, self.worker.process.pid)
            self.worker = None

    def end_if_idle(self, idle: float) -> None:
        """End the worker where no request has come for so many seconds."""
        if self._turn.acquire(blocking=False):
            try:
                if time.monotonic() - self._used >= idle:
                    self._end()
            finally:
                self._turn.release()


class Host(ThreadingHTTPServer):
    daemon_threads = False  # closing it waits for the requests that are being answered
    is_draining = False

    def __init__(self, address: tuple[str, int], models: dict[str, Model]) -> None:
        super().__init__(address, Handler)
        self.models = models

    def drain(self, seconds: float) -> None:
        """Fail the readiness probe, and go on for so long: until then, balancers send requests here."""
        self.is_draining = True
        threading.Timer(seconds, self.shutdown).start()

    def metrics(self) -> str:
        running = sum(model.worker is not None for model in self.models.values())
        lines = ["# TYPE warm_workers gauge", f"warm_workers {running}", "# TYPE warm_starts_total counter"]
        lines += [f'warm_starts_total{{model="{name}"}} {model.starts}' for name, model in self.models.items()]
        lines.append("# TYPE warm_start_seconds gauge")
        lines += [
            f'warm_start_seconds{{model="{name}",part="{part}"}} {seconds:.4f}'
            for name, model in self.models.items()
            for part, seconds in model.seconds.items()
            if model.starts
        ]
        return "".join(f"{line}\n" for line in lines)


class Handler(BaseHTTPRequestHandler):
    server: Host
    timeout = 10  # seconds

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self.send(200, "application/json", '{"status": "ok"}')
        elif self.path == "/readyz":
            ready = not self.server.is_draining
            self.send(200 if ready else 503, "application/json", json.dumps({"ready": ready}))
        elif self.path == "/metrics":
            self.send(200, "text/plain; version=0.0.4; charset=utf-8", self.server.metrics())
        else:
            self.send(404, "application/json", json.dumps({"error": f"there is no {self.path}"}))

    def do_POST(self) -> None:
        name = self.path.removeprefix("/models/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if (model := self.server.models.get(name)) is None:
            status, content = 404, {"error": f"there is no model {name}; there are {', '.join(self.server.models)}"}
        else:
            status, content = model.answer(body)
        self.send(status, "application/json", json.dumps(content))

    def send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.address_string(), format % args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("models.json"), help="names, references and checkpoints")
    parser.add_argument("--idle", type=float, default=30, help="seconds without a request that end a worker")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one; the log names it")
    parser.add_argument("--drain", type=float, default=5, help="seconds to go on after SIGTERM, unready (default: 5)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    models = {name: Model(name) for name in json.loads(options.models.read_text())}

    # What the fork server is started with: until Python 3.13 it looks for modules in $PYTHONPATH alone.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["WARM_MODELS"] = str(options.models)
    forks.set_forkserver_preload(["prepared"])
    from multiprocessing.forkserver import ensure_running

    ensure_running()  # it prepares the models meanwhile

    with Host((options.host, options.port), models) as host:

        def end_idle() -> None:
            while True:
                time.sleep(min(1, options.idle / 2))
                for model in models.values():
                    model.end_if_idle(options.idle)

        threading.Thread(target=end_idle, daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: host.drain(options.drain))
        log.info("listening on http://%s:%d", *host.server_address[:2])
        host.serve_forever()


if __name__ == "__main__":
    main()
