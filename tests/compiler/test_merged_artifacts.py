"""What the artifact of several buckets says of weights, of which each bucket's build says its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample_artifacts import stored_artifact
from small_artifact import small_artifact

from aotc.compiler.build_report import Outcome
from aotc.compiler.publish.bundles import publish_bundles, regions_without_code, source_date
from aotc.compiler.publish.target_artifacts import merge
from aotc.errors import BuildError, CorruptError
from aotc.provenance import BuiltArtifact, BuiltVariant
from aotc.records import Argument, File, Output, Parallel, Parameter, Region, Signature, StateSpec, TensorLeaf
from aotc.store.layout.bundle import Bundle, read_bundle
from aotc.store.layout.check_record import check_record
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord
from aotc.store.reference import Reference

LIBRARY = File("model.so", "sha256:" + "2" * 64, 1, "sha256:" + "4" * 64, 10)
CONSTANTS = File("constants.safetensors", "sha256:" + "1" * 64, 1, "sha256:" + "3" * 64, 1)


def bucket_of(size: int, takes: tuple[str, ...], unused: tuple[str, ...], **fields: Any) -> BuiltArtifact:
    """The artifact that the build of one bucket gives."""
    variant = BuiltVariant(
        bucket={"batch": size},
        key=f"sha256:{size:064}",
        library="model.so",
        files=(LIBRARY,),
        arguments=tuple(Argument(state=name) for name in takes),
        outputs=(Output(index=0),),
        output_tree=0,
    )
    return small_artifact(
        state=tuple(StateSpec(name, "float32", (2,), (1,)) for name in takes),
        variants=(variant,),
        unused=unused,
        **fields,
    )


def test_what_any_bucket_takes_is_not_unused() -> None:
    one = bucket_of(1, takes=("a", "b"), unused=("c", "d"))
    two = bucket_of(2, takes=("b", "c"), unused=("a", "d"))
    (merged,) = merge([one, two])
    assert [spec.name for spec in merged.state] == ["a", "b", "c"]
    assert merged.unused == ("d",)


def test_the_newest_symbols_that_any_bucket_needs_are_needed() -> None:
    needs = [
        {"libc": "2.9", "libstdcxx": ("GLIBCXX_3.4.30",)},
        {"libc": "2.34", "libstdcxx": ("CXXABI_1.3.9", "GLIBCXX_3.4.9")},
        {},
    ]
    each = [bucket_of(size, takes=(), unused=()) for size in (1, 2, 3)]
    here = [
        msgspec.structs.replace(one.environment, **{"libc": "", **need}) for one, need in zip(each, needs, strict=True)
    ]
    (merged,) = merge(msgspec.structs.replace(one, environment=need) for one, need in zip(each, here, strict=True))
    assert merged.environment.libc == "2.34"
    assert merged.environment.libstdcxx == ("CXXABI_1.3.9", "GLIBCXX_3.4.30")


def test_a_bucket_that_ranks_share_is_in_each_kind_of_another_bucket() -> None:
    """Of four ranks, the last has code of its own for one bucket."""
    mesh = Parallel("tensor", 4)
    shared = bucket_of(1, takes=("a",), unused=("b",), parallel=mesh)
    last = bucket_of(2, takes=("b",), unused=("a",), parallel=msgspec.structs.replace(mesh, ranks=(3,)))
    others = bucket_of(2, takes=("a",), unused=("b",), parallel=msgspec.structs.replace(mesh, ranks=(0, 1, 2)))
    (merged,) = merge([shared, msgspec.structs.replace(others, kinds=(last,))])
    check_record(merged)
    ranks = [merged.of_rank(rank) for rank in range(4)]
    assert [one.parallel.ranks for one in ranks if one.parallel] == [(0, 1, 2)] * 3 + [(3,)]
    assert all(one.variants[0] == shared.variants[0] for one in ranks)
    assert [one.variants[1] for one in ranks] == [others.variants[0]] * 3 + [last.variants[0]]
    assert [[spec.name for spec in one.state] for one in ranks] == [["a"]] * 3 + [["a", "b"]]


def test_a_region_whose_code_ranks_share_stands_beside_one_that_they_call_with_other_sizes() -> None:
    """Each unit's record has all regions as the first rank calls them, and a further kind's as its own rank does."""
    mesh = Parallel("tensor", 2)

    def unit(region: str, columns: int, parallel: Parallel) -> BuiltArtifact:
        made = bucket_of(1, takes=(), unused=(), parallel=parallel)
        regions = (Region("down", ("down",), of_shape(4, columns)), Region("norm", ("norm",), of_shape(4, 16)))
        (variant,) = made.variants
        return msgspec.structs.replace(
            made, regions=regions, variants=(msgspec.structs.replace(variant, region=region),)
        )

    first, second = (msgspec.structs.replace(mesh, ranks=(rank,)) for rank in range(2))
    down = msgspec.structs.replace(unit("down", 3, first), kinds=(unit("down", 2, second),))
    (merged,) = merge([down, unit("norm", 3, mesh)])
    shapes = [[region.signature.leaves[0].shape for region in merged.of_rank(rank).regions] for rank in range(2)]
    assert shapes == [[(4, 3), (4, 16)], [(4, 2), (4, 16)]]


def of_shape(*shape: int) -> Signature:
    return Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", shape),))


@pytest.mark.parametrize("ranks", [((0,), (0,)), ((0, 1), ()), ((0, 1), (1,)), ((0,), (2,)), ((), ())])
def test_kinds_that_leave_a_rank_out_or_name_one_twice_are_refused(ranks: tuple[tuple[int, ...], ...]) -> None:
    one, other = (bucket_of(1, takes=("a",), unused=(), parallel=Parallel("tensor", 2, each)) for each in ranks)
    with pytest.raises(CorruptError, match="makes no sense") as caught:
        check_record(msgspec.structs.replace(one, kinds=(other,)))
    assert "not each for some of its 2 ranks" in str(caught.value)


def test_an_alias_of_what_is_taken_is_not_unused() -> None:
    one, two = bucket_of(1, takes=("a",), unused=("tied",)), bucket_of(2, takes=("b",), unused=())
    spec = msgspec.structs.replace(two.state[0], aliases=("tied",))
    (merged,) = merge([one, msgspec.structs.replace(two, state=(spec,))])
    assert merged.unused == ()


def test_constants_are_kept_where_every_build_gave_the_same() -> None:
    one, two = (bucket_of(size, takes=("a",), unused=(), constants=CONSTANTS) for size in (1, 2))
    assert merge([one, two])[0].constants == CONSTANTS
    other = msgspec.structs.replace(two, constants=msgspec.structs.replace(CONSTANTS, digest="sha256:" + "2" * 64))
    assert merge([one, other])[0].constants is None


def test_files_that_only_one_process_had_imported_are_kept_and_two_of_one_name_are_not_merged() -> None:
    def importing(size: int, **imports: str) -> BuiltArtifact:
        made, trees = bucket_of(size, takes=("a",), unused=()), {f"bytes {size}": "tree"}
        return msgspec.structs.replace(made, module=msgspec.structs.replace(made.module, imports=imports, trees=trees))

    (merged,) = merge([importing(1, models="sha256:1"), importing(2, models="sha256:1", late="sha256:2")])
    assert merged.module.trees == {"bytes 1": "tree", "bytes 2": "tree"}, (
        "files that differ in comments are the same code"
    )
    assert merged.module.imports == {"late": "sha256:2", "models": "sha256:1"}
    with pytest.raises(BuildError, match="built with different modules"):
        merge([importing(1, late="sha256:1"), importing(2, late="sha256:2")])


@pytest.mark.parametrize("fields", [{"shape": (3,)}, {"digest": "sha256:" + "1" * 64}, {"aliases": ("tied",)}])
def test_buckets_of_other_weights_are_not_merged(fields: dict[str, Any]) -> None:
    one, two = (bucket_of(size, takes=("a", "b"), unused=()) for size in (1, 2))
    assert merge([one, two])
    spec = msgspec.structs.replace(two.state[1], **fields)
    other = msgspec.structs.replace(two, state=(two.state[0], spec))
    with pytest.raises(BuildError, match="built with different weights: `b` has") as refused:
        merge([one, other])
    ((name, value),) = fields.items()
    assert f"{name} {getattr(two.state[1], name)} and {name} {value}" in str(refused.value)


def test_a_model_of_which_a_region_has_no_code_is_not_published(tmp_path: Path) -> None:
    store = Store.create(tmp_path)
    artifact = stored_artifact(store, tmp_path, (1,))
    regions = tuple(Region(name, (name,), artifact.signature, ()) for name in ("blocks.0", "blocks.2"))
    variant = msgspec.structs.replace(artifact.variants[0], region="blocks.0")
    half = msgspec.structs.replace(artifact, regions=regions, variants=(variant,))
    assert regions_without_code(half) == ["blocks.2"]
    built = Outcome("tiny", "blocks.0 batch=1", artifact.target, "built", seconds=1.0)
    failed = msgspec.structs.replace(built, bucket="blocks.2 batch=1", status="failed")
    results = [(built, UnitRecord(variant.key, {}, half, 1.0, "2026-01-01T00:00:00Z")), (failed, None)]
    done = publish_bundles(store, "v1", results, partial=True)
    assert done.bundles == {} and not list(store.tags())
    assert "a region of which no unit was built" in done.unpublished["tiny"]


def test_equal_artifacts_are_one_bundle_whenever_they_were_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The time in a bundle is SOURCE_DATE_EPOCH's, or there is none; when it was published, its tag says."""

    def published(folder: str, built: str) -> Bundle:
        store = Store.create(tmp_path / folder)
        artifact = stored_artifact(store, tmp_path, (1,))
        unit = UnitRecord(artifact.variants[0].key, {}, artifact, 1.0, built)
        outcome = Outcome("tiny", "batch=1", artifact.target, "built", seconds=1.0)
        done = publish_bundles(store, "v1", [(outcome, unit)])
        bundle = read_bundle(store, Reference(None, "tiny", tag="v1"))
        assert done.bundles == {"tiny": bundle.digest}
        return bundle

    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    first, again = published("one", "2026-01-01T00:00:00Z"), published("two", "2026-02-01T00:00:00Z")
    assert first == again and first.created == ""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert published("three", "2026-03-01T00:00:00Z").created == "1970-01-02T00:00:00Z"


@pytest.mark.parametrize("epoch", ["", "yesterday", "1e3", "9" * 40])
def test_a_source_date_epoch_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch, epoch: str) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", epoch)
    with pytest.raises(BuildError, match=f"SOURCE_DATE_EPOCH is '{epoch}'"):
        source_date()
