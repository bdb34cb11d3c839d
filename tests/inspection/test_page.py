"""`aotc inspect --html`: what the page says, and that nothing in an artifact becomes a part of the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from sample_builds import CREATED, kernels, make_artifact, make_variant, picks, put_picks, put_report, sample_store
from small_artifact import publish_unchecked

from aotc.cli import main
from aotc.picks import Candidate, Pick
from aotc.provenance import CallTimes, Kernel, Spread
from aotc.records import OperatorNeed, StateSpec
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import put_unit
from aotc.store.reference import Reference
from aotc.tools.inspection.overview import Overview, overviews
from aotc.tools.inspection.races import CLOSE, LONGEST_BAR, make_race
from aotc.verify.verdicts import VerifyReport

replace = msgspec.structs.replace

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[2J\u202e"


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def inspect(store: Store, page: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["inspect", "gpt", "--store", str(store.path), "--html", str(page), *arguments])


def page_of(store: Store, folder: Path) -> str:
    page = folder / "page.html"
    result = inspect(store, page)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"wrote {page}  ")
    return page.read_text(encoding="utf-8")


def overview_of(store: Store) -> Overview:
    (view,) = overviews(store, read_bundle(store, Reference(None, "gpt", tag="latest")))
    return view


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return sample_store(tmp_path / "store")


# -- what it says -----------------------------------------------------------------------------------------------------


def test_launches_are_counted_against_the_operators_of_the_model(store: Store, tmp_path: Path) -> None:
    (launches,) = overview_of(store).launches
    assert (launches.operators, launches.generated, launches.library, launches.total) == (18, 3, 5, 8)
    assert launches.buckets == ("batch=1,seq=128", "batch=2,seq=128")
    text = re.sub(r"\s+", " ", Tags(page_of(store, tmp_path)).text)
    assert (
        "18 operators of the model run as 8 launches per call: 3 of generated kernels, 5 of library functions" in text
    )


def test_buckets_that_launch_otherwise_are_told_apart(store: Store) -> None:
    first, second = overview_of(store).artifact.variants
    fewer = replace(second, report=put_report(store, kernels(256)[1:], operators=16))
    publish(store, "gpt", "latest", [make_artifact((first, fewer))], created=CREATED)
    view = overview_of(store)
    assert [(one.buckets, one.total) for one in view.launches] == [(("batch=1,seq=128",), 8), (("batch=2,seq=128",), 6)]
    (norm,) = (kernel for kernel in view.kernels if "native_layer_norm" in kernel.operators)
    assert norm.buckets == ("batch=1,seq=128",)


def test_each_operator_leads_to_the_kernels_that_do_it(store: Store) -> None:
    fates = {fate.operator: [kernel.name for kernel in fate.kernels] for fate in overview_of(store).fates}
    gelu = "triton_poi_fused_addmm_gelu_view_2"
    assert fates["gelu"] == [gelu]
    assert fates["addmm"] == [gelu, "addmm_out"]


def test_a_kernel_of_many_buckets_is_shown_once_and_then_only_what_differs(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "store", buckets=64)
    view = overview_of(store)
    assert len(view.kernels) == 4
    for kernel in view.kernels[:2]:
        whole, *others = kernel.sources
        assert not whole.is_diff and whole.text.startswith("# AOT ID") and "'''" not in whole.text
        assert len(others) == 63 and all(other.is_diff and len(other.text) < 700 for other in others)
        assert "+    xnumel = " in others[0].text
    page = page_of(store, tmp_path)
    assert page.count("import triton.language") == 0 and page.count("triton.language") == 2
    assert len(page) < 2_000_000


def test_a_source_that_is_wholly_different_is_shown_in_full(store: Store) -> None:
    first, second = overview_of(store).artifact.variants
    gelu = kernels(128)[1]
    other = replace(gelu, source="\n".join(f"another_line_{number}()" for number in range(40)))
    changed = replace(second, report=put_report(store, (other,)))
    publish(store, "gpt", "latest", [make_artifact((first, changed))], created=CREATED)
    (shown,) = (kernel for kernel in overview_of(store).kernels if kernel.name == gelu.name)
    assert [source.is_diff for source in shown.sources] == [False, False]


def test_every_source_can_be_read_on_the_page(store: Store, tmp_path: Path) -> None:
    text = Tags(page_of(store, tmp_path)).text
    for kernel in overview_of(store).kernels[:2]:
        assert kernel.sources[0].text.rstrip() in text


def test_cpp_sources_are_shown_too(store: Store, tmp_path: Path) -> None:
    source = '#include <cmath>\nextern "C" void cpp_fused_0(const float* a, float* b)\n{\n    // b < a && a > 0\n}\n'
    variant = make_variant(
        store, {}, 1, report=put_report(store, (Kernel("cpp_fused_0", "cpp", 1, ("relu",), source),))
    )
    publish(store, "gpt", "latest", [make_artifact((variant,))], created=CREATED)
    assert source.strip() in Tags(page_of(store, tmp_path)).text


def test_guards_are_on_the_page(store: Store, tmp_path: Path) -> None:
    text = re.sub(r"\s+", " ", Tags(page_of(store, tmp_path)).text)
    for guard in (
        "contiguous int64 [batch, seq]",
        "seq with 0",
        "equal to True",
        "matmul precisionhigh",
        "NVIDIA H200",
    ):
        assert guard in text


def test_what_must_be_imported_first_is_said_once_as_text_json_and_on_the_page(store: Store, tmp_path: Path) -> None:
    needs = (OperatorNeed("acme::scale", "acme.ops"), OperatorNeed("fast::twice", "fast", "libfast.so"))
    first, second = (replace(variant, operators=needs) for variant in overview_of(store).artifact.variants)
    publish(store, "gpt", "latest", [make_artifact((first, second))], created=CREATED)
    command = ["inspect", "gpt", "--store", str(store.path)]
    shown = CliRunner().invoke(main, command).stdout
    assert shown.count("acme::scale: import acme.ops first\n") == 1
    assert shown.count("fast::twice: import fast first, which loads libfast.so\n") == 1
    (artifact,) = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)["artifacts"]
    assert [(need["name"], need["module"]) for need in artifact["operators"]] == [
        ("acme::scale", "acme.ops"),
        ("fast::twice", "fast"),
    ]
    text = re.sub(r"\s+", " ", Tags(page_of(store, tmp_path)).text)
    assert text.count("Operator acme::scaleimport acme.ops first") == 1
    assert "Operator fast::twiceimport fast first, which loads libfast.so" in text


def test_an_artifact_without_report_picks_or_units_says_so(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "bare")
    variant = make_variant(store, {}, 1, report=None, picks=None, launch=None)
    publish(store, "gpt", "latest", [make_artifact((variant,))], created=CREATED)
    text = Tags(page_of(store, tmp_path)).text
    assert "No picks are recorded in this artifact." in text
    assert "No build times: the units are not in this store." in text
    assert "Launches per call" not in text


def test_a_build_that_had_nothing_to_decide_says_so(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "bare")
    variant = make_variant(store, {}, 1, picks=put_picks(store, {}, ()), launch=None)
    publish(store, "gpt", "latest", [make_artifact((variant,))], created=CREATED)
    text = Tags(page_of(store, tmp_path)).text
    assert "There was nothing to decide." in text and "No picks are recorded" not in text


def test_every_target_has_its_part(store: Store, tmp_path: Path) -> None:
    artifact = overview_of(store).artifact
    publish(store, "gpt", "latest", [artifact, replace(artifact, target="cpu:x86-64-v3")], created=CREATED)
    page = Tags(page_of(store, tmp_path))
    identities = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    links = {str(link["href"]).removeprefix("#") for link in page.named("a")}
    assert links <= set(identities) and {"t0", "t1", "t1-kernels"} <= links


# -- races ------------------------------------------------------------------------------------------------------------


def race(*times: float | None, chosen: int = 0) -> Any:
    candidates = tuple(Candidate(f"c{index}", {}, ms) for index, ms in enumerate(times))
    return make_race(Pick("operator", "mm", candidates, chosen))


def test_bars_are_as_long_as_the_times_and_the_fastest_comes_first() -> None:
    bars = race(3.0, 1.0, None, 2.0, chosen=1).bars
    assert [(bar.name, bar.width, bar.ratio) for bar in bars] == [
        ("c1", 1 / 3, 1.0),
        ("c3", 2 / 3, 2.0),
        ("c0", 1.0, 3.0),
        ("c2", 0.0, None),
    ]
    assert [bar.chosen for bar in bars] == [True, False, False, False]


def test_one_slow_candidate_does_not_flatten_the_others() -> None:
    fast, _, slow = race(1.0, 2.0, 1000.0).bars
    assert fast.width == 1 / LONGEST_BAR and not fast.clipped
    assert slow.width == 1.0 and slow.clipped and slow.ms == 1000.0


@pytest.mark.parametrize(
    ("times", "chosen", "verdict", "close"),
    [
        ((1.0, 1.5), 0, "50.0% ahead of c1", False),
        ((1.0, 1.0 + CLOSE / 2), 0, "1.5% ahead of c1: so close that another build may choose otherwise", True),
        ((1.0, 2.0), 1, "although c0 takes 50.0% less time", False),
        ((1.0,), 0, "the only candidate with a time", False),
        ((1.0, None), 0, "the only candidate with a time", False),
        ((None,), 0, "taken without a measurement", False),
    ],
)
def test_the_verdict_says_by_how_much(times: tuple[float | None, ...], chosen: int, verdict: str, close: bool) -> None:
    shown = race(*times, chosen=chosen)
    assert (shown.verdict, shown.close) == (verdict, close)


def test_a_lead_within_the_winner_s_own_spread_is_not_decided_by_time() -> None:
    """Half of the winner's calls took 1.3 ms or longer: as long as the runner-up's fastest."""
    winner = Candidate("mm", {}, 1.0, median_ms=1.3, calls=30)
    for other_ms, decided in ((1.25, False), (1.35, True)):
        shown = make_race(Pick("operator", "mm", (winner, Candidate("other", {}, other_ms, other_ms, 30))))
        assert shown.close != decided and ("not decided by time" in shown.verdict) != decided
    (bar, _) = shown.bars
    assert (bar.width, bar.median_width) == (1 / 1.35, 1.3 / 1.35)


def test_a_race_on_a_busy_machine_is_marked_however_large_its_lead(store: Store, tmp_path: Path) -> None:
    """16 ms was the least time of seven calls, the median 27: something else had the cores."""
    quiet, disturbed = Candidate("mm", {}, 0.08, 0.083, 900), Candidate("gemm", {}, 16.0, 27.0, 7)
    first, *_ = overview_of(store).artifact.variants
    chosen = (Pick("operator", "mm", (quiet, disturbed)), Pick("operator", "addmm", (quiet, Candidate("a", {}, 0.2))))
    variant = replace(first, picks=put_picks(store, first.bucket, chosen), launch=None)
    publish(store, "gpt", "latest", [make_artifact((variant,))], created=CREATED)
    assert [race.pick.on_busy_machine for race in overview_of(store).races[0].races] == [True, False]
    text = re.sub(r"\s+", " ", Tags(page_of(store, tmp_path)).text)
    assert "ahead of gemm busy machine" in text and "ahead of a busy machine" not in text
    assert "median 27, 7 calls" in text
    shown = CliRunner().invoke(main, ["picks", "gpt", "--store", str(store.path)]).stdout
    assert shown.count("measured on a busy machine") == 1


def test_a_race_says_what_part_of_a_call_its_winner_takes() -> None:
    """Twelve uses of 0.01 ms in a call of 0.6 ms. More than a call is a wrong measurement, and not shown."""
    pick = Pick("operator", "mm", (Candidate("mm", {}, 0.01),), uses=12)
    assert make_race(pick, call_ms=0.6).share == pytest.approx(0.2)
    assert make_race(pick, call_ms=0.1).share is None and make_race(pick).share is None


def test_every_candidate_is_on_the_page_with_its_time(store: Store, tmp_path: Path) -> None:
    text = Tags(page_of(store, tmp_path)).text
    for pick in picks(128):
        for candidate in pick.candidates:
            assert ", ".join(f"{name}={value}" for name, value in sorted(candidate.config.items())) in text
            assert candidate.ms is None or f"{candidate.ms:.5g}" in text
    assert text.count("no time") == 2  # one template in each of two buckets


# -- times ------------------------------------------------------------------------------------------------------------


def test_each_bucket_has_the_time_of_a_call_compiled_and_in_eager(store: Store, tmp_path: Path) -> None:
    text = re.sub(r"\s+", " ", Tags(page_of(store, tmp_path)).text)
    assert text.count("0.6 msmedian 0.63 ms, 100 callsas a graph 0.605 ms") == 2
    assert text.count("1.2 msmedian 1.25 ms, 50 calls") == 2
    assert text.count("2 × as fast as eager") == 2


def test_the_time_of_a_call_is_in_the_text_and_in_json(store: Store) -> None:
    command = ["inspect", "gpt", "--store", str(store.path)]
    text = CliRunner().invoke(main, command).stdout
    assert text.count(", a call 0.6 ms, in eager 1.2 ms\n") == 2
    (artifact,) = json.loads(CliRunner().invoke(main, [*command, "--json"]).stdout)["artifacts"]
    assert [variant["times"]["eager"]["median_ms"] for variant in artifact["variants"]] == [1.25, 1.25]


@pytest.mark.parametrize(
    ("compiled", "eager", "shown"),
    [
        (Spread(1.0, 1.1, 30), Spread(3.0, 3.1, 30), "3 × as fast as eager"),
        (Spread(3.0, 3.1, 30), Spread(1.5, 1.6, 30), "eager is 2 × as fast"),
        (Spread(1.0, 1.1, 30), Spread(1.01, 1.1, 30), "no difference beyond the noise"),
        (Spread(1.0, 1.1, 30), None, "eager could not be run"),
        (Spread(1.0, 9.0, 30), Spread(2.0, 2.1, 30), "not compared busy machine"),
        (Spread(1.0, 1.1, 7), Spread(2.0, 2.1, 30), "not compared: only 7 calls timed"),
    ],
)
def test_compiled_and_eager_are_compared_in_words(
    store: Store, tmp_path: Path, compiled: Spread, eager: Spread | None, shown: str
) -> None:
    for bucket in overview_of(store).buckets:
        assert bucket.unit is not None
        put_unit(store, replace(bucket.unit, times=CallTimes(compiled, eager)))
    page = page_of(store, tmp_path)
    assert re.sub(r"\s+", " ", Tags(page).text).count(shown) == 2
    assert page.count('<svg width="100%" height="20"') == (0 if "not compared" in shown else 2)  # the bars of the times


def test_a_machine_that_was_busy_throughout_is_not_compared_and_the_size_within_a_range_is_named(
    store: Store, tmp_path: Path
) -> None:
    """Medians near the least times: only the wait for a CPU shows it."""
    (first, _) = overview_of(store).buckets
    assert first.unit is not None
    times = CallTimes(Spread(240.0, 245.0, 30), Spread(151.0, 152.0, 30), sizes={"seq": 64}, waited=0.5)
    put_unit(store, replace(first.unit, times=times))
    text = re.sub(r"\s+", " ", Tags(page_of(store, tmp_path)).text)
    assert "not compared busy machine" in text and "eager is" not in text
    assert "timed at seq=64" in text


def test_units_that_were_not_timed_say_so(store: Store, tmp_path: Path) -> None:
    (first, _) = overview_of(store).buckets
    assert first.unit is not None
    put_unit(store, replace(first.unit, times=None))
    text = Tags(page_of(store, tmp_path)).text
    assert (
        "No times per call for batch=1,seq=128: the units were built by a version of aotc that measured none." in text
    )


# -- verified ---------------------------------------------------------------------------------------------------------


def test_the_verdicts_of_aotc_verify_are_shown_of_this_bundle_alone(store: Store, tmp_path: Path) -> None:
    bundle = read_bundle(store, Reference(None, "gpt", tag="latest"))
    verdicts = [
        VerifyReport("gpt", "batch=1,seq=128", "cuda:sm_90", "batch=1", "ok", 2e-7, 1e-7, 3e-6, "", bundle.digest),
        VerifyReport(
            "gpt", "batch=2,seq=128", "cuda:sm_90", "batch=2", "failed", 0.5, 1e-7, 3e-6, "far off", bundle.digest
        ),
        VerifyReport(
            "gpt", "batch=1,seq=128", "cuda:sm_90", "batch=1", "crashed", detail="of another build", bundle="sha256:0"
        ),
    ]
    report = tmp_path / "verified.json"
    report.write_bytes(msgspec.json.encode(verdicts))
    assert inspect(store, tmp_path / "page.html", "--verified", str(report)).exit_code == 0
    text = re.sub(r"\s+", " ", Tags((tmp_path / "page.html").read_text()).text)
    assert "1 of 2 comparisons not ok" in text and "failedfar off" in text and "of another build" not in text
    report.write_bytes(msgspec.json.encode(verdicts[2:]))
    refused = inspect(store, tmp_path / "page.html", "--verified", str(report))
    assert refused.exit_code == 2 and bundle.digest in refused.stderr and "sha256:0" in refused.stderr
    report.write_text("{}")
    assert "is not a report of `aotc verify`" in inspect(store, tmp_path / "p", "--verified", str(report)).stderr


def test_a_page_without_verdicts_says_how_to_get_them(store: Store, tmp_path: Path) -> None:
    assert "aotc verify REF --json > verified.json" in Tags(page_of(store, tmp_path)).text
    alone = CliRunner().invoke(
        main, ["inspect", "gpt", "--store", str(store.path), "--verified", str(store.path / "index.json")]
    )
    assert alone.exit_code == 2 and "--verified goes with --html" in alone.stderr


# -- when it was built ------------------------------------------------------------------------------------------------


def test_units_are_drawn_when_they_were_built(store: Store) -> None:
    (session,) = overview_of(store).sessions
    assert session.began == "2026-01-02T03:00:10Z" and session.seconds == 50.0
    assert [(unit.bucket, unit.start, unit.seconds) for unit in session.units] == [
        ("batch=1,seq=128", 0.0, 20.0),
        ("batch=2,seq=128", 29.0, 21.0),
    ]


def test_a_long_pause_starts_a_new_timeline(store: Store) -> None:
    (first, *_) = overview_of(store).buckets
    assert first.unit is not None
    put_unit(store, replace(first.unit, created="2026-01-09T03:00:20Z"))
    sessions = overview_of(store).sessions
    assert [session.began for session in sessions] == ["2026-01-02T03:00:39Z", "2026-01-09T03:00:00Z"]
    assert [session.seconds for session in sessions] == [21.0, 20.0]


def test_stages_stand_in_the_order_in_which_they_began(store: Store, tmp_path: Path) -> None:
    stages = overview_of(store).sessions[0].units[1].stages
    assert [(stage.name, stage.seconds) for stage in stages] == [
        ("import", 2.5),
        ("model", 1.0),
        ("export", 2.5),
        ("compile", 11.5),
        ("smoke run", 1.5),
        ("store", 1.5),
    ]
    assert "compile 11.5 s" in Tags(page_of(store, tmp_path)).text


def test_a_build_without_stages_is_drawn_as_one_bar(store: Store, tmp_path: Path) -> None:
    for bucket in overview_of(store).buckets:
        assert bucket.unit is not None
        put_unit(store, replace(bucket.unit, stages={}))
    assert [unit.stages for unit in overview_of(store).sessions[0].units] == [(), ()]
    assert "compile 11.5 s" not in Tags(page_of(store, tmp_path)).text


# -- safety -----------------------------------------------------------------------------------------------------------


def hostile_store(folder: Path) -> Store:
    """Every text that the record leaves free is markup."""
    store = Store.create(folder)
    kernel = Kernel(HOSTILE, "triton", 1, (HOSTILE, "relu"), f"# {HOSTILE}\nx = '{HOSTILE}'\n")
    odd = Kernel("odd", HOSTILE, 1, ("relu",), HOSTILE)
    pick = Pick("operator", HOSTILE, (Candidate(HOSTILE, {HOSTILE: HOSTILE}, 1.0),), inputs=(HOSTILE,), output=HOSTILE)
    variant = make_variant(
        store,
        {HOSTILE: 1},
        1,
        conditions=(HOSTILE,),
        report=put_report(store, (kernel, odd)),
        picks=put_picks(store, {}, (pick,)),
    )
    whole = make_artifact((variant,))
    artifact = replace(
        whole,
        aotc=HOSTILE,
        module=replace(whole.module, class_name=HOSTILE, sources={HOSTILE: HOSTILE}),
        environment=replace(whole.environment, gpu=HOSTILE, torch=HOSTILE, libc=HOSTILE),
        state=(StateSpec(HOSTILE, HOSTILE, (1,), (1,), aliases=(HOSTILE,)),),
        options={HOSTILE: HOSTILE, "list": [HOSTILE]},
        signature=replace(
            whole.signature, leaves=(replace(whole.signature.leaves[0], path=HOSTILE, shape=(HOSTILE,)),)
        ),
    )
    publish_unchecked(store, "gpt", "latest", [artifact], created=CREATED, annotations={HOSTILE: HOSTILE})
    return store


def test_no_text_of_an_artifact_becomes_markup(tmp_path: Path) -> None:
    page = page_of(hostile_store(tmp_path / "store"), tmp_path)
    parsed = Tags(page)
    assert not {"script", "img", "iframe", "object", "form", "base"} & {tag for tag, _ in parsed.tags}
    assert not [name for _, attributes in parsed.tags for name in attributes if name.startswith("on")]
    assert not [name for _, attributes in parsed.tags for name in attributes if name in ("style", "src")]
    assert "\x1b" not in page and "\u202e" not in page
    assert parsed.text.count("<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\\u001b[2J\\u202e") > 20


def test_the_page_forbids_and_needs_no_fetch(store: Store, tmp_path: Path) -> None:
    page = Tags(page_of(store, tmp_path))
    (policy,) = (meta["content"] for meta in page.named("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in str(policy)
    assert [link["href"] for link in page.named("link")] == ["data:,"]
    assert all(str(link["href"]).startswith("#") for link in page.named("a"))


def test_two_pages_of_one_artifact_are_equal(store: Store, tmp_path: Path) -> None:
    assert page_of(store, tmp_path) == page_of(store, tmp_path)


# -- writing it -------------------------------------------------------------------------------------------------------


def test_a_page_that_cannot_be_written_is_a_typed_error(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = inspect(store, tmp_path / "file" / "page.html")
    assert result.exit_code == 2
    assert "a file stands where a folder should be" in result.stderr


def test_a_page_and_json_are_not_asked_for_together(store: Store, tmp_path: Path) -> None:
    result = inspect(store, tmp_path / "page.html", "--json")
    assert result.exit_code == 2 and "give --html or --json" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_buckets_with_equal_kernels_are_printed_once(tmp_path: Path) -> None:
    store = sample_store(tmp_path / "store", buckets=3)
    text = CliRunner().invoke(main, ["inspect", "gpt", "--store", str(store.path)]).stdout
    assert text.count("addmm_out") == 1 and text.count("kernels as in bucket batch=1,seq=128") == 2
