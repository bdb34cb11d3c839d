"""Which sizes of a bucket with ranges a GPU captures graphs for: what the manifest's `graph_sizes` list of it."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hand_built import make_artifact, tensor

from aotc.compiler.smoke.launch_choice import pick_launch
from aotc.manifest.types import ModelSpec
from aotc.models.launch import listed_sizes
from aotc.records import Bucket, LaunchPick, SizeRange
from aotc.store.layout.check_record import check_record

SEQ = SizeRange(8, 64, multiple_of=8, tune_at=32)
BATCH = SizeRange(1, 4, tune_at=2)


@pytest.mark.parametrize(
    ("bucket", "graph_sizes", "expected"),
    [
        ({"seq": SEQ}, {"seq": [8, 16]}, [{"seq": 8}, {"seq": 16}]),
        # another dim of the bucket has one size, which the list need not repeat
        ({"batch": 2, "seq": SEQ}, {"seq": [16]}, [{"batch": 2, "seq": 16}]),
        ({"batch": 2, "seq": SEQ}, {"batch": [1, 2], "seq": [16]}, [{"batch": 2, "seq": 16}]),
        # listed for other buckets of the model only
        ({"batch": 2, "seq": SEQ}, {"batch": [1], "seq": [16]}, []),
        ({"seq": SEQ}, {"seq": [4, 12, 128]}, []),
        # a range that the list leaves open
        ({"batch": BATCH, "seq": SEQ}, {"seq": [16]}, []),
        ({"batch": BATCH, "seq": SEQ}, {"batch": [1, 8], "seq": [16, 24]}, [{"batch": 1, "seq": n} for n in (16, 24)]),
        ({"seq": SEQ}, {}, []),
    ],
)
def test_the_sizes_of_a_bucket_that_get_a_graph(
    bucket: Bucket, graph_sizes: dict[str, list[int]], expected: list[dict[str, int]]
) -> None:
    spec = ModelSpec("model", "package:factory", {}, (bucket,), graph_sizes=graph_sizes)
    assert list(listed_sizes(spec, bucket)) == expected
    artifact = make_artifact([tensor("x", *bucket)], [bucket])
    pick = pick_launch(spec, bucket, torch.device("cuda"), pytest.fail)
    none = "graph_sizes lists none of its sizes" if graph_sizes else "a range runs directly"
    assert pick == LaunchPick(bool(expected), sizes=tuple(expected), reason="graph_sizes" if expected else none)
    (variant,) = artifact.variants
    launched = msgspec.structs.replace(variant, launch=pick)
    check_record(msgspec.structs.replace(artifact, variants=(launched,)))
