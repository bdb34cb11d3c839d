"""What checking signatures adds to a load, by kind of key: milliseconds of CPU of the whole `aotc.load` in fresh
processes with and without trusted keys, and of one check in a process that has done it before.

    python tests/benchmarks/signatures.py STORE#quickstart     (a store built from manifests/quickstart.yaml)
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from aotc.store.layout.bundle import read_bundle  # noqa: E402
from aotc.store.layout.store import Store  # noqa: E402
from aotc.store.reference import parse_reference  # noqa: E402
from aotc.store.signing.attachments import reader_of  # noqa: E402
from aotc.store.signing.keys import read_private_key  # noqa: E402
from aotc.store.signing.signatures import Claims, sign  # noqa: E402
from aotc.store.signing.trust import check_signatures, read_trust  # noqa: E402

KINDS = {
    "ECDSA P-256": ("EC", "-pkeyopt", "ec_paramgen_curve:P-256"),
    "RSA 2048": ("RSA", "-pkeyopt", "rsa_keygen_bits:2048"),
    "RSA 4096": ("RSA", "-pkeyopt", "rsa_keygen_bits:4096"),
    "Ed25519": ("ED25519",),
}
LOAD = """
import sys, time, torch, aotc
aotc.load
from examples.models import transformer_block
module = transformer_block(width=256, heads=4).eval()
began = time.process_time()
aotc.load("quickstart", module, store=sys.argv[1], cache=sys.argv[2], trust=aotc.Trust(keys=sys.argv[3:] or None))
print((time.process_time() - began) * 1e3)
"""


def pair(folder: Path, kind: str) -> tuple[Path, Path]:
    private, public = folder / "k.key", folder / "k.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", *KINDS[kind], "-out", private], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    return private, public


def load_ms(store: Path, cache: Path, *keys: Path) -> float:
    command = [sys.executable, "-W", "ignore", "-c", LOAD, str(store), str(cache), *map(str, keys)]
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def check_ms(store: Store, digest: str, cache: Path, public: Path) -> float:
    reference = parse_reference("quickstart")
    trust = read_trust([public], cache=cache)
    assert trust is not None
    times = []
    for _ in range(100):
        began = time.process_time()
        check_signatures(reader_of(store), store.attachment, digest, reference, trust)
        times.append((time.process_time() - began) * 1e3)
    return statistics.median(times)


def main(given: str, repeat: int) -> None:
    source = Path(given.partition("#")[0])
    with tempfile.TemporaryDirectory() as work:
        for kind in KINDS:
            folder = Path(work, kind)
            folder.mkdir()
            store = Store.open(shutil.copytree(source, folder / "store"))
            digest = read_bundle(store, parse_reference("quickstart")).digest
            private, public = pair(folder, kind)
            claims = Claims(digest, "aotc/quickstart", "quickstart:latest", datetime.now(UTC))
            sign(store, claims, read_private_key(str(private), lambda: b""))
            cache = folder / "cache"
            load_ms(store.path, cache, public)  # brings files into the page cache, and writes what is remembered
            pairs = [(load_ms(store.path, cache), load_ms(store.path, cache, public)) for _ in range(repeat)]
            without, checked = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(
                f"{kind:12} load {without:6.1f} ms of CPU, with a trusted key {checked:6.1f} ms, "
                f"`import cryptography` included; one more check {check_ms(store, digest, cache, public):.2f} ms"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", metavar="STORE#quickstart")
    parser.add_argument("--repeat", type=int, default=9, help="fresh processes with and without keys, of each kind")
    options = parser.parse_args()
    main(options.ref, options.repeat)
