"""What an output carries of a padded dim, found by running the model at other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from aotc.compiler.capture.analysis.output_dims import Shapes, mark_axes
from aotc.errors import BuildError


class Probe:
    """A model whose outputs have shapes of `rows`."""

    def __init__(self, *outputs: Any) -> None:
        self._outputs = outputs

    def shapes(self, sizes: Mapping[str, int]) -> Shapes:
        rows = sizes["rows"]
        return [output(rows) for output in self._outputs if output(rows) is not None]


def marked(*outputs: Any) -> list[list[str]]:
    probe: Any = Probe(*outputs)
    base = probe.shapes({"rows": 4})
    texts = [[""] * len(shape) for shape in base]
    mark_axes("rows", {"rows": 4}, base, probe.shapes, texts)
    return texts


def test_an_axis_that_grows_with_a_dim_carries_it() -> None:
    assert marked(lambda rows: (rows, 4), lambda rows: (7,), lambda rows: (2 * rows + 1,)) == [
        ["rows", ""],
        [""],
        ["2*rows+1"],
    ]


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (lambda rows: (rows * rows,), "axis 0 of output 1 .*size 16 at rows=4"),
        (lambda rows: (rows,) * (2 if rows < 5 else 1), "the rank of output 1 .*2 at rows=4"),
        (lambda rows: (rows,) * (1 if rows < 5 else 2), "the rank of output 1 .*1 at rows=4"),
        (lambda rows: (rows,) if rows < 5 else None, "the number of outputs .*2 at rows=4"),
    ],
    ids=["not in proportion", "fewer axes", "more axes", "fewer outputs"],
)
def test_an_output_that_cannot_be_cut_back_fails_the_build(output: Any, what: str) -> None:
    with pytest.raises(BuildError, match=what):
        marked(lambda rows: (3,), output)
