"""What `stats()` of `aotc.compile` counts: one row for each form, or for all forms that one bucket takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from aotc.records import Artifact, ConstantLeaf, Parameter, Signature, SizeRange, TensorLeaf
from aotc.tools.remembering.call_counts import CallCounter, FormCalls, bucket_in_words
from aotc.tools.remembering.forms import form_of

SIGNATURE = Signature(
    (Parameter("ids", 0), Parameter("double", 1, default=False)),
    (TensorLeaf("ids", "int64", (2, "seq", "2*seq", "batch")), ConstantLeaf("double", True)),
)


def artifact(**bucket: Any) -> Artifact:
    variants = [SimpleNamespace(bucket=bucket)]
    return SimpleNamespace(signature=SIGNATURE, variants=variants, regions=(), model="net")  # type: ignore[return-value]


class Code:
    """Compiled code of one bucket that has run `calls`."""

    def __init__(self, calls: int, name: str, **bucket: Any) -> None:
        self.artifact = artifact(**bucket)
        self.bucket = name
        self._stats = SimpleNamespace(buckets={name: SimpleNamespace(calls=calls)})

    def stats(self) -> Any:
        return self._stats


def form(seq: int) -> Any:
    return form_of((torch.empty(2, seq, 2 * seq, 1, dtype=torch.int64), True), {}, "cpu")


def test_a_bucket_s_words_have_sizes_ranges_and_constants_that_are_not_the_usual_ones() -> None:
    assert bucket_in_words(artifact(batch=1, seq=8), "batch=1,seq=8") == "int64[2, 8, 16, 1], double=True"
    wide = {"batch": 1, "seq": SizeRange(2, 64, tune_at=8)}
    assert bucket_in_words(artifact(**wide), "batch=1,seq=2..64") == "int64[2, 2..64, 2*seq, 1], double=True"


def test_forms_are_counted_with_the_code_that_takes_them_also_after_it_was_built_anew() -> None:
    counter = CallCounter("inference")
    narrow = Code(4, "batch=1,seq=8", batch=1, seq=8)
    wide = Code(3, "batch=1,seq=2..64", batch=1, seq=SizeRange(2, 64, tune_at=8))
    wider = Code(2, "batch=1,seq=2..99", batch=1, seq=SizeRange(2, 99, tune_at=8))
    codes: Any = [narrow, wide, wider]
    for seq in (8, 9, 70):
        counter.ran_eager("inference", form(seq), f"{seq} was new")
    counter.ran_eager("train", "any form", "in training mode")
    apart = FormCalls("any form", "train", 0, 1, "in training mode")
    late = FormCalls("int64[2, 70, 140, 1], True", "inference", 0, 1, "70 was new")
    counter.takes(form(8), codes[0], narrow.bucket)
    nine = FormCalls("int64[2, 9, 18, 1], True", "inference", 0, 1, "9 was new")
    assert [*counter.counts(codes[:1]).forms] == [
        FormCalls("int64[2, 8, 16, 1], double=True", "inference", 4, 1, "8 was new"),
        nine,
        late,
        apart,
    ]
    counter.keep(codes[:1])
    counter.takes(form(8), codes[1], wide.bucket)
    counter.takes(form(9), codes[1], wide.bucket)
    assert [*counter.counts(codes[1:2]).forms] == [
        FormCalls("int64[2, 2..64, 2*seq, 1], double=True", "inference", 7, 2, "9 was new"),
        late,
        apart,
    ]
    counter.keep(codes[1:2])
    for seq in (8, 9, 70):
        counter.takes(form(seq), codes[2], wider.bucket)
    counts = counter.counts(codes[2:])
    assert [*counts.forms] == [
        FormCalls("int64[2, 2..99, 2*seq, 1], double=True", "inference", 9, 3, "70 was new"),
        apart,
    ]
    assert (counts.compiled, counts.eager) == (9, 4)
