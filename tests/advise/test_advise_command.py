"""`aotc advise`: what it prints is a manifest's `buckets`, and its page loads nothing."""

from __future__ import annotations

import json
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from processes import ROOT

from aotc.cli import main
from aotc.manifest import read_manifest
from aotc.tools.advise import Goal, Trace
from aotc.tools.advise import advise as find_buckets
from aotc.tools.advise.advice_page import draw

MANIFEST = """
version: 1
models:
  block:
    factory: examples.models:transformer_block
    targets: [cpu:x86-64-v3, cpu:x86-64-v4]
    inputs:
      x: {shape: [batch, seq, 256], pad: {batch: 0, seq: 0}}
    outputs: {crop: [batch, seq]}
    buckets:
      - {batch: 4, seq: 128}
      - {batch: 8, seq: 512}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("advise")
    draw = random.Random(11)
    lines = (f'{{"batch": {draw.randint(1, 8)}, "seq": {draw.randint(1, 600)}, "count": {n % 9}}}' for n in range(90))
    (folder / "trace.jsonl").write_text("\n".join(lines))
    (folder / "manifest.yaml").write_text(MANIFEST)
    return folder


def advise(folder: Path, *arguments: object, text: str | None = None) -> Result:
    shown = [str(folder / str(one)) if (folder / str(one)).is_file() else str(one) for one in arguments]
    return CliRunner().invoke(main, ["advise", *shown], input=text)


@pytest.mark.parametrize(
    "options",
    [["--buckets", "5"], ["--max-waste", "40%"], ["--buckets", "5", "--range-cost", "1.2", "--multiple-of", "seq=8"]],
    ids=["count", "waste", "range"],
)
def test_the_printed_buckets_are_a_manifests(folder: Path, tmp_path: Path, options: list[str]) -> None:
    """In the place of those of the manifest, they are judged as the advice says."""
    ran = advise(folder, "trace.jsonl", "--manifest", "manifest.yaml", *options)
    assert ran.exit_code == 0, ran.output
    block = ran.stdout[ran.stdout.index("buckets:\n") :]
    data = yaml.safe_load(MANIFEST)
    data["models"]["block"]["buckets"] = yaml.safe_load(block)["buckets"]
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump(data))
    buckets = read_manifest(tmp_path / "manifest.yaml").models["block"].buckets
    judged = advise(folder, "trace.jsonl", "--manifest", str(tmp_path / "manifest.yaml"), *options, "--json")
    again = json.loads(judged.stdout)
    assert [use["sizes"] for use in again["plan"]["buckets"]] == [use["sizes"] for use in again["today"]["buckets"]]
    assert again["today"]["waste"] == again["plan"]["waste"] and again["today"]["coverage"] == 1
    assert again["units"] == 2 * len(buckets) and again["bound"] <= again["plan"]["waste"]
    if "--max-waste" in options:
        assert again["plan"]["waste"] <= 0.4


def test_it_compares_with_the_manifest_and_advises_as_many(folder: Path) -> None:
    advice = json.loads(advise(folder, "trace.jsonl", "--manifest", "manifest.yaml", "--json").stdout)
    assert len(advice["plan"]["buckets"]) == len(advice["today"]["buckets"]) == 2
    assert advice["today"]["coverage"] < 1 == advice["plan"]["coverage"]
    shown = advise(folder, "trace.jsonl", "--manifest", "manifest.yaml").stdout
    assert re.search(r"today +2 +\d\d\.\d\d%", shown) and "units to compile: 4" in shown


def test_the_default_says_why_as_many_buckets_as_today_s_waste_more(tmp_path: Path) -> None:
    """Today's two leave out one call of a hundred, which is a thousand times as long: who takes it pads more."""
    (tmp_path / "manifest.yaml").write_text(
        "version: 1\nmodels:\n  m:\n    factory: a.b:c\n    inputs:\n      x: {shape: [seq], pad: {seq: 0}}\n"
        "    buckets: [{seq: 10}, {seq: 20}]\n"
    )
    trace = '{"seq": 10, "count": 50}\n{"seq": 20, "count": 49}\n{"seq": 10000}\n'
    manifest = ("--manifest", str(tmp_path / "manifest.yaml"))
    shown = CliRunner().invoke(main, ["advise", "-", *manifest], input=trace).stdout
    assert "today's 2 waste less, 0.0%, for they leave calls out: 1.00% of the calls find none of them" in shown
    assert "--cover 99% leaves out as many, the costliest" in shown
    assert "--buckets 3 wastes 0.0%, and takes all" in shown
    followed = CliRunner().invoke(main, ["advise", "-", *manifest, "--cover", "99%"], input=trace).stdout
    assert re.search(r"advised +2 +99\.00% +0\.0%", followed) and "leave calls out" not in followed


