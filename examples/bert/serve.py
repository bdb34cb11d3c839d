"""An HTTP service with a BERT classifier: torch and aotc are imported, and neither transformers nor a compiler.

python serve.py [--port 8000]
curl -d '{"input_ids": [[2, 17, 42, 3], [2, 8, 3]]}' localhost:8000

On SIGTERM `GET /readyz` fails first; after `--drain` seconds it stops listening, answers what it has, and ends.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

import aotc

FOLDER = Path(__file__).resolve().parent
compiled = aotc.load("bert", weights=FOLDER / "checkpoint", store=FOLDER / "aotc-store")


def predict(texts: list[list[int]]) -> list[int]:
    """The class of each text, which is given as its token ids."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    return compiled(input_ids=ids, attention_mask=mask)["logits"].argmax(dim=-1).tolist()


class Service(ThreadingHTTPServer):
    daemon_threads = False  # closing it waits for the requests that are being answered
    is_draining = False

    def drain(self, seconds: float) -> None:
        """Fail the readiness probe, and go on for so long: until then, balancers send requests here."""
        self.is_draining = True
        threading.Timer(seconds, self.shutdown).start()


class Handler(BaseHTTPRequestHandler):
    server: Service
    timeout = 10  # seconds; a silent client must not hold up the shutdown

    def do_GET(self) -> None:
        if self.path == "/readyz":
            self.send(503 if self.server.is_draining else 200, {"ready": not self.server.is_draining})
        else:
            self.send(404, {"error": f"there is no {self.path}"})

    def do_POST(self) -> None:
        try:
            texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input_ids"]
            status, answer = 200, {"classes": predict(texts)}
        except aotc.MissError as error:  # more texts, or longer ones, than any bucket takes
            status, answer = 422, {"error": str(error)}
        except Exception as error:
            status, answer = 400, {"error": str(error)}
        self.send(status, answer)

    def send(self, status: int, answer: dict[str, object]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--drain", type=float, default=5, help="seconds to go on after SIGTERM, unready (default: 5)")
    options = parser.parse_args()
    with Service(("0.0.0.0", options.port), Handler) as service:
        signal.signal(signal.SIGTERM, lambda *_: service.drain(options.drain))
        service.serve_forever()
