"""A service of text without torch: `POST /generate` with `{"prompt": "Once upon a time", "temperature": 0.8}`.

    python serve.py --tokenizer tokenizer.json --port 8000

Without a tokenizer, prompts are lists of token ids. `GET /healthz` is for probes.
"""

from __future__ import annotations

import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any

import msgspec
from generate import Generator, RequestError, generator_of, parser

BODY_LIMIT = 1 << 20
"""Bytes that a request's body may have."""


class Request(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 32
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = msgspec.field(default_factory=lambda: secrets.randbits(53))


class Service:
    """Answers requests, from any number of threads."""

    def __init__(self, generator: Generator, tokenizer: Any = None) -> None:
        self._generator, self._tokenizer = generator, tokenizer

    def answer(self, body: bytes) -> dict[str, Any]:
        """The tokens that follow, and the seed that gives them again. Raises RequestError."""
        try:
            asked = msgspec.json.decode(body, type=Request)
        except msgspec.DecodeError as error:  # also where a value is not what it must be
            raise RequestError(str(error)) from error
        prompt = asked.prompt if isinstance(asked.prompt, list) else self._ids_of(asked.prompt)
        tokens = self._generator.generate(prompt, asked.max_tokens, asked.temperature, asked.seed)
        text = {} if self._tokenizer is None else {"text": self._tokenizer.decode(tokens)}
        return {**text, "tokens": tokens, "seed": asked.seed}

    def _ids_of(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise RequestError("the prompt is a text, and the service has no tokenizer: give a list of token ids")
        return list(self._tokenizer.encode(text).ids)


class Handler(BaseHTTPRequestHandler):
    """One request; `service` is set before the server starts."""

    service: Service
    timeout = 60  # seconds in which a client must send its request

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/healthz" else 404, {})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path != "/generate":
            return self.answer(404, {"error": "POST /generate"})
        if not length.isdecimal() or int(length) > BODY_LIMIT:
            return self.answer(413, {"error": f"a body of at most {BODY_LIMIT} bytes, and its Content-Length"})
        try:
            return self.answer(200, self.service.answer(self.rfile.read(int(length))))
        except RequestError as error:
            return self.answer(400, {"error": str(error)})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        data = msgspec.json.encode(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def tokenizer_of(file: str) -> Any:
    """Of the library `tokenizers`, which needs no torch; as of one text, without padding."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(file)
    made.no_padding()
    made.no_truncation()
    return made


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tokenizer", help="a tokenizer.json, where prompts are texts")
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=8000)
    options = made.parse_args()
    tokenizer = tokenizer_of(options.tokenizer) if options.tokenizer else None
    Handler.service = Service(generator_of(options), tokenizer)
    with ThreadingHTTPServer((options.host, options.port), Handler) as server:
        print(f"listening on port {server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
