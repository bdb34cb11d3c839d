"""Servers whose answers have no end, or come byte by byte: time and size are limited around the whole exchange."""

from __future__ import annotations

import resource
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from remote_reading import remote_store

from aotc.digest import sha256_bytes
from aotc.errors import StoreError
from aotc.store.reference import parse_reference
from aotc.store.remote.interface import Limits

OK = b"HTTP/1.1 200 OK\r\n"
FOUND = b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
PIECE = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
ENDLESS: dict[str, tuple[bytes, bytes, float]] = {
    "a status line": (b"", b"H", 0.1),
    "headers": (OK, b"X-A: b\r\n", 0.1),
    "one header": (OK + b"X-A: ", b"b", 0.1),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.0),
    "redirects": (b"", FOUND + b"Content-Length: 0\r\n\r\n", 0.0),
    "the body of a redirect": (FOUND + b"Content-Length: 999999\r\n\r\n", b"a", 0.1),
    "a large body of a redirect": (FOUND + CHUNKED, PIECE, 0.0),
    "a packed body of a redirect": (FOUND + b"Content-Encoding: gzip\r\n" + CHUNKED, PIECE, 0.0),
    "a body": (OK + b"Content-Length: 999999\r\n\r\n", b" ", 0.1),
    "a large body": (OK + CHUNKED, PIECE, 0.0),
    "trailers": (OK + CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-A: b\r\n", 0.1),
    "an error": (b"HTTP/1.1 500 No\r\nContent-Length: 999999\r\n\r\n", b" ", 0.1),
}
"""What an answer begins with, then sends again and again, and the seconds in between: fewer than AOTC_REMOTE_READ."""


@pytest.fixture(scope="module")
def endless() -> Iterator[tuple[list[tuple[bytes, bytes, float]], int]]:
    """A server that answers each request as the last entry of the list says, and its port."""
    answers: list[tuple[bytes, bytes, float]] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            begin, piece, pause = answers[-1]
            with suppress(OSError):
                while self.rfile.readline().strip():
                    pass
                self.wfile.write(begin)
                for _ in range(10_000):
                    self.wfile.write(piece)
                    time.sleep(pause)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield answers, server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize("scheme", ["oci+http", "http"])
@pytest.mark.parametrize("what", ENDLESS)
def test_an_answer_without_an_end_takes_no_more_than_its_time_and_size(
    endless: tuple[list[tuple[bytes, bytes, float]], int], what: str, scheme: str
) -> None:
    answers, port = endless
    answers.append(ENDLESS[what])
    where = f"127.0.0.1:{port}/team/tiny"
    reference = parse_reference(f"oci+http://{where}:v1" if scheme == "oci+http" else f"http://{where}#tiny:v1")
    limits = Limits(total=0.8, read=0.5, attempts=2, backoff=0.01)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    with pytest.raises(StoreError):
        remote_store(str(reference.store), limits).resolve(reference)
    assert time.monotonic() - begin < 6.0  # a busy machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 << 10


def test_a_body_may_take_its_time_where_the_transfer_has_it(
    endless: tuple[list[tuple[bytes, bytes, float]], int],
) -> None:
    """Slow is not an error: each byte comes within AOTC_REMOTE_READ, and the whole within AOTC_REMOTE_TOTAL."""
    answers, port = endless
    answers.append((OK + b"Content-Length: 8\r\n\r\n", b"a", 0.1))
    remote = remote_store(f"oci+http://127.0.0.1:{port}/team/tiny", Limits(read=2.0))
    assert remote.blobs.read(sha256_bytes(b"a" * 8), 8) == b"a" * 8
