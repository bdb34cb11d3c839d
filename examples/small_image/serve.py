"""A service of an exported model, for an image without torch, numpy and aotc: `POST /predict` with `{"x": [[[…]]]}`.

    python serve.py FOLDER --port 8000

A call that no bucket takes is answered 422 with the reason. `GET /healthz` is for probes.
"""

from __future__ import annotations

import argparse
import array
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BODY_LIMIT = 16 << 20
"""Bytes that a request's body may have."""


def tensor_of(rows: Any) -> memoryview:
    """Nested lists of numbers as float32. Raises ValueError where they are not rectangular, and TypeError."""
    shape, flat = [], [rows]
    while flat and isinstance(flat[0], list):
        shape.append(len(flat[0]))
        if any(len(part) != shape[-1] for part in flat):
            raise ValueError("the lists are not rectangular")
        flat = [item for part in flat for item in part]
    values = memoryview(array.array("f", flat))
    return values.cast("B").cast("f", shape) if flat else values


class Handler(BaseHTTPRequestHandler):
    """One request; `model` is set before the server starts."""

    model: Any

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/healthz" else 404, {"inputs": self.model.forms})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if self.path != "/predict" or size > BODY_LIMIT:
            return self.answer(404 if self.path != "/predict" else 413, {"error": f"at most {BODY_LIMIT} bytes"})
        try:
            result = self.model(tensor_of(json.loads(self.rfile.read(size))["x"]))
        except (ValueError, TypeError, KeyError) as error:  # among them InputMismatchError
            return self.answer(422, {"error": str(error)})
        return self.answer(200, {"y": result.tolist()})

    def answer(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="what `aotc export --standalone` wrote")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    sys.path.insert(0, options.folder)
    from aotc_exported import ExportedModel

    Handler.model = ExportedModel(options.folder)
    with ThreadingHTTPServer((options.host, options.port), Handler) as server:
        print(f"listening on port {server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
