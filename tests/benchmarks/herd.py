"""Many replicas that start at once from one registry: what is fetched, how often, how long.

    python tests/benchmarks/herd.py [--processes 32] [--buckets 16] [--ready STORE]
    python tests/benchmarks/herd.py --simulate [--replicas 1000] [--per-host 8]

The first runs processes that call `aotc.load`, released together, against docker-registry on loopback, whose own log
says what was asked. Times are from the release until the last bucket is open, with torch imported before.

The second computes what cannot be run on one machine: replicas over many hosts, and a registry of given bandwidth that
refuses (503) what is beyond its connections. The clients' waits are those of aotc's own `Retry`, on a simulated clock.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import logging
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from many_buckets import MODEL, built_store, publish_many  # noqa: E402
from processes import finish, start  # noqa: E402
from registry_server import RegistryServer, running_registry  # noqa: E402

from aotc.errors import RemoteError  # noqa: E402
from aotc.store.reference import Reference, parse_reference  # noqa: E402
from aotc.store.remote.interface import Limits, Retry  # noqa: E402
from aotc.store.remote.push import push  # noqa: E402

LOAD = """
import sys, time
from pathlib import Path
import torch, aotc
from examples.models import transformer_block
torch.set_num_threads(1)
aotc.load
where, ready, go = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
module = transformer_block(width=256, heads=4).eval()
ready.touch()
while not go.exists():
    time.sleep(0.001)
