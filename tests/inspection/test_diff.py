"""`aotc diff`: everything in which two artifacts differ is listed, with its cause where that is known."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from sample_builds import (
    CREATED,
    kernels,
    make_artifact,
    make_variant,
    operator_pick,
    picks,
    put,
    put_picks,
    put_report,
    sample_store,
    triton_source,
)
from small_artifact import publish_unchecked

from aotc.cli import main
from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import CorruptError, SchemaVersionError
from aotc.picks import PICKS_SCHEMA_VERSION, PickFile, UnitPicks
from aotc.provenance import BuiltArtifact, BuiltVariant, Kernel
from aotc.records import Ambient, Environment, LaunchPick, SizeRange
from aotc.store.layout.built import read_built, read_picks
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, put_unit
from aotc.store.reference import Reference
from aotc.tools.inspection.binaries import BUILD_ID, OUTSIDE, compare_binaries
from aotc.tools.inspection.compare import ValueChange, changes
from aotc.tools.inspection.kernels import compare_kernels

replace = msgspec.structs.replace


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return sample_store(tmp_path / "store")


def diff(store: Store, *arguments: str, a: str = "gpt", b: str = "gpt:other") -> Result:
    return CliRunner().invoke(main, ["diff", a, b, "--store", str(store.path), *arguments])


def shown(store: Store, *arguments: str, **sides: str) -> dict[str, Any]:
    result = diff(store, "--json", *arguments, **sides)
    assert result.exit_code in (0, 1), result.output
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["equal"] is (result.exit_code == 0)
    return document


def artifact_of(store: Store) -> BuiltArtifact:
    return read_built(store, read_bundle(store, Reference(None, "gpt", tag="latest")).artifacts[0].digest)


def other(store: Store, **fields: Any) -> dict[str, Any]:
    """What `aotc diff` says where `gpt:other` is the artifact with these fields changed."""
    publish_unchecked(store, "gpt", "other", [replace(artifact_of(store), **fields)], created=CREATED)
    (artifact,) = shown(store)["artifacts"]
    return dict(artifact)


def other_variant(store: Store, change: Callable[[BuiltVariant], BuiltVariant]) -> dict[str, Any]:
    """The same for a change of the first variant."""
    first, *rest = artifact_of(store).variants
    (variant,) = other(store, variants=(change(first), *rest))["variants"]
    return dict(variant)


# -- equal or not -----------------------------------------------------------------------------------------------------


def test_equal_artifacts_are_equal_though_they_were_published_at_different_times(store: Store) -> None:
    publish(store, "gpt", "other", [artifact_of(store)], created="2027-01-01T00:00:00Z")
    result = diff(store)
    assert result.exit_code == 0 and "cuda:sm_90: equal" in result.stdout
    document = shown(store)
    assert document["a"] != document["b"] and document["targets_equal"] == ["cuda:sm_90"]
    assert "artifacts" not in document


def test_a_side_may_be_a_digest_and_in_another_store(store: Store, tmp_path: Path) -> None:
    copied = Store.open(Path(shutil.copytree(store.path, tmp_path / "copied")))
    digest = read_bundle(store, Reference(None, "gpt", tag="latest")).digest
    assert shown(store, a=f"gpt@{digest}", b=f"{copied.path}#gpt")["equal"]


def test_targets_are_compared_pairwise_and_those_of_one_side_are_said(store: Store) -> None:
    whole = artifact_of(store)
    v3, v4 = (replace(whole, target=f"cpu:x86-64-{level}") for level in ("v3", "v4"))
    publish_unchecked(store, "gpt", "other", [v3, replace(whole, weights="frozen")], created=CREATED)
    publish(store, "gpt", "third", [v4, whole], created=CREATED)
    document = shown(store, a="gpt:other", b="gpt:third")
    assert document["targets_removed"] == ["cpu:x86-64-v3"] and document["targets_added"] == ["cpu:x86-64-v4"]
    (artifact,) = document["artifacts"]
    assert artifact["target"] == "cuda:sm_90"
    assert artifact["record"] == {"weights": [{"path": "", "a": "frozen", "b": "live"}]}
    assert shown(store, "--target", "cuda:sm_90", b="gpt:third")["equal"]
    assert not shown(store, "--target", "cpu:x86-64-v4", a="gpt:third", b="gpt")["equal"]


def test_a_target_that_neither_has_is_an_error_that_lists_the_known(store: Store) -> None:
    result = diff(store, "--target", "cpu:amx", b="gpt")
    assert result.exit_code == 2
    assert "neither bundle has an artifact for cpu:amx" in result.stderr and "cuda:sm_90" in result.stderr


# -- the record -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "part", "change"),
    [
        ({"weights": "frozen"}, "weights", {"path": "", "a": "live", "b": "frozen"}),
        ({"aotc": "0.2.0"}, "aotc", {"path": "", "a": "0.1.0", "b": "0.2.0"}),
        (
            {"options": {"max_autotune": True, "cpp.simdlen": 256}},
            "options",
            {"path": "cpp.simdlen", "b": 256},
        ),
        (
            {"ambient": Ambient("bfloat16", "float32", "high", False)},
            "ambient",
            {"path": "autocast", "a": None, "b": "bfloat16"},
        ),
        ({"state": ()}, "state", {"path": "[0]"}),
        ({"manifest": {"name": "gpt", "factory": "new:gpt"}}, "manifest", {"path": "factory", "b": "new:gpt"}),
    ],
)
def test_every_part_of_the_record_is_compared(
    store: Store, fields: dict[str, Any], part: str, change: dict[str, Any]
) -> None:
    record = other(store, **fields)["record"]
    assert list(record) == [part]
    assert change.items() <= record[part][0].items()


def test_guards_that_differ_are_named_one_by_one(store: Store) -> None:
    now = artifact_of(store)
    ids, *rest = now.signature.leaves
    module = replace(now.module, sources={"GPT": sha256_bytes(b"class GPT(Module)"), "Block": sha256_bytes(b"")})
    record = other(store, signature=replace(now.signature, leaves=(replace(ids, dtype="int32"), *rest)), module=module)[
        "record"
    ]
    assert record["signature"] == [{"path": "leaves[0].dtype", "a": "int64", "b": "int32"}]
    assert {change["path"] for change in record["module"]} == {"sources.GPT", "sources.Block"}


def test_another_environment_shows_both_values(store: Store) -> None:
    changed = replace(artifact_of(store).environment, torch="2.14.0", gpu="NVIDIA H100")
    assert other(store, environment=changed)["record"]["environment"] == [
        {"path": "torch", "a": "2.13.0", "b": "2.14.0"},
        {"path": "gpu", "a": "NVIDIA H200", "b": "NVIDIA H100"},
    ]


def test_buckets_of_one_side_are_said_and_a_range_s_tuning_is_part_of_it(store: Store) -> None:
    first, second = artifact_of(store).variants
    ranged = replace(second, bucket={"batch": 2, "seq": SizeRange(1, 512, tune_at=64)})
    artifact = other(store, variants=(first, ranged))
    assert artifact["buckets_removed"] == ["batch=2,seq=128"]
    assert artifact["buckets_added"] == ["batch=2,seq=1..512 tuned at seq=64"]
    assert artifact["buckets_equal"] == 1 and "variants" not in artifact


def test_the_order_of_buckets_is_a_difference(store: Store) -> None:
    first, second = artifact_of(store).variants
    (change,) = other(store, variants=(second, first))["record"]["variants"]
    assert change["path"] == "order" and change["a"] == list(reversed(change["b"]))


def test_conditions_of_a_bucket_are_compared(store: Store) -> None:
    variant = other_variant(store, lambda v: replace(v, conditions=("seq > 1",)))
    assert variant["record"] == [{"path": "conditions", "b": ["seq > 1"]}]
    assert "the same code" in variant["reason"]


def test_another_launch_mode_is_a_difference_and_a_pick(store: Store) -> None:
    variant = other_variant(store, lambda v: replace(v, launch=LaunchPick(False, 0.66, 0.605, "measured")))
    assert variant["record"] == [{"path": "launch.graph", "a": True, "b": False}]
    assert [pick["kind"] for pick in variant["picks"]] == ["launch"]


def test_changes_say_where_a_side_has_nothing() -> None:
    assert changes({"a": 1, "b": {"c": [1, 2]}}, {"b": {"c": [1]}, "d": None}) == (
        ValueChange("a", a=1),
        ValueChange("b.c", [1, 2], [1]),
        ValueChange("d", b=None),
    )
    assert changes({"n": 1}, {"n": True}) == (ValueChange("n", 1, True),)


# -- why --------------------------------------------------------------------------------------------------------------


def test_factors_of_keys_that_differ_are_the_reason(store: Store) -> None:
    first, second = artifact_of(store).variants
    moved = replace(first, key=sha256_bytes(b"another key"))
    one = replace(artifact_of(store), variants=(moved,))
    factors = {"bucket": {"batch": 1, "seq": 128}, "compiler": "13.1.0"}
    put_unit(store, UnitRecord(moved.key, factors, one, 1.0, CREATED))
    (variant,) = other(store, variants=(moved, second))["variants"]
    assert variant["key_factors"] == [{"path": "compiler", "a": "12.2.0", "b": "13.1.0"}]
    assert variant["reason"] == "built from other inputs: compiler"


def test_without_the_units_the_factors_are_unknown_and_that_is_said(store: Store) -> None:
    variant = other_variant(store, lambda v: replace(v, key=sha256_bytes(b"another key")))
    assert variant["key_factors"] is None
    assert "only where both units are still in their stores" in variant["reason"]


def test_other_choices_of_autotuning_are_the_reason(store: Store) -> None:
    chosen = put_picks(store, {"batch": 1, "seq": 128}, picks(128, fastest=5))
    variant = other_variant(store, lambda v: replace(v, picks=chosen))
    assert variant["reason"] == "built from the same inputs; autotuning chose other candidates"
    (pick,) = variant["picks"]
    assert (pick["kind"], pick["subject"], len(pick["inputs"])) == ("operator", "addmm", 3)
    assert pick["first"]["config"]["BLOCK_M"] == 128 and pick["second"]["config"]["BLOCK_M"] == 64
    a, b = (
        next(c.ms or 0 for c in operator_pick(128).candidates if c.config == side["config"])
        for side in (pick["first"], pick["second"])
    )
    assert pick["cost"] == pytest.approx(b / a - 1)
    assert f"BLOCK_M=64 BLOCK_N=64 num_stages=3 num_warps=8, {b / a - 1:+.1%} time" in diff(store).stdout


def test_other_times_for_the_same_choices_are_no_difference_of_picks(store: Store) -> None:
    slower = tuple(
        replace(pick, candidates=tuple(replace(c, ms=None if c.ms is None else c.ms * 1.1) for c in pick.candidates))
        for pick in picks(128)
    )
    measured = put_picks(store, {"batch": 1, "seq": 128}, slower)
    variant = other_variant(store, lambda v: replace(v, picks=measured))
    assert "picks" not in variant
    (file,) = variant["files"]
    assert file["name"] == "picks.json" and file["reason"] == "other times or choices were recorded"


def test_without_picks_it_is_unknown_whether_autotuning_chose_otherwise(store: Store) -> None:
    first, second = artifact_of(store).variants
    publish(store, "gpt", "latest", [make_artifact((replace(first, picks=None), second))], created=CREATED)
    report = put_report(store, kernels(256))
    assert "no picks are recorded" in other_variant(store, lambda v: replace(v, report=report))["reason"]


# -- kernels and picks ------------------------------------------------------------------------------------------------


def test_kernels_are_paired_by_source_before_name() -> None:
    def kernel(name: str, elements: int, calls: int = 1) -> Kernel:
        return Kernel(name, "triton", calls, ("add",), triton_source(name, elements))

    a = (kernel("triton_0", 1), kernel("triton_1", 2), kernel("triton_2", 3), kernel("triton_3", 4))
    b = (kernel("triton_0", 2), kernel("triton_1", 9), kernel("triton_3", 4, calls=2), kernel("triton_4", 5))
    found = {(d.status, d.name_a, d.name_b) for d in compare_kernels(a, b)}
    assert found == {
        ("renamed", "triton_1", "triton_0"),
        ("changed", "triton_3", "triton_3"),
        ("removed", "triton_0", ""),
        ("removed", "triton_2", ""),
        ("added", "", "triton_1"),
        ("added", "", "triton_4"),
    }


def test_a_kernel_with_another_source_shows_how_it_differs(store: Store) -> None:
    report = put_report(store, kernels(256))
    variant = other_variant(store, lambda v: replace(v, report=report))
    by_name = {kernel["name_a"]: kernel for kernel in variant["kernels"]}
    gelu = by_name["triton_poi_fused_addmm_gelu_view_2"]
    assert gelu["status"] == "changed" and gelu["source_a"] != gelu["source_b"]
    assert (
        f"-    xnumel = {128 * 4096}\n" in gelu["source_diff"]
        and f"+    xnumel = {256 * 4096}\n" in gelu["source_diff"]
    )
    assert "addmm_out" not in by_name
    plain, with_sources = diff(store).stdout, diff(store, "--sources").stdout
    assert "~ triton triton_poi_fused_addmm_gelu_view_2: source, 2 lines removed and 2 added" in plain
    assert "xnumel = " not in plain and f"+    xnumel = {256 * 4096}" in with_sources


def test_picks_of_one_side_are_said(store: Store) -> None:
    fewer = put_picks(store, {"batch": 1, "seq": 128}, picks(128)[1:])
    variant = other_variant(store, lambda v: replace(v, picks=fewer))
    (pick,) = variant["picks"]
    assert pick["subject"] == "addmm" and pick["second"] is None
    assert "- operator addmm (bfloat16[4096] stride [1] cuda, " in diff(store).stdout


# -- reading picks ----------------------------------------------------------------------------------------------------


def test_picks_are_read_from_their_blob(store: Store) -> None:
    variant = artifact_of(store).variants[0]
    unit = read_picks(store, variant)
    assert unit is not None and unit.picks[:-1] == picks(128) and unit.device == "NVIDIA H200"
    assert unit.picks[-1].kind == "launch" and unit.picks[-1].winner.name == "graph"
    assert read_picks(store, replace(variant, picks=None)) is None


def test_picks_of_another_version_are_refused(store: Store) -> None:
    variant = make_variant(store, {"batch": 3}, 3)
    with pytest.raises(SchemaVersionError, match="has pick schema 2; this aotc reads schema 1") as raised:
        read_picks(store, replace(variant, picks=put_picks(store, {}, picks(3), schema=2)))
    assert (raised.value.found, raised.value.supported) == (2, 1)


def test_picks_of_several_units_in_one_variant_are_corrupt(store: Store) -> None:
    unit = UnitPicks("gpt", {}, "cuda:sm_90", "2.13.0", "NVIDIA H200", picks(3))
    two = put(store, "picks.json", canonical_json(PickFile(PICKS_SCHEMA_VERSION, (unit, unit))))
    with pytest.raises(CorruptError, match="are those of 2 units"):
        read_picks(store, replace(make_variant(store, {"batch": 3}, 3), picks=two))


# -- bytes ------------------------------------------------------------------------------------------------------------

SOURCE = """
static const char *where = FROM;
extern "C" const char *from() { return where; }
extern "C" int scaled(int x) { return x * FACTOR; }
extern "C" int untouched(int x) { return x - 1; }
"""


def library(folder: Path, origin: str, factor: int = 3, *flags: str) -> bytes:
    source, built = folder / "library.cpp", folder / "library.so"
    source.write_text(SOURCE)
    options = [f'-DFROM="{origin}"', f"-DFACTOR={factor}", "-O1", "-shared", "-fPIC", *flags]
    subprocess.run(["g++", *options, source, "-o", built], check=True)
    return built.read_bytes()


def test_a_path_of_the_build_folder_is_found(tmp_path: Path) -> None:
    a, b = (library(tmp_path, f"/tmp/aotc-build-{name}/cache/model.cpp") for name in ("aaaa", "bbbb"))
    found = compare_binaries(a, b)
    assert {section.name for section in found.sections} <= {".rodata", BUILD_ID}
    (rodata,) = (section for section in found.sections if section.name == ".rodata")
    assert rodata.differing == 4 and rodata.first == a[a.index(b"/tmp/aotc") :].index(b"aaaa")
    assert found.texts_a == ("/tmp/aotc-build-aaaa/cache/model.cpp",)
    assert found.texts_b == ("/tmp/aotc-build-bbbb/cache/model.cpp",)
    assert "the machine code is the same; data, texts or names differ" in found.findings
    assert "absolute paths differ: see the texts" in found.findings


def test_code_that_differs_is_named_by_its_function(tmp_path: Path) -> None:
    found = compare_binaries(library(tmp_path, "here", 3), library(tmp_path, "here", 5))
    (text,) = (section for section in found.sections if section.code)
    assert text.name == ".text" and text.symbols == ("scaled",) and text.differing >= 1
    assert "machine code differs: .text" in found.findings
    assert not found.texts_a and not found.texts_b


def test_only_another_build_id_is_said_so(tmp_path: Path) -> None:
    a, b = (library(tmp_path, "here", 3, f"-Wl,--build-id=0x{digit * 40}") for digit in "12")
    found = compare_binaries(a, b)
    assert [section.name for section in found.sections] == [BUILD_ID]
    assert found.findings[0].startswith("only the linker's build id differs")


def test_a_section_that_one_file_lacks_is_said(tmp_path: Path) -> None:
    found = compare_binaries(library(tmp_path, "here"), library(tmp_path, "here", 3, "-Wl,--build-id=none"))
    missing = {section.name: (section.size_a, section.size_b) for section in found.sections}[BUILD_ID]
    assert missing == (36, None)


def test_bytes_after_the_sections_count_too(tmp_path: Path) -> None:
    a = library(tmp_path, "here")
    (section,) = compare_binaries(a, a + b"weights").sections
    assert (section.name, section.size_a, section.size_b) == (OUTSIDE, len(a), len(a) + 7)


@pytest.mark.parametrize("damage", [b"\x7fELF", b"\x7fELF" + bytes(60), b"", b"not a library"])
def test_what_is_no_elf_file_is_compared_as_a_whole(tmp_path: Path, damage: bytes) -> None:
    (section,) = compare_binaries(damage, library(tmp_path, "here")).sections
    assert section.name == "" and section.size_a == len(damage)


def test_differing_bytes_are_counted_over_the_whole_length() -> None:
    a = bytes(200_000)
    b = bytearray(a)
    b[65_535] = b[65_536] = b[199_999] = 1
    (section,) = compare_binaries(a, bytes(b)).sections
    assert (section.differing, section.first) == (3, 65_535)


def test_a_library_that_differs_alone_is_explained_down_to_its_text(store: Store, tmp_path: Path) -> None:
    first, second = artifact_of(store).variants
    built = [library(tmp_path, f"/tmp/aotc-build-{name}/model.cpp") for name in ("aaaa", "bbbb")]
    a, b = (replace(first, files=make_variant(store, {}, 1, data).files) for data in built)
    publish(store, "gpt", "latest", [make_artifact((a, second))], created=CREATED)
    variant = other_variant(store, lambda v: b)
    assert variant["reason"] == "built from the same inputs, with the same kernels and picks; the compiled bytes differ"
    assert "aotc-build" not in diff(store).stdout and "they differ: 1 bucket\n" in diff(store).stdout
    text = diff(store, "--bytes").stdout
    assert "- text '/tmp/aotc-build-aaaa/model.cpp'" in text and "+ text '/tmp/aotc-build-bbbb/model.cpp'" in text
    assert "buckets that are equal: 1" in text


def test_the_same_bytes_compressed_differently_are_said_so(store: Store, tmp_path: Path) -> None:
    library(tmp_path, "here")
    quick, small = (store.blobs.put_file_zstd(tmp_path / "library.so", level, name="model.so") for level in (1, 19))
    assert quick.digest == small.digest and quick.blob != small.blob
    first, second = artifact_of(store).variants
    publish(store, "gpt", "latest", [make_artifact((replace(first, files=(quick,)), second))], created=CREATED)
    (file,) = other_variant(store, lambda v: replace(v, files=(small,)))["files"]
    assert file["reason"] == "the same bytes, compressed differently"


def test_no_name_reaches_the_terminal_as_a_command(store: Store) -> None:
    kernel = Kernel("\x1b[2Jcleared [bold]", "triton", 1, ("add",), "x")
    report = put_report(store, (*kernels(128), kernel))
    other_variant(store, lambda v: replace(v, report=report))
    text = diff(store).stdout
    assert "\x1b" not in text and "\\x1b[2Jcleared [bold]" in text


def test_an_environment_of_another_field_is_no_crash(store: Store) -> None:
    bare = Environment(os="linux", machine="aarch64", torch="2.13.0")
    assert {change["path"] for change in other(store, environment=bare)["record"]["environment"]} == {
        "machine",
        "libc",
        "cuda_capability",
        "cuda",
        "gpu",
    }
