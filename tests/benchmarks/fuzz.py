"""Every reader of a store's bytes against what somebody may have put there. A script, not a test.

    python tests/benchmarks/fuzz.py --cases 100000                 # changed documents, the same ones for one seed
    pip install atheris && python tests/benchmarks/fuzz.py --guided 600    # seconds, guided by coverage

The readers and the good examples are `tests/fuzzing/readers.py`, the changes `tests/fuzzing/mutations.py`. A case fails
with anything but an AotcError, after more than two seconds of a core, or where it imports a compiler; then it is
printed, and kept under --findings. What is printed at the end: cases, refusals, the slowest case, and the memory.
The guided run is libFuzzer's, through atheris, with these changes as its mutator; its corpus is kept in --corpus.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import logging
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "runtime")]

SLOW = 2.0  # seconds of a core


def run_cases(cases: int, seed: int, findings: Path, only: list[str]) -> int:
    from fuzzing.mutations import mutate
    from fuzzing.readers import Readers

    counts: collections.Counter[str] = collections.Counter()
    taken: collections.Counter[str] = collections.Counter()
    slowest, failures, begin = (0.0, ""), 0, time.perf_counter()
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        readers = Readers(Path(folder))
        names = only or readers.names
        at_start = peak_memory()
        for case in range(cases):
            random = Random(f"{seed} {case}")
            name = names[case % len(names)]
            data = mutate(random.choice(readers.seeds[name]), random)
            start = time.process_time()
            try:
                counts[name] += 1
                taken[name] += readers.read(name, data)
            except BaseException as error:
                failures += 1
                report_finding(findings, name, data, error)
            seconds = time.process_time() - start
            slowest = max(slowest, (seconds, f"{name}, case {case}"))
            if seconds > SLOW:
                failures += 1
                report_finding(findings, name, data, TimeoutError(f"{seconds:.1f} s"))
    print(f"{cases} cases of seed {seed} in {time.perf_counter() - begin:.0f} s, {failures} findings")
    for name in names:
        print(f"  {name:12}{counts[name]:8} cases, {taken[name]:7} of them taken as they are")
    print(f"slowest: {slowest[0] * 1000:.0f} ms ({slowest[1]}); memory: {at_start} MiB before, {peak_memory()} at most")
    return 1 if failures else 0


def report_finding(findings: Path, name: str, data: bytes, error: BaseException) -> None:
    findings.mkdir(parents=True, exist_ok=True)
    path = findings / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    where = "".join(traceback.format_exception(error)[-3:])
    print(f"FINDING {path}: {type(error).__name__}: {str(error)[:300]}\n{where}", flush=True)


def run_guided(options: argparse.Namespace) -> int:
    """In a process of its own, which libFuzzer ends: at the first finding, or when time is up."""
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        return subprocess.run([sys.executable, *sys.argv, "--work", folder], check=False).returncode


def guide(work: Path, seconds: int, corpus: Path, findings: Path, seed: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["aotc"]):
        from fuzzing.readers import Readers
    from fuzzing.mutations import mutate

    readers = Readers(work)
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(readers.names):
        for number, example in enumerate(readers.seeds[name]):
            (corpus / f"seed-{name}-{number}").write_bytes(bytes((index,)) + example)

    def read(data: bytes) -> None:
        if data:
            readers.read(readers.names[data[0] % len(readers.names)], data[1:])

    def change(data: bytes, most: int, number: int) -> bytes:
        random = Random(number)
        if random.random() < 0.3 or not data:
            return atheris.Mutate(data, most)
        return (data[:1] + mutate(data[1:], random))[:most]

    arguments = [sys.argv[0], str(corpus), f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=4096"]
    arguments += [f"-artifact_prefix={findings}/", "-max_len=200000", f"-seed={seed}", "-print_final_stats=1"]
    atheris.Setup(arguments, read, custom_mutator=change)
    atheris.Fuzz()


def replay(paths: list[Path]) -> int:
    """Read kept cases again: `NAME-…` as that reader's, others by their first byte as the guided run does."""
    from fuzzing.readers import Readers

    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        readers = Readers(Path(folder))
        for path in paths:
            name, data = path.name.partition("-")[0], path.read_bytes()
            if name not in readers.names:
                name, data = readers.names[data[0] % len(readers.names)], data[1:]
            print(f"{path}: {name}, {'taken' if readers.read(name, data) else 'refused'}")
    return 0


def memory() -> str | None:
    """A folder in memory, where there is one: the cases are many small files."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def peak_memory() -> int:
    """MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], help="a reader, like record; may be given again")
    parser.add_argument("--guided", type=int, metavar="SECONDS")
    parser.add_argument("--corpus", type=Path, default=Path(tempfile.gettempdir()) / "aotc-fuzz-corpus")
    parser.add_argument("--findings", type=Path, default=Path(tempfile.gettempdir()) / "aotc-fuzz-findings")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--replay", type=Path, nargs="+")
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    if options.replay:
        return replay(options.replay)
    if options.work:
        guide(options.work, options.guided, options.corpus, options.findings, options.seed)
    if options.guided:
        return run_guided(options)
    return run_cases(options.cases, options.seed, options.findings, options.only)


if __name__ == "__main__":
    sys.exit(main())
