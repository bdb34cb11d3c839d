"""An HTTP service with a BERT classifier: torch and aotc are imported, and neither transformers nor a compiler.

python serve.py [--port 8000]
curl -d '{"input_ids": [[2, 17, 42, 3], [2, 8, 3]]}' localhost:8000
"""

from __future__ import annotations

import argparse
import json
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


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        try:
            texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input_ids"]
            status, answer = 200, {"classes": predict(texts)}
        except aotc.MissError as error:  # more texts, or longer ones, than any bucket takes
            status, answer = 422, {"error": str(error)}
        except Exception as error:
            status, answer = 400, {"error": str(error)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    ThreadingHTTPServer(("0.0.0.0", parser.parse_args().port), Handler).serve_forever()
