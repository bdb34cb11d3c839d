"""Advised buckets against lists that people configure, at equal numbers of buckets, on three traces with fixed seeds.

    python tests/benchmarks/advise.py                # the table
    python tests/benchmarks/advise.py --lines 1000000 --only speed

Traces: lengths from a log-normal distribution; a mix of two humps (chat and documents); batches whose lengths fall as
they grow. The lists are extended by their own rule to the largest size of the trace:

- powers of two;
- vLLM: 1, 2, 4, multiples of 8 below 256, then of 16 (`cudagraph_capture_sizes` in vllm/config/compilation.py);
- TensorRT-LLM: for batches 1, 2, 4, multiples of 8 to 128, then of 64 (`_generate_cuda_graph_batch_sizes`); for
  lengths powers of two to 64, multiples of 128 to 1024, then powers of two (`_generate_cuda_graph_seq_lens`); both with
  padding, in tensorrt_llm/llmapi/llm_args.py.

Cost is the number of tokens: batch × length. A list for two dims is the product of the two lists. Buckets of a list
that no call of the trace runs in are not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parents[1]), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from aotc.tools.advise import Goal, Trace, advise, read_trace  # noqa: E402
from aotc.tools.advise.advice import evaluate  # noqa: E402
from aotc.tools.advise.costs import elements  # noqa: E402

CALLS = 100_000
LONGEST = 4096
MOST = 100
"""Buckets that are advised for two dims at most."""


def log_normal(draw: random.Random) -> tuple[int, ...]:
    return (clipped(draw.lognormvariate(5.5, 0.8), LONGEST),)


def two_humps(draw: random.Random) -> tuple[int, ...]:
    return (clipped(draw.gauss(180, 60) if draw.random() < 0.7 else draw.gauss(2400, 500), LONGEST),)


def correlated(draw: random.Random) -> tuple[int, ...]:
    """A batcher with a budget of tokens: the more calls in a batch, the shorter they are."""
    batch = clipped(draw.expovariate(1 / 8) + 1, 64)
    return batch, clipped(draw.lognormvariate(6.5 - batch / 20, 0.5), 2048)


def clipped(size: float, most: int) -> int:
    return max(1, min(most, round(size)))


TRACES: dict[str, tuple[tuple[str, ...], Callable[[random.Random], tuple[int, ...]]]] = {
    "log-normal lengths": (("seq",), log_normal),
    "two humps": (("seq",), two_humps),
    "batch × length": (("batch", "seq"), correlated),
}


def make_trace(name: str, calls: int = CALLS) -> Trace:
    dims, sizes = TRACES[name]
    draw = random.Random(20)
    return Trace(dims, dict(Counter(sizes(draw) for _ in range(calls))))


# -- lists that people configure --------------------------------------------------------------------------------------


def powers(dim: str, most: int) -> list[int]:
    return cut((1 << n for n in range(most.bit_length() + 1)), most)


def vllm(dim: str, most: int) -> list[int]:
    return cut(itertools.chain((1, 2, 4), range(8, 256, 8), range(256, most + 16, 16)), most)


def tensorrt_llm(dim: str, most: int) -> list[int]:
    if dim == "batch":
        return cut(itertools.chain((1, 2, 4), range(8, 129, 8), range(192, most + 64, 64)), most)
    large = (2048 << n for n in range(most.bit_length()))
    return cut(itertools.chain((1 << n for n in range(7)), range(128, 1025, 128), large), most)


def cut(sizes: Sequence[int] | itertools.chain[int] | object, most: int) -> list[int]:
    """The sizes up to the largest that came, and that one."""
    return sorted({min(size, most) for size in sizes})  # type: ignore[attr-defined]


LISTS = {"powers of two": powers, "vLLM": vllm, "TensorRT-LLM": tensorrt_llm}


def compare(name: str, calls: int) -> None:
    trace = make_trace(name, calls)
    largest = [max(shape[axis] for shape in trace.counts) for axis in range(len(trace.dims))]
    for label, sizes in LISTS.items():
        rows = [sizes(dim, most) for dim, most in zip(trace.dims, largest, strict=True)]
        product = [dict(zip(trace.dims, one, strict=True)) for one in itertools.product(*rows)]
        plan = evaluate(trace, product, frozenset(trace.dims), elements)
        used = sum(1 for use in plan.buckets if use.calls)
        count = used if len(trace.dims) == 1 else min(used, MOST)
        began = time.process_time()
        advice = advise(trace, Goal(count=count))
        took = time.process_time() - began
        ours = f"{count} | {advice.plan.waste:.1%} | {advice.plan.p95:.2f} | {advice.bound:.1%} | {took:.1f} s"
        print(f"| {name} | {label} | {used} | {plan.waste:.1%} | {plan.p95:.2f} | {ours} |", flush=True)


def speed(lines: int) -> None:
    """A trace of so many lines from disk to advice."""
    for name, (dims, sizes) in TRACES.items():
        draw = random.Random(21)
        with tempfile.TemporaryFile() as file:
            for _ in range(lines):
                file.write(json.dumps(dict(zip(dims, sizes(draw), strict=True))).encode() + b"\n")
            file.seek(0)
            began = time.process_time()
            trace = read_trace(file, name)
            read = time.process_time()
            advise(trace, Goal(count=16))
            done = time.process_time()
        times = f"read {read - began:.1f} s, advise 16 buckets {done - read:.1f} s, both of one core"
        print(f"{name}: {lines:,} lines, {len(trace.counts):,} distinct sizes: {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--only", choices=("table", "speed"))
    options = parser.parse_args()
    if options.only != "speed":
        print("| trace | list | buckets | waste | p95 | advised | waste | p95 | no less than | CPU time |")
        print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
        for name in TRACES:
            compare(name, options.calls)
    if options.only != "table":
        speed(options.lines)


if __name__ == "__main__":
    main()
