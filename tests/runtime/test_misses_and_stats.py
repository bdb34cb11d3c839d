"""What happens to a call that no variant may run, and what is counted of those that run."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hand_built import make_compiled, specs_of, tensor
from torch import nn

from aotc.errors import BindError, LibraryError, MissError
from aotc.records import ConstantLeaf, Output, PadRule, SizeRange
from aotc.runtime.explain import misses
from aotc.runtime.stats import KEPT_MISSES, LOGGED_A_MINUTE, count_miss


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def doubling(function: Callable[[torch.Tensor], torch.Tensor] = double, **fields: Any) -> Any:
    """x*2 in buckets 4 and 8, padded, and in the range 16..32."""
    return make_compiled(
        function,
        [tensor("x", "seq", 2, pad={"seq": PadRule()})],
        [{"seq": 4}, {"seq": 8}, {"seq": SizeRange(16, 32, tune_at=32)}],
        outputs=(Output(index=0, dims=("seq", "")),),
        **fields,
    )


def test_a_tensor_with_a_default_is_not_missing_and_another_without_one_is_the_reason() -> None:
    leaves = [tensor("x", "n", 2), tensor("mask", "n", default=1)]
    compiled = make_compiled(lambda x, mask: x * mask.unsqueeze(-1), leaves, [{"n": 4}])
    assert torch.equal(compiled(torch.full((4, 2), 3.0), None), torch.full((4, 2), 3.0))
    for given, reason in ((None, "x: a tensor is expected, None came"), (torch.ones(3), "x: shape [n, 2] is expected")):
        with pytest.raises(MissError) as caught:
            compiled(given, None)
        assert str(caught.value.issues[0]).startswith(reason) and "mask" not in str(caught.value)


# -- on_miss ----------------------------------------------------------------------------------------------------------


def test_error_raises_and_runs_nothing() -> None:
    compiled = doubling()
    with pytest.raises(MissError):
        compiled(torch.ones(9, 2))
    assert not any(library.seen for library in compiled.libraries)


def test_eager_runs_the_module_with_the_calls_own_arguments_and_counts() -> None:
    class Recording(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    compiled = doubling(module=Recording().eval(), on_miss="eager")
    x = torch.ones(9, 2)
    args, kwargs = compiled(x=x)
    assert args == ()
    assert kwargs["x"] is x
    assert (compiled.stats().misses, compiled.stats().calls) == (1, 0)


def test_eager_is_never_chosen_without_being_asked_for() -> None:
    module = nn.Identity().eval()
    with pytest.raises(MissError):
        doubling(module=module)(torch.ones(9, 2))


def test_a_callable_gets_the_error_and_the_arguments_and_decides() -> None:
    seen: list[Any] = []

    def decide(error: MissError, *args: Any, **kwargs: Any) -> str:
        seen.extend([error, args, kwargs])
        return "decided"

    x = torch.ones(9, 2)
    assert doubling(on_miss=decide)(x=x) == "decided"
    assert isinstance(seen[0], MissError)
    assert "seq is 9" in str(seen[0])
    assert seen[1:] == [(), {"x": x}]


@pytest.mark.parametrize("on_miss", ["eagre", None, 3])
def test_anything_else_is_refused_when_the_callable_is_made(on_miss: Any) -> None:
    with pytest.raises(BindError, match="on_miss"):
        doubling(on_miss=on_miss)


def test_eager_without_a_module_is_refused_when_the_callable_is_made() -> None:
    with pytest.raises(BindError, match="module"):
        doubling(on_miss="eager")


# -- the log ----------------------------------------------------------------------------------------------------------


def test_each_kind_of_miss_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    compiled = doubling(on_miss=lambda error, *args: None)
    with caplog.at_level(logging.INFO, logger="aotc"):
        for size in (9, 9, 10, 9, 10):
            compiled(torch.ones(size, 2))
        compiled(torch.ones(4, 2, dtype=torch.float64))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert all(record.name == "aotc" and "handmade" in record.getMessage() for record in caplog.records)
    assert "seq is 9" in messages[0] and messages[0].endswith("; in this call x is float32 [9, 2]")
    assert "seq is 10" in messages[1] and messages[1].endswith("x is float32 [10, 2]")
    assert messages[2].endswith("; in this call x is float64 [4, 2]")
    assert not any("in this call" in kind for kind in compiled.stats().miss_kinds)


def test_values_of_one_type_are_one_kind_and_a_line_names_some_leaves_alone(caplog: pytest.LogCaptureFixture) -> None:
    leaves = [ConstantLeaf(f"c{index}", "built") for index in range(20)]
    compiled = make_compiled(lambda: torch.ones(2), leaves, on_miss=lambda error, *args: None)
    with caplog.at_level(logging.INFO, logger="aotc"):
        for number in range(50):
            compiled(*[f"user {number}\nx"] * 20)
    (record,) = caplog.records
    assert record.getMessage().endswith("c4: built for 'built', str came; and 15 more")
    assert "user" not in record.getMessage() and "\n" not in record.getMessage()
    assert list(compiled.stats().miss_kinds.values()) == [50]


@pytest.mark.parametrize(
    ("leaf", "value", "hint"),
    [
        (tensor("x", 2), None, "build a second model, whose `inputs` leave it out"),
        (tensor("x", 2), [1.0, 2.0], r"torch.tensor(…, dtype=torch.float32)"),
        (ConstantLeaf("x", None), {}, "pass None, as {} is another argument"),
        (ConstantLeaf("x", None), torch.ones(2), "it was left out at build: name it in the manifest's `inputs`"),
    ],
)
def test_a_miss_for_none_says_what_to_pass(leaf: Any, value: Any, hint: str) -> None:
    with pytest.raises(MissError) as raised:
        make_compiled(lambda *tensors: tensors, [leaf])(value)
    assert hint in str(raised.value)


@pytest.mark.parametrize(
    ("value", "eager"),
    [(None, False), (torch.ones(2, 8).half(), False), (torch.ones(2), False), (torch.ones(9, 4), True)],
    ids=["None", "dtype", "rank", "size"],
)
def test_eager_is_offered_only_for_calls_that_the_module_would_take(value: Any, eager: bool) -> None:
    refusing = make_compiled(lambda x: x, [tensor("x", "batch", 4)], [{"batch": 2}], module=nn.Identity().eval())
    with pytest.raises(MissError) as raised:
        refusing(value)
    assert ("on_miss" in str(raised.value)) is eager


def test_a_hint_that_all_buckets_share_stands_once_for_the_call() -> None:
    refusing = make_compiled(lambda x: x, [tensor("x", "batch", 4)], [{"batch": 2}, {"batch": 4}])
    with pytest.raises(MissError) as raised:
        refusing(torch.ones(1, 4))
    assert raised.value.hint.startswith("give the inputs `pad: {batch: …}` in the manifest, or add a bucket")
    assert str(raised.value).count("pad:") == 1
    with pytest.raises(MissError) as raised:
        refusing(torch.ones(0, 4))
    assert "leave out calls in which batch is 0" in raised.value.hint and "pad:" not in str(raised.value)


def test_a_size_that_the_manifest_fixes_should_become_a_dim() -> None:
    refusing = make_compiled(lambda x: x, [tensor("image", "batch", 3, 32, 32)], [{"batch": 1}])
    with pytest.raises(MissError) as raised:
        refusing(torch.ones(1, 3, 64, 64))
    assert "the manifest fixes 32 in `shape:`" in str(raised.value) and "write a dim" in str(raised.value)
    assert "on_miss" not in str(raised.value)
    with pytest.raises(MissError, match=r"shape \[batch, 3, 32, 32\] is expected, \[2, 3, 64, 64\] came") as raised:
        refusing(torch.ones(2, 3, 64, 64))
    assert "batch is 2, the bucket takes 1" in str(raised.value), "with all else that differs"


def test_a_module_that_was_cast_is_the_reason_why_its_inputs_do_not_fit() -> None:
    module = nn.Linear(4, 4).eval()
    refusing = make_compiled(
        lambda x, *_: x, [tensor("x", "batch", 4)], [{"batch": 2}], module=module, state=specs_of(module)
    )
    module.half()
    with pytest.raises(MissError) as raised:
        refusing(torch.ones(2, 4).half())
    text = str(raised.value)
    assert "module.weight: changed after the load" in text and "call module.to(torch.float32)" in text
    assert "convert it" not in text
    with pytest.raises(BindError, match=r"call module\.to\(torch\.float32\)"):
        refusing(torch.ones(2, 4))


def test_so_many_kinds_are_logged_a_minute_and_the_next_line_says_how_many_were_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("aotc.runtime.stats.time.monotonic", lambda: now[0])
    compiled = doubling(on_miss=lambda error, *args: None)
    with caplog.at_level(logging.DEBUG, logger="aotc"):
        for size in range(40, 40 + LOGGED_A_MINUTE + 7):
            compiled(torch.ones(size, 2))
        assert len(caplog.records) == LOGGED_A_MINUTE
        now[0] += 60
        compiled(torch.ones(99, 2))
    assert len(caplog.records) == LOGGED_A_MINUTE + 1
    assert "7 other kinds were not logged" in caplog.records[-1].getMessage()
    assert len(compiled.stats().miss_kinds) == LOGGED_A_MINUTE + 8


def test_an_eager_miss_of_a_known_kind_is_not_explained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = doubling(module=nn.Identity().eval(), on_miss="eager")
    explained: list[Any] = []
    explain = misses.explain_call
    monkeypatch.setattr(misses, "explain_call", lambda *args: explained.append(args) or explain(*args))
    for size in (9, 10, 9, 10, 9):
        assert compiled(torch.ones(size, 2)).shape == (size, 2)
    assert len(explained) == 2
    assert list(compiled.stats().miss_kinds.values()) == [3, 2]


@pytest.mark.parametrize("error", [AttributeError, IndexError, TypeError, RuntimeError, ValueError, KeyError])
@pytest.mark.parametrize("place", ["bind", "sizes", "plan", "guards"])
def test_an_error_within_the_call_itself_is_raised_and_no_miss(
    place: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = doubling(module=nn.Identity().eval(), on_miss="eager")

    def fail(*_: Any) -> Any:
        raise error("a mistake of ours")

    owner, name = {
        "bind": (compiled, "_bind"),
        "sizes": (compiled._dispatcher.dims, "read"),
        "plan": (compiled._dispatcher, "plan"),
        "guards": (compiled._guards, "hold"),
    }[place]
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(error, match="a mistake of ours"):
        compiled(torch.ones(4, 2))
    assert compiled.stats().misses == 0


def test_of_calls_that_run_the_first_of_each_sizes_is_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    compiled = doubling()
    with caplog.at_level(logging.DEBUG, logger="aotc"):
        for size in (3, 3, 4, 3):
            compiled(torch.ones(size, 2))
    assert [record.getMessage() for record in caplog.records] == [
        "handmade: seq=3 runs in seq=4 (padded)",
        "handmade: seq=4 runs in seq=4 (exact)",
    ]
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


# -- stats ------------------------------------------------------------------------------------------------------------


def test_calls_and_padding_waste_are_counted_by_bucket() -> None:
    compiled = doubling()
    for size in (4, 3, 1, 8, 20):
        compiled(torch.ones(size, 2))
    stats = compiled.stats()
    four, eight, ranged = (stats.buckets[name] for name in compiled.buckets)
    assert (four.calls, four.padded_calls, four.request_elements, four.run_elements) == (3, 2, 16, 24)
    assert four.padding_waste == pytest.approx(1 / 3)
    assert (eight.calls, eight.padded_calls, eight.padding_waste) == (1, 0, 0.0)
    assert (ranged.calls, ranged.request_elements, ranged.run_elements) == (1, 40, 40)
    assert stats.calls == 5


def test_misses_are_counted_by_what_came() -> None:
    compiled = doubling(on_miss=lambda error, *args: None)
    for size in (9, 9, 10):
        compiled(torch.ones(size, 2))
    stats = compiled.stats()
    assert stats.misses == 3
    assert sorted(stats.miss_kinds.values()) == [1, 2]
    assert any("seq is 9" in kind for kind in stats.miss_kinds)


def test_kinds_of_misses_are_bounded_and_misses_counted_beyond() -> None:
    compiled = doubling(on_miss=lambda error, *args: None)
    for size in range(40, 40 + KEPT_MISSES + 5):
        count_miss(compiled._counters, size, lambda size=size: str(size))
    stats = compiled.stats()
    assert (stats.misses, len(stats.miss_kinds)) == (KEPT_MISSES + 5, KEPT_MISSES)


class Secret:
    """An argument whose text may not be shown, or cannot be made."""

    def __repr__(self) -> str:
        raise RuntimeError("a secret")


class Texts(str):
    def __repr__(self) -> str:
        return "a secret"


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(
    ("value", "shown", "logged"),
    [
        (Secret(), "Secret", "Secret"),
        ({Secret(): 1, "b" * 100: 2}, f"a dict of Secret, {'b' * 60}", "a dict of 2"),
        (dict.fromkeys("abcdefghijk"), "a dict of a, b, c, d, e, f, g, h and 3 more", "a dict of 11"),
        (Texts("x"), "Texts", "Texts"),
        (10**5000, "int", "int"),
        (b"a secret", "bytes", "bytes"),
        ("t" * 61, f"str '{'t' * 60}'…", "str"),
        (3.5, "float 3.5", "float"),
        (7, "int 7", "int"),
    ],
    ids=["object", "names", "many", "texts", "large", "bytes", "long", "float", "int"],
)
def test_a_miss_shows_numbers_and_short_texts_and_of_other_arguments_the_type_and_the_log_types_alone(
    value: Any, shown: str, logged: str, constant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    leaf = ConstantLeaf("x", "other") if constant else tensor("x", 2)
    compiled = make_compiled(lambda *_: torch.ones(2), [leaf])
    with caplog.at_level(logging.WARNING, logger="aotc"), pytest.raises(MissError) as caught:
        compiled(value)
    assert f"{shown} came" in str(caught.value)
    for text in (caplog.text, *compiled.stats().miss_kinds):
        assert f" {logged} came" in text
    for text in (str(caught.value), caplog.text, *compiled.stats().miss_kinds):
        assert "secret" not in text


def test_a_snapshot_stays_as_it_was_and_the_counters_are_flat_and_monotonic() -> None:
    compiled = doubling()
    compiled(torch.ones(3, 2))
    before = compiled.stats()
    compiled(torch.ones(3, 2))
    after = compiled.stats()
    assert (before.calls, after.calls) == (1, 2)
    assert before.counters() == {
        "aotc_calls_total": 1,
        "aotc_misses_total": 0,
        "aotc_errors_total": 0,
        "aotc_contiguous_copies_total": 0,
        "aotc_padded_calls_total": 1,
        "aotc_request_elements_total": 6,
        "aotc_run_elements_total": 8,
    }
    assert all(after.counters()[name] >= value for name, value in before.counters().items())


def test_a_call_that_raises_is_counted_by_its_kind_and_not_as_one_that_ran() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] > 1:
            raise LibraryError("the library failed: index out of range")
        if x[0, 0] < 0:
            raise KeyboardInterrupt
        return x * 2

    compiled = doubling(fail)
    for value, error in ((1.0, None), (5.0, LibraryError), (7.0, LibraryError), (-1.0, KeyboardInterrupt)):
        with pytest.raises(error) if error else nullcontext():
            compiled(torch.full((3, 2), value))
    stats = compiled.stats()
    assert (stats.calls, stats.misses, stats.errors) == (1, 0, {"LibraryError": 2, "KeyboardInterrupt": 1})
    assert sum(bucket.calls for bucket in stats.buckets.values()) == 1
    assert stats.counters()["aotc_errors_total"] == 3


def test_a_signal_handler_calls_and_reads_while_its_thread_counts() -> None:
    compiled, seen = doubling(), []

    def handle(*_: object) -> None:
        seen.append(compiled(torch.ones(3, 2)).tolist())
        with pytest.raises(MissError):
            compiled(torch.ones(99, 2))
        seen.append(compiled.stats().counters()["aotc_misses_total"])

    def give_up(*_: object) -> None:
        raise TimeoutError

    before = {
        number: signal.signal(number, act) for number, act in ((signal.SIGUSR1, handle), (signal.SIGALRM, give_up))
    }
    signal.alarm(60)
    try:
        with compiled._counters.lock:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.alarm(0)
        for number, act in before.items():
            signal.signal(number, act)
    assert seen == [[[2, 2]] * 3, 1]
    assert compiled.stats().calls == 1


def test_eight_threads_lose_no_count_and_get_their_own_answers() -> None:
    compiled = doubling(on_miss=lambda error, *args: "miss")
    rounds, sizes = 60, [1, 3, 4, 6, 8, 9, 20, 33]

    def worker(offset: int) -> None:
        for index in range(rounds):
            size = sizes[(index + offset) % len(sizes)]
            x = torch.full((size, 2), float(offset * rounds + index))
            result = compiled(x)
            if size in (9, 33):
                assert result == "miss"
            else:
                assert torch.equal(result, x * 2)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(worker, range(8)))
    stats = compiled.stats()
    assert stats.calls + stats.misses == 8 * rounds
    assert sum(bucket.calls for bucket in stats.buckets.values()) == stats.calls
    assert sum(stats.miss_kinds.values()) == stats.misses == 8 * rounds // 4


def test_no_lock_is_held_while_the_library_runs() -> None:
    together = threading.Barrier(4, timeout=20)

    def meet(x: torch.Tensor) -> torch.Tensor:
        together.wait()
        return x

    compiled = make_compiled(meet, [tensor("x", 2)])
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(compiled, [torch.ones(2)] * 4))) == 4


# -- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "kind", "bucket"),
    [(4, "exact", "seq=4"), (3, "padded", "seq=4"), (20, "range", "seq=16..32"), (9, "miss", "")],
)
def test_explain_says_what_would_run_without_running_or_counting(size: int, kind: str, bucket: str) -> None:
    compiled = doubling()
    explained = compiled.explain(torch.ones(size, 2))
    assert (explained.kind, explained.bucket) == (kind, bucket)
    assert explained.pads == (("x.shape[0]: 3 → 4",) if kind == "padded" else ())
    assert set(explained.rejected) == set(compiled.buckets) - {bucket}
    assert not any(library.seen for library in compiled.libraries)
    assert (compiled.stats().calls, compiled.stats().misses) == (0, 0)


def test_explain_prints_a_line_for_each_fact() -> None:
    assert str(doubling().explain(torch.ones(3, 2))).splitlines() == [
        "padded: bucket seq=4",
        "  pads x.shape[0]: 3 → 4",
        "  - not bucket seq=8: it takes these sizes too",
        "  - not bucket seq=16..32: seq is 3, the bucket takes 16..32",
    ]
    assert str(doubling().explain(torch.ones(9, 2))).splitlines() == [
        "miss",
        "  - not bucket seq=8: seq is 9, the bucket takes up to 8",
        "  - not bucket seq=4: seq is 9, the bucket takes up to 4",
        "  - not bucket seq=16..32: seq is 9, the bucket takes 16..32",
    ]


def test_explain_names_the_bucket_that_a_guard_kept_a_call_out_of() -> None:
    explained = doubling().explain(torch.ones(3, 2, dtype=torch.float64))
    first, reason, hint, *_ = str(explained).splitlines()
    assert (first, reason.partition(":")[0], hint.partition(":")[0]) == (
        "miss: by its sizes bucket seq=4",
        "  - x",
        "    hint",
    )
    assert (explained.kind, explained.bucket) == ("miss", "seq=4")
    assert [issue.actual for issue in explained.reasons] == ["float64"]


def test_explain_raises_type_error_where_the_call_does_not_bind() -> None:
    with pytest.raises(TypeError):
        doubling().explain()


# -- cost -------------------------------------------------------------------------------------------------------------


def test_a_call_costs_the_same_with_a_thousand_buckets_as_with_one() -> None:
    """Interleaved, the least of many rounds each: what other processes take from this one is not in it."""

    def made(count: int) -> Any:
        return make_compiled(
            lambda x: x, [tensor("x", "seq", pad={"seq": PadRule()})], [{"seq": 8 * (i + 1)} for i in range(count)]
        )

    x, calls = torch.ones(8), 100
    one, many = made(1), made(1000)

    def measure(compiled: Any) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            compiled(x)
        return time.perf_counter() - begin

    best = {id(one): float("inf"), id(many): float("inf")}
    for _ in range(200):
        for compiled in (one, many):
            best[id(compiled)] = min(best[id(compiled)], measure(compiled))
            compiled.libraries[0].seen.clear()
        if best[id(many)] <= 1.2 * best[id(one)]:
            break
    assert best[id(many)] <= 1.5 * best[id(one)]
