"""Load on the service over loopback, with a switch of the release in the middle.

    python load.py --url http://127.0.0.1:8000 --seconds 20 --connections 16 --release v2

Every connection sends its next request when the last one is answered. Prints requests, errors and latencies before,
during and after the switch, which lasts from `POST /release` to its answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    """One request: which body, when it was sent, milliseconds, the status (0: no answer) and the answer's text."""

    body: int
    sent: float
    ms: float
    status: int
    text: str


class Switch(NamedTuple):
    began: float
    ended: float
    status: int
    text: str


def send(connection: http.client.HTTPConnection, path: str, body: object) -> tuple[int, str]:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read().decode()


def connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)


def drive(
    url: str, bodies: Sequence[list[int]], seconds: float, connections: int, release: str = ""
) -> tuple[list[Answer], Switch | None]:
    """Send requests for so long; with `release`, switch to it in the middle."""
    answers: list[Answer] = []
    until = time.perf_counter() + seconds

    def client(number: int) -> None:
        connection, draw = connect(url), random.Random(number)
        while (sent := time.perf_counter()) < until:
            body = draw.randrange(len(bodies))
            try:
                status, text = send(connection, "/embed", {"ids": bodies[body]})
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                status, text = 0, repr(error)
            answers.append(Answer(body, sent, 1000 * (time.perf_counter() - sent), status, text))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(connections)]
    for each in clients:
        each.start()
    switch = None
    if release:
        time.sleep(seconds / 2)
        began = time.perf_counter()
        status, text = send(connect(url), "/release", {"tag": release})
        switch = Switch(began, time.perf_counter(), status, text)
    for each in clients:
        each.join()
    return answers, switch


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(answers: Sequence[Answer], switch: Switch | None) -> str:
    """A row for each phase. A request is in the switch where any of its time is."""

    def row(name: str, holds: Callable[[Answer], bool], seconds: float) -> str:
        own = [answer for answer in answers if holds(answer)]
        if not own:
            return f"| {name} | {seconds:.2f} s | 0 | 0 | – | – | – |"
        ms = [answer.ms for answer in own]
        errors = sum(answer.status != 200 for answer in own)
        times = " | ".join(f"{quantile(ms, share):.1f} ms" for share in (0.5, 0.99))
        return f"| {name} | {seconds:.2f} s | {len(own):,} | {errors} | {times} | {max(ms):.1f} ms |"

    begin, end = min(a.sent for a in answers), max(a.sent + a.ms / 1000 for a in answers)
    rows = ["| | time | requests | errors | p50 | p99 | longest |", "|---|---:|---:|---:|---:|---:|---:|"]
    if switch:
        rows += [
            row("before", lambda a: a.sent + a.ms / 1000 < switch.began, switch.began - begin),
            row(
                "during the switch",
                lambda a: a.sent <= switch.ended and a.sent + a.ms / 1000 >= switch.began,
                switch.ended - switch.began,
            ),
            row("after", lambda a: a.sent > switch.ended, end - switch.ended),
        ]
    return "\n".join([*rows, row("all", lambda a: True, end - begin)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--release", default="", help="switch to this tag in the middle")
    parser.add_argument("--longest", type=int, default=128, help="tokens (default: 128)")
    options = parser.parse_args()
    draw = random.Random(1)
    lengths = [min(options.longest, max(1, round(draw.lognormvariate(3.2, 0.7)))) for _ in range(200)]
    bodies = [[draw.randrange(32) for _ in range(length)] for length in lengths]
    answers, switch = drive(options.url, bodies, options.seconds, options.connections, options.release)
    if switch and switch.status != 200:
        print(f"the switch failed: {switch.status} {switch.text}")
    print(table(answers, switch))


if __name__ == "__main__":
    main()
