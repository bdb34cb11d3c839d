"""An index out of bounds names the input that it came with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import aotc
from aotc.errors import LibraryError
from aotc.records import TensorLeaf
from aotc.runtime.explain.indices import with_indices


@pytest.mark.parametrize("wrong", [32, 1000, -33, -1])
def test_a_token_beyond_the_vocabulary_names_its_input(
    zoo: Any, zoo_store: Path, wrong: int, capfd: pytest.CaptureFixture[str]
) -> None:
    compiled = aotc.load("pooled", zoo.Pooled().eval(), store=zoo_store)
    ids, mask = torch.zeros(4, 16, dtype=torch.int64), torch.ones(4, 16, dtype=torch.bool)
    ids[2, 3] = wrong
    with pytest.raises(LibraryError) as caught:
        compiled(ids, mask=mask)
    (issue,) = caught.value.issues
    if torch.__version__ >= "2.13":  # whose libraries keep their errors
        assert capfd.readouterr().err == ""
    expected = "0 to 31" if wrong == -1 else "-32 to 31"
    assert (issue.where, issue.expected, issue.actual) == ("ids", expected, str(wrong))
    assert issue.message == f"holds {wrong} at [2, 3], beyond a table of 32 entries"
    ids[2, 3] = 31
    compiled(ids, mask=mask)


@pytest.mark.parametrize("message", ["index out of bounds: 0 <= tmp1 < 32", "the library failed: out of memory"])
def test_inputs_that_are_not_to_blame_are_not_named(message: str) -> None:
    leaves = tuple(TensorLeaf(name, dtype, (2,)) for name, dtype in (("ids", "int64"), ("x", "float32")))
    error = with_indices(LibraryError(message), leaves, [torch.tensor([0, 31]), torch.tensor([99.0, -99.0])])
    assert error.message == message and error.issues == ()
