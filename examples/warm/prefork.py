"""A service of several processes by `os.fork`: the parent prepares, each worker loads, and one that ends is replaced.

    python prefork.py first --workers 2 --port 8000
    curl -s localhost:8000/ -d '{"batch": 4, "seed": 7}'

The parent has one thread and answers nothing, so nothing is half done when it forks. On SIGTERM `GET /readyz` fails
first; after `--drain` seconds the workers stop listening, answer what they have, and end, and then the parent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import signal
import socket
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NoReturn

import aotc

log = logging.getLogger("prefork")


class Service(HTTPServer):
    compiled: aotc.Compiled
    is_draining = False

    def drain(self, seconds: float) -> None:
        """Fail the readiness probe, and go on for so long: until then, balancers send requests here."""
        self.is_draining = True
        threading.Timer(seconds, self.shutdown).start()

    def answer_the_rest(self) -> None:
        """Answer connections that no worker has accepted, and stop listening, in all workers."""
        while self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            if not select.select([self.socket], [], [], 0)[0]:
                with contextlib.suppress(OSError):  # another worker was faster
                    self.socket.shutdown(socket.SHUT_RDWR)
                return
            self.handle_request()


class Handler(BaseHTTPRequestHandler):
    server: Service
    timeout = 10  # seconds

    def do_GET(self) -> None:
        if self.path == "/readyz":
            self.send(503 if self.server.is_draining else 200, {"ready": not self.server.is_draining})
        else:
            self.send(404, {"error": f"there is no {self.path}"})

    def do_POST(self) -> None:
        from prepared import answer

        self.send(*answer(self.server.compiled, self.rfile.read(int(self.headers.get("Content-Length", 0)))))

    def send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.address_string(), format % args)


def work(service: Service, prepared: Any, drain: float) -> NoReturn:
    """A worker's life. It leaves by `os._exit`: what the parent would do at its end is not the worker's to do."""
    try:
        signal.signal(signal.SIGTERM, lambda *_: service.drain(drain))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        began = time.perf_counter()
        service.compiled = prepared.load()
        log.info("worker %d loaded in %.1f ms", os.getpid(), 1000 * (time.perf_counter() - began))
        service.serve_forever()
        service.answer_the_rest()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="its name in models.json, or in the file that $WARM_MODELS names")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one; the log names it")
    parser.add_argument("--drain", type=float, default=5, help="seconds to go on after SIGTERM, unready (default: 5)")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    from prepared import MODELS

    prepared = MODELS[options.model]
    workers: set[int] = set()
    ending = False

    def end(*_: object) -> None:
        nonlocal ending
        ending = True
        for worker in workers:
            os.kill(worker, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    with Service((options.host, options.port), Handler) as service:
        service.socket.setblocking(False)  # two workers may see one connection, and one of them gets none
        log.info("listening on http://%s:%d", *service.server_address[:2])
        while workers or not ending:
            # Blocked while it forks: a worker that the handler does not know of yet would not be told.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            while len(workers) < options.workers and not ending:
                if (worker := os.fork()) == 0:
                    work(service, prepared, options.drain)
                workers.add(worker)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            if workers:
                ended, _ = os.wait()
                workers.discard(ended)
                if not ending:
                    time.sleep(0.1)  # one that cannot start is not started without a pause
    log.info("stopped")


if __name__ == "__main__":
    main()
