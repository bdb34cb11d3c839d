"""Records survive their JSON, and nothing but a whole, known record is read."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_artifact import small_artifact

from aotc.errors import AotcError, CorruptError, SchemaVersionError
from aotc.provenance import BuiltArtifact, BuiltVariant, Provenance, VariantProvenance
from aotc.records import (
    SCHEMA_VERSION,
    Ambient,
    Argument,
    Artifact,
    ConstantLeaf,
    Environment,
    File,
    LaunchPick,
    ModuleGuard,
    Output,
    PadRule,
    Parameter,
    ResultContainer,
    Signature,
    SizeRange,
    StateSpec,
    TensorLeaf,
    bucket_name,
    decode,
    decode_artifact,
    tuned_dims,
)

texts = st.text(max_size=8)
numbers = st.integers(0, 2**62)
places = st.integers(0, 2**20)
digests = st.sampled_from(["", "sha256:" + "0" * 64])
scalars = st.none() | st.booleans() | numbers | st.floats(allow_nan=False, allow_infinity=False) | texts
trees = st.recursive(numbers, lambda t: st.lists(t, max_size=3) | st.dictionaries(texts, t, max_size=3), max_leaves=5)


def some(strategy: st.SearchStrategy[Any], most: int = 2) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(strategy, max_size=most).map(tuple)


ranges = st.builds(SizeRange, min=numbers, max=numbers, multiple_of=st.integers(1, 9), tune_at=numbers)
files = st.builds(File, name=texts, digest=digests, size=numbers, blob=digests, blob_size=numbers)
pads = st.dictionaries(texts, st.builds(PadRule, value=scalars, edge=st.booleans()), max_size=2)
layouts = st.sampled_from(["contiguous", "channels_last", "channels_last_3d"])
leaves = st.builds(
    TensorLeaf, path=texts, dtype=texts, shape=some(numbers | texts), layout=layouts, pad=pads
) | st.builds(ConstantLeaf, path=texts, value=scalars)
parameters = st.builds(
    Parameter,
    name=texts,
    tree=trees,
    kind=st.sampled_from(["positional", "either", "keyword", "extra"]),
    default=scalars | st.just(msgspec.UNSET),
)
results = st.recursive(
    places,
    lambda items: st.builds(ResultContainer, type=texts, items=some(items), keys=some(scalars), context=trees),
    max_leaves=5,
)
variants = st.builds(
    BuiltVariant,
    bucket=st.dictionaries(texts, numbers | ranges, max_size=2),
    key=texts,
    library=texts,
    files=some(files),
    arguments=some(st.builds(Argument, leaf=st.none() | places, state=st.none() | texts)),
    outputs=some(
        st.builds(
            Output,
            index=st.none() | places,
            leaf=st.none() | places,
            state=st.none() | texts,
            constant=scalars,
            dims=some(texts),
        )
    ),
    output_tree=results,
    conditions=some(texts),
    mutated_leaves=some(places),
    launch=st.none() | st.builds(LaunchPick, graph=st.booleans(), direct_ms=st.none() | st.floats(0, 9), reason=texts),
    report=st.none() | files,
)
artifacts = st.builds(
    BuiltArtifact,
    schema=st.just(SCHEMA_VERSION),
    aotc=texts,
    model=texts,
    target=texts,
    environment=st.builds(
        Environment, os=texts, machine=texts, torch=texts, libc=texts, cpu_features=some(texts), ptx=st.booleans()
    ),
    weights=st.sampled_from(["live", "frozen"]),
    signature=st.builds(Signature, parameters=some(parameters), leaves=some(leaves), make_contiguous=st.booleans()),
    state=some(
        st.builds(
            StateSpec,
            name=texts,
            dtype=texts,
            shape=some(numbers),
            stride=some(numbers),
            aliases=some(texts),
            digest=digests,
            persistent=st.booleans(),
        )
    ),
    module=st.builds(
        ModuleGuard,
        class_name=texts,
        training=st.booleans(),
        sources=st.dictionaries(texts, texts, max_size=2),
        attributes=digests,
        attributes_file=st.none() | files,
        training_differs=some(texts),
    ),
    ambient=st.builds(
        Ambient,
        autocast=st.none() | texts,
        default_dtype=texts,
        float32_matmul_precision=texts,
        deterministic=st.booleans(),
        num_threads=st.none() | numbers,
    ),
    variants=some(variants),
    options=st.dictionaries(texts, scalars, max_size=2),
    manifest=st.dictionaries(texts, scalars, max_size=2),
    constants=st.none() | files,
    unused=some(texts),
)


MADE = File("provenance.json", "", 1, "", 2)


@settings(max_examples=50)
@given(artifacts)
def test_any_artifact_comes_back_from_its_json_equal_and_with_the_same_bytes(artifact: BuiltArtifact) -> None:
    data = artifact.record(MADE).encode()
    made = artifact.provenance_of().encode()
    record, provenance = decode_artifact(data), decode(made, Provenance)
    assert (record.encode(), provenance.encode()) == (data, made)
    assert provenance.join(record) == artifact


def test_the_provenance_of_another_artifact_is_refused() -> None:
    one = small_artifact()
    made = Provenance("0.1.0", {}, {}, (VariantProvenance("key"),))
    with pytest.raises(CorruptError, match="that of another artifact"):
        made.join(one.record(MADE))


def as_dict(**fields: Any) -> dict[str, Any]:
    return {**json.loads(small_artifact().record(MADE).encode()), **fields}


def read(value: Any) -> Artifact:
    return decode_artifact(json.dumps(value).encode())


def test_the_values_that_python_holds_equal_keep_their_types() -> None:
    artifact = small_artifact(
        signature=Signature((), tuple(ConstantLeaf("c", value) for value in (True, 1, 1.0, "1", None, -0.0)))
    )
    read_leaves = decode_artifact(artifact.record(MADE).encode()).signature.leaves
    values = [leaf.value for leaf in read_leaves if isinstance(leaf, ConstantLeaf)]
    assert [(type(value), repr(value)) for value in values] == [
        (type(value), repr(value)) for value in (True, 1, 1.0, "1", None, -0.0)
    ]


@pytest.mark.parametrize("found", [0, SCHEMA_VERSION + 1, 99])
def test_another_schema_version_is_refused_with_both_values_and_before_anything_else_is_read(found: int) -> None:
    with pytest.raises(SchemaVersionError) as caught:
        read({"schema": found, "unheard": "of"})
    assert (caught.value.found, caught.value.supported) == (found, SCHEMA_VERSION)
    assert str(found) in str(caught.value)
    assert str(SCHEMA_VERSION) in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "value",
    [
        as_dict(weights="melted"),
        as_dict(variants=[{"bucket": {}}]),
        as_dict(model=None),
        as_dict(state="none"),
        as_dict(module={**as_dict()["module"], "training": "no"}),
        {key: value for key, value in as_dict().items() if key != "signature"},
        as_dict(signature={"parameters": [], "leaves": [{"type": "other", "path": "x"}]}),
    ],
    ids=["literal", "missing inside", "null", "type", "no bool", "missing", "tag"],
)
def test_a_record_that_is_not_exactly_of_the_schema_is_corrupt(value: dict[str, Any]) -> None:
    with pytest.raises(CorruptError):
        read(value)


@pytest.mark.parametrize(
    "value",
    [as_dict(unknown=1), as_dict(module={**as_dict()["module"], "unknown": 1})],
    ids=["unknown", "unknown inside"],
)
def test_a_record_with_fields_that_are_not_known_is_a_newer_version_s(
    value: dict[str, Any],
) -> None:
    with pytest.raises(SchemaVersionError, match=r"newer aotc wrote .*`unknown`") as caught:
        read(value)
    assert str(SCHEMA_VERSION) in caught.value.found and str(SCHEMA_VERSION) in caught.value.supported
    assert "or a newer one" in caught.value.hint


def test_the_error_carries_the_path_of_the_mistake() -> None:
    with pytest.raises(CorruptError, match=r"\$\.environment"):
        read(as_dict(environment={"os": 1, "machine": "x", "torch": "2"}))


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"{", b"[" * 100_000, b'{"schema": "1"}', b'{"schema": 2}']
)
def test_what_is_no_record_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_artifact(data)


@settings(max_examples=200)
@given(artifacts, st.data())
def test_mutated_bytes_give_a_record_or_an_aotc_error(artifact: BuiltArtifact, data: st.DataObject) -> None:
    encoded = bytearray(artifact.record(MADE).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(encoded) - 1))
        if data.draw(st.booleans()):
            encoded[position] = data.draw(st.integers(0, 255))
        else:
            del encoded[position]
    with contextlib.suppress(AotcError):
        decode_artifact(bytes(encoded))


@given(st.binary(max_size=100))
def test_garbage_gives_an_aotc_error(data: bytes) -> None:
    with pytest.raises(AotcError):
        decode_artifact(data)


def test_other_records_are_read_as_strictly() -> None:
    assert decode(b'{"name":"a","digest":"","size":1,"blob":"","blob_size":2}', File) == File("a", "", 1, "", 2)
    with pytest.raises(CorruptError, match="File"):
        decode(b'{"name":"a"}', File)


def test_records_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        small_artifact().model = "other"


# -- sizes ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 6), st.integers(-5, 40))
def test_a_range_holds_its_ends_and_the_multiples_between_them(low: int, high: int, step: int, size: int) -> None:
    expected = size in [n for n in range(low, high + 1) if n % step == 0]
    assert (size in SizeRange(low, high, multiple_of=step)) == expected


def test_a_bucket_is_named_by_its_dims_in_order() -> None:
    assert bucket_name({"seq": SizeRange(8, 64, 8), "batch": 2}) == "batch=2,seq=8..64 step 8"
    assert bucket_name({"seq": SizeRange(1, 64)}) == "seq=1..64"
    assert bucket_name({}) == "-"


def test_code_is_tuned_at_the_fixed_size_or_where_the_range_says() -> None:
    assert tuned_dims({"batch": 2, "seq": SizeRange(1, 64, tune_at=32)}) == {"batch": 2, "seq": 32}


# -- threads ----------------------------------------------------------------------------------------------------------

FIRST_READS = """
import sys, threading
sys.setswitchinterval(1e-6)
from aotc.records import decode_artifact
data = sys.stdin.buffer.read()
together = threading.Barrier(4)
def read():
    together.wait()
    decode_artifact(data)
threads = [threading.Thread(target=read) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_threads_may_read_a_process_s_first_records_at_once() -> None:
    """Left to itself, msgspec 0.22 crashes one process in four here."""
    data = small_artifact().encode()
    ran = [subprocess.run([sys.executable, "-c", FIRST_READS], input=data, check=False) for _ in range(12)]
    assert [one.returncode for one in ran] == [0] * 12