@pytest.mark.parametrize("sizes", [[3, 97, 120, 121, 500], [*range(1, 400, 7)], [1, 1000, 4000]])
def test_no_call_is_drawn_beyond_the_edge_of_the_bucket_that_takes_it(sizes: list[int]) -> None:
    trace = Trace(("seq",), {(size,): 1 for size in sizes})
    found = find_buckets(trace, Goal(count=3))
    chart = draw(trace, found)
    edges = sorted(box.x + box.width for box in chart.boxes)
    for cell in chart.cells:
        assert not [edge for edge in edges if cell.x + 1e-9 < edge < cell.x + cell.width / 0.92 - 1e-9], cell
    assert len(chart.cells) <= len(sizes)


def test_optimal_is_said_of_the_calls_that_it_is_for() -> None:
    """With --cover the costliest calls are left out, and others are not tried: of these sizes, leaving out the calls of
    10 would waste nothing."""
    trace = '{"n": 10, "count": 5}\n{"n": 100, "count": 90}\n{"n": 101, "count": 5}\n'
    whole = CliRunner().invoke(main, ["advise", "-", "--buckets", "3"], input=trace).stdout
    assert "optimal: no 3 " in whole and "leave out" not in whole
    part = CliRunner().invoke(main, ["advise", "-", "--buckets", "1", "--cover", "95%"], input=trace).stdout
    assert "optimal for the calls without the costliest 5.00%: no 1 " in part
    assert "buckets that leave out other calls, which are not searched, may waste less" in part


def test_a_latency_makes_the_cost_milliseconds(folder: Path, tmp_path: Path) -> None:
    measured = tmp_path / "latency.jsonl"
    measured.write_text("".join(f'{{"batch": 1, "seq": {n}, "ms": {2 + n / 100}}}\n' for n in (1, 100, 500)))
    ran = advise(folder, "trace.jsonl", "--latency", measured)
    assert "fitted 2 ms + 0.01 ms × batch × seq to 3 measurements; mean error 0.0%" in ran.stderr
    assert "mean (ms)" in ran.stdout
    measured.write_text("".join(f'{{"batch": 1, "seq": {n}, "ms": {2 + n / 100}}}\n' for n in (1, 100)))
    ran = advise(folder, "trace.jsonl", "--latency", measured)
    assert "to 2 measurements; exactly determined: 2 coefficients, so the error is not known" in ran.stderr


def test_a_manifest_with_too_few_buckets_is_judged_and_more_are_advised() -> None:
    """Those of manifests/quickstart.yaml take two sizes of the trace, and pad none."""
    trace = '{"batch": 1, "seq": 128, "count": 8}\n{"batch": 4, "seq": 128}\n{"batch": 7, "seq": 128}\n'
    ran = CliRunner().invoke(main, ["advise", "-", "--manifest", str(ROOT / "manifests/quickstart.yaml")], input=trace)
    assert ran.exit_code == 0 and re.search(r"today +2 +90\.00%", ran.stdout), ran.output
    assert re.search(r"advised +3 +100\.00%", ran.stdout)
    assert "note: 2 buckets cannot take every call: batch, seq are not padded, and came in 3 sizes" in ran.stderr


def test_a_latency_is_fitted_to_the_times_of_a_build(quickstart_store: Path) -> None:
    """Both buckets of manifests/quickstart.yaml were timed by their smoke runs."""
    trace = '{"batch": 1, "seq": 128, "count": 9}\n{"batch": 3, "seq": 128}'
    command = ["advise", "-", "--latency", f"{quickstart_store}#quickstart"]
    ran = CliRunner().invoke(main, [*command, "--json"], input=trace)
    assert ran.exit_code == 0, ran.output
    advice = json.loads(ran.stdout)
    assert "to 2 measurements" in ran.stderr and advice["unit"] == "ms" and advice["unit_seconds"] > 0
    other = CliRunner().invoke(main, command, input='{"n": 1}')
    assert other.exit_code == 2 and "have the dims batch, seq, and the trace n" in other.stderr


