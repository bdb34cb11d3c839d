"""The file of a gate, and each of its limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aotc.errors import ManifestError
from aotc.manifest.types import ModelSpec
from aotc.records import Parameter, Signature, SizeRange, TensorLeaf
from aotc.store.layout import oci
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.store import Store
from aotc.tools.bench.latency_comparison import LatencyRatio, compare
from aotc.tools.bench.subject import BenchSubject
from aotc.tools.gate.gate_document import CoverageLimit, ErrorLimit, Gate, LatencyLimit, StartupLimit, read_gate
from aotc.tools.gate.gate_inputs import check_inputs
from aotc.tools.gate.limits import baseline_of, in_words, is_kept, limits_of
from aotc.tools.gate.markdown import markdown
from aotc.verification import Limit
from aotc.verify.verdicts import VerifyReport, decode_reports

FIRST, SECOND = ("sha256:" + digit * 64 for digit in "12")


def subject(digest: str = FIRST) -> BenchSubject:
    spec = ModelSpec(name="small", factory="m:f", inputs={}, buckets=({"batch": 4}, {"batch": SizeRange(8, 16)}))
    signature = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", ("batch", 4)),))
    return BenchSubject(spec, Path(), f"store#small@{digest}", digest, "cpu:x86-64-v3", signature)


def report(error: float | None, allowed: float | None = 1e-3, status: Any = "ok") -> VerifyReport:
    return VerifyReport("small", "batch=4", "cpu:x86-64-v3", "batch=4", status, error, 0.0, allowed, bundle=FIRST)


def found(gate: Gate, *reports: VerifyReport, folder: Path = Path()) -> list[Limit]:
    return limits_of(gate, subject(), reports, "store", folder)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_gate_is_read_with_shares_in_per_cent(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(
        "version: 1\n"
        "numbers: {error: 1.0e-3, of_allowed: 50%}\n"
        "latency: {worse: 5%, baseline: small:v1}\n"
        "startup: {load: 0.5, first_output: 3}\n"
        "coverage: {trace: trace.jsonl, share: 99%}\n"
    )
    assert read_gate(path) == Gate(
        1,
        ErrorLimit(1e-3, 0.5),
        LatencyLimit(0.05, "small:v1"),
        StartupLimit(0.5, 3.0),
        CoverageLimit("trace.jsonl", 0.99),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: 2\n", "gate.yaml:1: `version` is 2; expected 1"),
        ("version: 1\n\nnumber: {error: 1}\n", "gate.yaml:3: unknown key `number`"),
        ("version: 1\nlatency: {}\n", "gate.yaml:2: `worse` is missing in `latency`"),
        ("version: 1\nlatency: {wose: 1}\n", "did you mean `worse`?"),
        ("version: 1\nlatency: {worse: -1%}\n", '`latency.worse` is "-1%"; expected a number from 0 on'),
        ("version: 1\nlatency: {worse: 5, baseline: 1}\n", "`latency.baseline` is 1; expected text"),
        ("version: 1\ncoverage: {trace: t, share: 101%}\n", '`coverage.share` is "101%"; expected a share'),
        ("version: 1\nnumbers: {error: yes}\n", "`numbers.error` is true; expected a number"),
        ("version: 1\nnumbers: 3\n", "`numbers` is 3; expected a mapping"),
        ("version: 1\nstartup: {load: .nan}\n", "`.nan` is not a finite number"),
        ("version: [\n", "while parsing"),
        ("", "the gate is empty"),
        ("- 1\n", "the gate is [1]"),
    ],
)
def test_a_file_that_is_no_gate_is_refused_before_anything_runs(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(text)
    with pytest.raises(ManifestError) as caught:
        read_gate(path)
    assert said in str(caught.value) and str(path) in str(caught.value) and len(caught.value.issues) == 1
    with pytest.raises(ManifestError, match="cannot be read"):
        read_gate(tmp_path / "absent.yaml")


def test_all_mistakes_of_a_gate_are_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text("number: {error: 1}\nlatency: {worse: x}\n")
    with pytest.raises(ManifestError) as caught:
        read_gate(path)
    assert len(caught.value.issues) == 3  # and no version
    assert "hint: did you mean `numbers`?" in str(caught.value)
    path.write_text("version: 1\nnumbers: {error: 1e-3, of_allowed: null}\n")
    assert read_gate(path) == Gate(1, ErrorLimit(1e-3))


def test_what_a_gate_names_is_looked_for_before_anything_runs(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    gate = Gate(1, latency=LatencyLimit(0.1, "nosuch"), coverage=CoverageLimit("none.jsonl"))
    with pytest.raises(ManifestError) as caught:
        check_inputs(gate, tmp_path / "gate.yaml", str(store.path), ["small"])
    coverage, latency = caught.value.issues
    assert "`coverage.trace` is none.jsonl" in coverage.message and "No such file" in coverage.message
    assert latency.message.startswith("`latency.baseline` is nosuch: ") and "MODEL:TAG" in latency.hint
    assert "small:nosuch" in latency.message  # a tag alone is one of the model's
    with pytest.raises(ManifestError, match="last tag"):
        check_inputs(Gate(1, latency=LatencyLimit(0.1)), tmp_path / "gate.yaml", "oci://host/small", [""])


# -- the limits -------------------------------------------------------------------------------------------------------


def test_numbers_are_the_worst_over_all_comparisons() -> None:
    gate = Gate(1, numbers=ErrorLimit(error=2e-4, of_allowed=0.25))
    kept = found(gate, report(1e-4), report(2e-4))
    assert [(one.found, one.passed) for one in kept] == [("2.00e-04", True), ("20%", True)]
    assert [one.passed for one in found(gate, report(1e-4), report(3e-4))] == [False, False]
    assert [one.passed for one in found(gate, report(None, status="could not run"))] == [False, False]


def test_coverage_is_by_the_loader_s_rule_and_names_the_most_frequent_miss(tmp_path: Path) -> None:
    lines = [{"batch": 4, "count": 70}, {"batch": 9, "count": 20}, {"batch": 5, "count": 8}, {"batch": 17, "count": 2}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (limit,) = found(Gate(1, coverage=CoverageLimit("trace.jsonl", 0.9)), folder=tmp_path)
    assert (limit.passed, limit.found) == (True, "90.00% of 100 calls; the most frequent miss is batch 5")
    (limit,) = found(Gate(1, coverage=CoverageLimit("trace.jsonl", 0.91)), folder=tmp_path)
    assert not limit.passed
    with pytest.raises(ManifestError, match=r"absent\.jsonl cannot be read"):
        found(Gate(1, coverage=CoverageLimit("absent.jsonl")), folder=tmp_path)


def test_what_was_not_compared_is_neither_kept_nor_missed() -> None:
    gate = Gate(1, numbers=ErrorLimit(error=2e-4))
    (limit,) = found(gate, report(None, status="could not run"))
    assert (limit.verdict, limit.passed) == ("unmeasured", False)
    first = Limit("latency", "at most 5%", "there is no earlier release", True, measured=False)
    assert first.verdict == "-"


def compared(longer: float, floor: float = 1.0, spread: float = 0.0) -> LatencyRatio:
    """A release whose calls take so much longer than the baseline's, in 15 rounds."""
    own = [1 + longer + spread * (-1) ** number for number in range(15)]
    return compare("the baseline", own, [1.0] * 15, floor)


