"""A service of several processes by `os.fork`: the parent prepares, each worker loads, and one that ends is replaced.

    python prefork.py first --workers 2 --port 8000
    curl -s localhost:8000/ -d '{"batch": 4, "seed": 7}'

The parent has one thread and answers nothing, so nothing is half done when it forks.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NoReturn

import aotc

log = logging.getLogger("prefork")


class Service(HTTPServer):
    compiled: aotc.Compiled


class Handler(BaseHTTPRequestHandler):
    server: Service
    timeout = 10  # seconds

    def do_POST(self) -> None:
        from prepared import answer

        status, content = answer(self.server.compiled, self.rfile.read(int(self.headers.get("Content-Length", 0))))
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s %s", self.address_string(), format % args)


def work(service: Service, prepared: Any) -> NoReturn:
    """A worker's life. It leaves by `os._exit`: what the parent would do at its end is not the worker's to do."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        began = time.perf_counter()
        service.compiled = prepared.load()
        log.info("worker %d loaded in %.1f ms", os.getpid(), 1000 * (time.perf_counter() - began))
        service.serve_forever()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="its name in models.json, or in the file that $WARM_MODELS names")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one; the log names it")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    from prepared import MODELS

    prepared = MODELS[options.model]
    workers: set[int] = set()

    def end(*_: object) -> NoReturn:
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    with Service((options.host, options.port), Handler) as service:
        log.info("listening on http://%s:%d", *service.server_address[:2])
        while True:
            while len(workers) < options.workers:
                if (worker := os.fork()) == 0:
                    work(service, prepared)
                workers.add(worker)
            ended, _ = os.wait()
            workers.discard(ended)
            time.sleep(0.1)  # one that cannot start is not started without a pause


if __name__ == "__main__":
    main()
