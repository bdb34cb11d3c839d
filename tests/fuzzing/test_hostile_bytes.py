"""Whatever bytes stand in a store, under their right digests: a reader takes them or raises AotcError, and imports
nothing for them. `tests/benchmarks/fuzz.py` runs the same readers for longer, and guided by coverage.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from random import Random

import pytest
from fuzzing.mutations import mutate
from fuzzing.readers import Readers
from hypothesis import given, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("AOTC_FUZZ_CASES", "60"))
"""For each reader."""

NAMES = (
    "layout",
    "index",
    "bundle",
    "manifest",
    "record",
    "unit",
    "picks",
    "provenance",
    "attributes",
    "constants",
    "structure",
    "blob",
)
TEXTS = ("reference", "expression", "structure")


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Readers]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dtypes that torch is about to drop
        yield Readers(tmp_path_factory.mktemp("hostile"))


def test_every_reader_is_tried(readers: Readers) -> None:
    assert {*NAMES, *TEXTS} == set(readers.names)


@pytest.mark.parametrize("name", NAMES)
def test_good_examples_are_taken(readers: Readers, name: str) -> None:
    """So that what is changed in them is all that can be wrong."""
    taken = [readers.read(name, example) for example in readers.seeds[name]]
    assert any(taken) or name == "attributes"  # whose reader always says that the module is another one
    assert all(taken) or name in ("attributes", "blob")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=CASES)
@given(random=st.randoms(use_true_random=False))
def test_changed_documents(readers: Readers, name: str, random: Random) -> None:
    readers.read(name, mutate(random.choice(readers.seeds[name]), random))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=CASES // 4)
@given(data=st.binary(max_size=200))
def test_any_bytes(readers: Readers, name: str, data: bytes) -> None:
    readers.read(name, data)


@pytest.mark.parametrize("name", TEXTS)
@settings(max_examples=CASES)
@given(text=st.text(max_size=60) | st.text("()[]{}+-*/%<>=!:,.'\"@# \\abx019_", max_size=60))
def test_any_text(readers: Readers, name: str, text: str) -> None:
    readers.read(name, text.encode("utf-8", "surrogatepass"))
