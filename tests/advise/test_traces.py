"""What a trace may look like, and what is said of one that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aotc.call_table.dispatch import Plan
from aotc.errors import TraceError
from aotc.runtime.counters import Counters
from aotc.runtime.stats import count_miss, snapshot
from aotc.tools.advise.trace import Trace, lines_of, read_trace


def read(*lines: str, dims: tuple[str, ...] = ()) -> Trace:
    return read_trace([f"{line}\n".encode() for line in lines], "trace", dims)


def test_json_lines_of_equal_sizes_are_added_up() -> None:
    trace = read('{"seq": 312, "batch": 4, "count": 17}', "", '{"batch": 4, "seq": 312}', '{"batch": 1, "seq": 9}')
    assert trace == Trace(("batch", "seq"), {(4, 312): 18, (1, 9): 1})
    assert trace.calls == 19


def test_with_dims_other_keys_are_ignored() -> None:
    assert read('{"ms": 1.5, "seq": 3, "user": "x"}', dims=("seq",)).counts == {(3,): 1}


def test_lines_of_an_access_log_are_found_by_name() -> None:
    trace = read(
        '10.0.0.1 "POST /v1?batch=4&seq=312" 200',
        'INFO request {"batch": 4, "seq": 312}',
        "microbatch=9 batch=2 seq=7ms seq=8",
        "GET /health",
        "batch=0 seq=1",
        dims=("batch", "seq"),
    )
    assert trace.counts == {(4, 312): 2, (2, 8): 1}
    assert trace.notes == ("trace: 2 lines left out: a dim is missing",)
    assert read("seq=1", "GET /health", dims=("seq",)).notes == ("trace: 1 line left out: a dim is missing",)


@pytest.mark.parametrize("size", ["0", "-1", "1.5", "true", '"8"', "null"])
def test_a_size_that_is_not_one_is_refused_with_its_line(size: str) -> None:
    with pytest.raises(TraceError) as caught:
        read('{"seq": 1}', f'{{"seq": {size}}}', "not JSON", '{"batch": 1}')
    assert [issue.where for issue in caught.value.issues] == ["trace:2", "trace:3", "trace:4"]
    assert "the dim `seq` is missing" in str(caught.value)
    assert caught.value.issues[0].message == f"`seq` is {size}; a whole number from 1 is expected"


def test_every_wrong_number_of_a_line_is_shown() -> None:
    with pytest.raises(TraceError) as caught:
        read(f'{{"batch": "{"x" * 99}", "seq": 2, "count": -1}}')
    (issue,) = caught.value.issues
    batch, count = issue.message.split("; a whole number from 1 is expected; ")
    assert batch == f'`batch` is "{"x" * 59}…' and count == "`count` is -1; a whole number from 0 is expected"


@pytest.mark.parametrize(
    ("lines", "dims", "told"),
    [
        ((), (), "is empty"),
        (("", " "), (), "is empty"),
        (('{"count": 3}',), (), "names no dim"),
        (("", '{"seq": 3'), (), ':2 is not JSON: {"seq": 3'),
        (('{"seq": 3, "count": 0}',), (), "holds no call"),
        (("GET /",), (), "name them with --dims"),
        (("GET /",), ("seq",), "holds no call"),
    ],
)
def test_a_trace_without_calls_is_refused(lines: tuple[str, ...], dims: tuple[str, ...], told: str) -> None:
    with pytest.raises(TraceError, match=told):
        read(*lines, dims=dims)


@pytest.mark.parametrize("indent", [None, 2])
def test_what_stats_writes_is_a_trace(indent: int | None) -> None:
    """Of padded calls and those of ranges it keeps no sizes, which the notes say."""
    counters = Counters(["batch=1,seq=128", "batch=4,seq=128", "batch=1,seq=1..512 step 8"])
    exact = Plan(0, "exact", (1, 128), (), (), (), (), 128, 128)
    for plan in (exact, exact, exact._replace(variant=1, pads=(Any,)), exact._replace(variant=2)):
        counters.count_call(plan, None)
    count_miss(counters, "form", lambda: "a miss")
    text = json.dumps(msgspec.to_builtins(snapshot(counters)), indent=indent)
    trace = read(*text.splitlines())
    assert trace.dims == ("batch", "seq") and trace.counts == {(1, 128): 2, (4, 128): 1}
    assert [note.partition(",")[0] for note in trace.notes[:-1]] == [
        "padded: 1 call",
        "in ranges: 1 call",
        "misses: 1 call",
    ]
    assert "sample_shapes" in trace.notes[-1]


def test_what_can_be_no_trace_of_a_model_is_refused_and_takes_no_time() -> None:
    many = json.dumps({f"d{number}": 1 for number in range(500)})
    for lines, told in (
        (['{"batch": 999999999999999999, "seq": 999999999999999999}'], "holds sizes that no tensor has: `batch` up to"),
        (['{"batch": 4}', f'{{"batch": {10**400}}}'], "holds sizes that no tensor has"),
        (['{"batch": 4, "count": 1e999}'], "not JSON"),
        ([f'{{"batch": 4, "count": {10**400}}}'], "`count` is 1"),
        ([many], "names 500 dims; at most 32"),
        (['{"\\u001b]0;title\\u0007batch": 4}'], "names the dim '\\x1b]0;title\\x07batch', which is not a name"),
    ):
        with pytest.raises(TraceError) as caught:
            read(*lines)
        assert told in f"{caught.value}", caught.value
    with pytest.raises(TraceError, match="which is not a name"):
        read('{"batch": 4}', dims=("ba\ntch",))
    with Path("/dev/zero").open("rb") as endless, pytest.raises(TraceError, match="zero:1 is longer than"):
        read_trace(lines_of(endless, "zero"), "zero")


def test_the_calls_of_regions_are_counted_once() -> None:
    stats = {"calls": 6, "misses": 0, "buckets": {"blocks.0 seq=8": {"calls": 3}, "head seq=8": {"calls": 3}}}
    assert read(json.dumps(stats)).counts == {(8,): 3}