@pytest.mark.parametrize(
    ("longer", "floor", "spread", "kept"),
    [
        (-0.10, 1.0, 0.0, True),
        (0.04, 1.0, 0.0, True),
        (0.06, 1.0, 0.0, False),
        (0.06, 1.08, 0.0, True),  # two equal processes differ by more
        (0.02, 1.0, 0.03, True),  # the interval holds 1
        (0.06, 1.0, 0.20, None),  # and a slowdown of 26 %
        (0.004, 1068.0, 0.0, None),  # two equal processes differ by far more
        (1.0, 1.2, 0.0, False),
        (-0.5, 1.2, 0.0, True),
    ],
)
def test_a_release_that_is_slower_beyond_the_limit_and_beyond_noise_is_refused(
    longer: float, floor: float, spread: float, kept: bool | None
) -> None:
    assert is_kept(compared(longer, floor, spread), 0.05) is kept


def test_the_latency_is_said_with_its_interval() -> None:
    assert in_words(compared(0.06, 1.02)) == "+6.0% (+6.0% to +6.0%; noise is ±2.0%)"


def test_the_baseline_is_the_tag_set_last_that_names_another_bundle(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")

    def set_tag(tag: str, bundle: bytes) -> str:
        blob = store.blobs.put_bytes(bundle)
        store.set_tag("small", tag, Descriptor(oci.INDEX, blob.digest, blob.size))
        return blob.digest

    digest = set_tag("v1", b"one")
    assert baseline_of("last", subject(digest), str(store.path)) is None
    set_tag("v2", b"two")
    newest = set_tag("v3", b"three")
    set_tag("v4", b"three")
    assert baseline_of("last", subject(newest), str(store.path)) == "small:v2"
    for asked in ("v1", "small:v1"):
        assert baseline_of(asked, subject(newest), str(store.path)) == "small:v1"
    assert baseline_of("v1", subject(newest), "oci://host/small") == "oci://host/small:v1"
    with pytest.raises(ManifestError, match="last tag"):
        baseline_of("last", subject(newest), "oci://host/small")


# -- what is written --------------------------------------------------------------------------------------------------


def test_the_report_for_a_pull_request_says_what_is_not_kept_and_what_differs() -> None:
    limits = [Limit("load", "at most 1 s", "0.2 s", True), Limit("latency | x", "at most 5%", "+9%", False)]
    unmeasured = Limit("latency", "at most 5%", "+0%; noise is ±900%", False, measured=False)
    nothing = Limit("latency", "at most 5%", "no earlier release", True, measured=False)
    text = markdown([report(1e-4)], {"small": [unmeasured, nothing]}, "a machine")
    assert text.startswith("## aotc verify: unmeasured\n")
    assert "±900% | ❔ unmeasured |" in text and "no earlier release | - |" in text
    wrong = VerifyReport("small", "batch=4", "cpu", "batch=4", "failed", detail="off by 2\nmore", bundle=FIRST)
    text = markdown([report(1e-4), wrong], {"small": limits}, "a machine")
    assert text.startswith("## aotc verify: failed\n\n1 of 2 comparisons with eager passed, on a machine.\n")
    assert "| load | at most 1 s | 0.2 s | ✅ |" in text and "| latency \\| x | at most 5% | +9% | ❌ |" in text
    assert "| small batch=4 cpu | batch=4 | failed | off by 2 |" in text and f"`small@{FIRST}`" in text
    assert markdown([report(1e-4)], {}, "a machine").startswith("## aotc verify: passed\n")


def test_the_document_with_limits_is_read_as_the_one_without() -> None:
    plain = json.dumps([{"model": "small", "bucket": "b", "target": "t", "sizes": "-", "status": "ok"}])
    with_limits = f'{{"reports": {plain}, "limits": {{}}}}'
    assert decode_reports(plain.encode(), "f") == decode_reports(with_limits.encode(), "f")
