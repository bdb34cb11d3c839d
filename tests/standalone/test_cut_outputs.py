"""Without torch, outputs are cut back as with torch: the same memory, strides and elements."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn_views import drawn_part, drawn_tensor, drawn_view
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import ROOT
from torch import Tensor

from aotc.runtime.padding.cut_views import cut_copies

CORE, HERE = ROOT / "aotc" / "core" / "cpu", Path(__file__).parent


@pytest.fixture(scope="module")
def cut_in_c(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[str]]]:
    program = tmp_path_factory.mktemp("cut") / "cut"
    sources = HERE / "cut_outputs.cpp", CORE / "cut_views.cpp", CORE / "tensor.cpp"
    subprocess.run(["g++", "-std=c++20", "-O0", "-Wall", "-fopenmp", "-o", program, *sources], check=True)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as running:

        def of(line: str) -> list[str]:
            assert running.stdout is not None
            print(line, file=running.stdin)
            return running.stdout.readline().strip().rstrip(";").split(";")

        yield of


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_drawn_outputs_are_cut_back_as_with_torch(cut_in_c: Callable[[str], list[str]], data: st.DataObject) -> None:
    memory = drawn_tensor(data, data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    outputs = [drawn_view(data, memory) for _ in range(data.draw(st.integers(1, 4)))]
    parts = {at: drawn_part(data, each) for at, each in enumerate(outputs) if data.draw(st.booleans())}
    words: list[Any] = [memory.numel(), len(outputs)]
    for at, output in enumerate(outputs):
        words += [output.storage_offset(), output.ndim, *output.shape, *output.stride()]
        words += [1, *parts[at].shape] if at in parts else [0]
    for at, copy in cut_copies(outputs, parts).items():
        outputs[at] = copy
    places = [output.untyped_storage().data_ptr() for output in outputs]
    expected = [
        " ".join(map(str, [place_of(output, memory, places), output.storage_offset(), *told(output)]))
        for output in outputs
    ]
    assert cut_in_c(" ".join(map(str, words))) == expected


def place_of(output: Tensor, memory: Tensor, places: list[int]) -> int:
    """The first output in the same memory; -1 for that of before, and where there is no element."""
    place = output.untyped_storage().data_ptr()
    return -1 if not output.numel() or place == memory.untyped_storage().data_ptr() else places.index(place)


def told(output: Tensor) -> list[int]:
    return [*output.shape, *output.stride(), *(int(each) for each in output.flatten().tolist())]