began = time.perf_counter()
aotc.load(where, module)
print(time.perf_counter() - began)
"""

ACCESS = re.compile(r'"(?P<method>[A-Z]+) (?P<path>\S+) HTTP/1\.1" (?P<status>\d+) (?P<size>\d+)')


# -- on this machine --------------------------------------------------------------------------------------------------


def run_herd(server: RegistryServer, where: str, folder: Path, processes: int, caches: int) -> str:
    """One row: `processes` starts at once over `caches` hosts, each host being a cache folder of its own."""
    log = server.folder / "log"
    before = log.stat().st_size
    ready = folder / "ready"
    ready.mkdir(parents=True)
    go = folder / "go"
    herd = [
        start("-c", LOAD, where, ready / str(n), go, AOTC_CACHE_DIR=str(folder.parent / f"cache-{n % caches}"))
        for n in range(processes)
    ]
    while len(list(ready.iterdir())) < processes:
        time.sleep(0.05)
    go.touch()
    ran = [finish(process) for process in herd]
    assert all(one.returncode == 0 for one in ran), next(one.stderr for one in ran if one.returncode)
    seconds = [float(one.stdout) for one in ran]
    with log.open() as lines:
        lines.seek(before)
        asked = [match for line in lines if (match := ACCESS.search(line))]
    gets = Counter(match["path"] for match in asked if match["method"] == "GET")
    size = sum(int(match["size"]) for match in asked if match["method"] == "GET")
    heads = sum(match["method"] == "HEAD" for match in asked)
    return (
        f"{processes:>9} {caches:>5} {heads:>6} {sum(gets.values()):>6} {max(gets.values(), default=0):>9} "
        f"{size / 1e6:>8.2f} {statistics.median(seconds):>8.2f} {max(seconds):>8.2f}"
    )


def herd_on_this_machine(processes: int, buckets: int, ready: Path | None) -> None:
    with tempfile.TemporaryDirectory(prefix="aotc-herd-") as work:
        folder = Path(work)
        source = built_store(folder, ready)
        publish_many(source, "v1", buckets)
        with running_registry(folder / "registry", log={"level": "info"}) as server:
            where = f"oci://{server.host}/team/{MODEL}"
            pushed = push(source, Reference(None, MODEL, tag="v1"), parse_reference(f"{where}:v1"))
            print(f"{buckets} buckets, {pushed.size / 1e6:.2f} MB of blobs; each process has one thread\n")
            print(f"{'':32} processes hosts  HEADs   GETs most of 1       MB   median  slowest (s)")
            for name, reference, hosts in (
                ("one host, nothing here", f"{where}:v1", 1),
                ("one host, all fetched, by tag", f"{where}:v1", 1),
                ("one host, all fetched, by digest", f"{where}@{pushed.digest}", 1),
                ("one host, a folder", f"{source.path}#{MODEL}:v1", 1),
                ("as many hosts as processes", f"{where}:v1", processes),
            ):
                group = folder / ("hosts" if hosts > 1 else "host")
                row = run_herd(server, reference, group / name.replace(" ", "-"), processes, hosts)
                print(f"{name:32} {row}", flush=True)


# -- beyond one machine -----------------------------------------------------------------------------------------------


class Server(NamedTuple):
    """A registry: connections that it serves at a time, bytes per second of them all, seconds for any answer."""

    connections: int = 200
    bandwidth: float = 1.25e9
    latency: float = 0.02


class Tally:
    """What the simulated registry saw, and when each replica had its code; None for one that gave up."""

    def __init__(self) -> None:
        self.requests = self.refused = 0
        self.bytes = 0.0
        self.started: list[float | None] = []


class _Clock:
    """Stands for `Deadline` in `Retry`: takes the wait instead of sleeping it."""

    def __init__(self) -> None:
        self.asked = 0.0

    def wait(self, seconds: float) -> None:
        self.asked = seconds


class GaveUp(Exception):
    pass


class Herd:
    """A registry and its clients on a simulated clock.

    Each request holds a connection for the latency and its bytes at an equal share of the bandwidth. One that finds
    none free is refused at once.
    """

    def __init__(self, server: Server, limits: Limits, jitter: bool) -> None:
        self.server, self.limits, self.jitter = server, limits, jitter
        self.tally = Tally()
        self._busy = 0

    def request(self, amount: float) -> Iterator[float]:
        """One request with its retries: yields the seconds until its next step."""
        clock = _Clock()
        retry = Retry(self.limits, clock)  # type: ignore[arg-type]
        for failures in itertools.count():
            self.tally.requests += 1
            if self._busy < self.server.connections:
                self._busy += 1
                yield self.server.latency + amount * self.server.connections / self.server.bandwidth
                self._busy -= 1
                self.tally.bytes += amount
                return
            self.tally.refused += 1
            try:
                retry.after(RemoteError("503", transient=True))
            except RemoteError as error:
                raise GaveUp from error
            whole = min(self.limits.longest_wait, self.limits.backoff * 2**failures)
            yield self.server.latency + (clock.asked if self.jitter else whole)

    def host(self, blobs: int, size: float) -> Iterator[float]:
        """Bundle, manifest, record; then the blobs, `jobs` side by side, here as one lane with the bytes of all."""
        for _ in range(3):
            yield from self.request(5e3)
        rounds = -(-blobs // self.limits.jobs)
        for _ in range(rounds):
            yield from self.request(size / rounds)

    def run(self, hosts: int, per_host: int, blobs: int, size: float) -> Tally:
        """All replicas start at once: each asks what the tag names, and the first of a host fetches for all of it."""

        def replica(first: bool) -> Iterator[float]:
            yield from self.request(0)
            if first:
                yield from self.host(blobs, size)

        everybody = [replica(number % per_host == 0) for number in range(hosts * per_host)]
        ended: list[float | None] = [None] * len(everybody)
        events = [(0.0, number) for number in range(len(everybody))]
        while events:
            now, number = heapq.heappop(events)
            try:
                heapq.heappush(events, (now + next(everybody[number]), number))
            except StopIteration:
                ended[number] = now
            except GaveUp:
                pass
        for number, own in enumerate(ended):
            fetched = ended[number - number % per_host]
            self.tally.started.append(None if own is None or fetched is None else max(own, fetched))
        return self.tally


def simulated(replicas: int, per_host: int, blobs: int, megabytes: float) -> None:
    logging.getLogger("aotc").setLevel(logging.ERROR)  # each retry is a warning
    server = Server()
    print(
        f"{replicas} replicas, {per_host} on a host; {blobs} blobs, {megabytes:g} MB; a registry of "
        f"{server.connections} connections, {server.bandwidth * 8 / 1e9:g} Gbit/s, {server.latency * 1e3:g} ms for "
        f"an answer; the bytes alone take {megabytes * 1e6 * replicas / per_host / server.bandwidth:.1f} s\n"
    )
    print(f"{'':38} requests  refused  gave up      MB   median  slowest (s)")
    for name, jitter, on in (
        ("aotc: full jitter, once per host", True, (replicas // per_host, per_host)),
        ("the same without jitter", False, (replicas // per_host, per_host)),
        ("once per replica, with jitter", True, (replicas, 1)),
    ):
        tally = Herd(server, Limits(), jitter).run(*on, blobs, megabytes * 1e6)
        started = [one for one in tally.started if one is not None]
        print(
            f"{name:38} {tally.requests:>8} {tally.refused:>8} {len(tally.started) - len(started):>8} "
            f"{tally.bytes / 1e6:>7.0f} {statistics.median(started):>8.2f} {max(started):>8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--buckets", type=int, default=16)
    parser.add_argument("--ready", type=Path, help="a store with the quickstart model, instead of building one")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--blobs", type=int, default=64)
    parser.add_argument("--megabytes", type=float, default=8.0)
    arguments = parser.parse_args()
    if arguments.simulate:
        simulated(arguments.replicas, arguments.per_host, arguments.blobs, arguments.megabytes)
    else:
        herd_on_this_machine(arguments.processes, arguments.buckets, arguments.ready)


if __name__ == "__main__":
    main()