def test_standard_input_is_a_trace(folder: Path) -> None:
    ran = advise(folder, "-", "--dims", "seq", "--json", text="seq=3\nseq=5\n")
    assert [use["name"] for use in json.loads(ran.stdout)["plan"]["buckets"]] == ["seq=3", "seq=5"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--buckets", "2", "--max-waste", "5%"], "give --buckets or --max-waste, not both"),
        (["--max-waste", "5 percent"], "is not a share from 0 to 1"),
        (["--multiple-of", "seq"], "is not DIM=NUMBER"),
        (["--multiple-of", "sek=8"], "the trace has no dim 'sek'; it has batch, seq"),
        (["--pad", "sek"], "the trace has no dim 'sek'"),
        (["--model", "block"], "--model names a model of --manifest"),
        (["--manifest", "manifest.yaml", "--dims", "seq"], "the model's dims are batch,seq"),
        (["--cost", "length"], "the trace has no dim `length`"),
        (["--max-waste", "0", "--dims", "seq"], "no 1000 buckets"),
        (["--pad", "seq", "--buckets", "3"], "batch is not padded, and came in 8 sizes"),
    ],
)
def test_what_cannot_be_done_is_refused(folder: Path, options: list[str], told: str) -> None:
    many = "".join(f'{{"batch": {n % 8 + 1}, "seq": {n + 1}}}\n' for n in range(1200))
    ran = advise(folder, "-", *options, text=many)
    assert ran.exit_code == 2 and told in ran.stderr, ran.output


def test_a_trace_that_is_not_there_is_an_error_without_a_traceback(folder: Path) -> None:
    ran = advise(folder, "missing.jsonl")
    assert ran.exit_code == 2 and "missing.jsonl cannot be read: No such file" in ran.stderr


# -- the page ---------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attributes)))

    def of(self, tag: str, kind: str) -> list[dict[str, Any]]:
        return [own for name, own in self.seen if name == tag and kind in (own.get("class") or "").split()]


@pytest.mark.parametrize("dims", ["seq", "batch,seq"])
def test_the_page_draws_sizes_and_buckets_and_loads_nothing(folder: Path, tmp_path: Path, dims: str) -> None:
    page = tmp_path / "page.html"
    more = ["--manifest", "manifest.yaml"] if "," in dims else []
    ran = advise(folder, "trace.jsonl", "--dims", dims, "--buckets", 4, "--html", page, *more)
    assert ran.exit_code == 0, ran.output
    text = page.read_text()
    tags = Tags(text)
    assert not {"script", "img", "iframe", "object"} & {name for name, _ in tags.seen}
    assert "default-src 'none'" in text and not re.findall(r"(?:src|href)=\"(?!#|data:,)", text)
    assert not [own for _, own in tags.seen if "style" in own]
    if "," in dims:
        boxes = tags.of("rect", "box")
        assert len(boxes) == 4 + 2 and sum("today" in box["class"] for box in boxes) == 2
        assert max(float(box["width"].rstrip("%")) for box in boxes) <= 100
    else:
        assert len(tags.of("line", "edge")) == 4
    assert len(tags.of("rect", "heat")) > 20


def test_names_on_the_page_are_escaped(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "<b>x.jsonl"
    trace.write_text('{"<i>seq</i>": 3}\n{"<i>seq</i>": 8}')
    page = tmp_path / "page.html"
    assert advise(folder, trace, "--html", page).exit_code == 0
    assert not {"b", "i"} & {name for name, _ in Tags(page.read_text()).seen}


# -- the picture ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", ["seq", "batch,seq"])
def test_the_picture_draws_sizes_and_buckets(folder: Path, tmp_path: Path, dims: str) -> None:
    image = pytest.importorskip("PIL.Image")
    from aotc.tools.advise import picture

    ran = advise(folder, "trace.jsonl", "--dims", dims, "--buckets", 1, "--png", tmp_path / "chart.png")
    assert ran.exit_code == 0, ran.output
    with image.open(tmp_path / "chart.png") as drawn:
        assert drawn.format == "PNG" and drawn.width == picture.WIDTH
        pixels = drawn.convert("RGB")
    red = [x for x in range(picture.WIDTH) if pixels.getpixel((x, picture.TOP + picture.CHART // 2)) == picture.ADVISED]
    right = picture.WIDTH - picture.RIGHT
    assert red and right - 30 < max(red) <= right + 2  # the one bucket is as large as the largest size
    assert len({pixels.getpixel((x, picture.TOP + picture.CHART - 8)) for x in range(300, 1100)}) > 1  # heat and ground


def test_without_pillow_the_picture_is_refused_with_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    ran = advise(folder, "trace.jsonl", "--png", tmp_path / "chart.png")
    assert ran.exit_code == 2 and "pip install 'aotc[png]'" in ran.stderr and not (tmp_path / "chart.png").exists()
