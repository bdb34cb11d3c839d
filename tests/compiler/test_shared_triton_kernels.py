"""What units share of Triton kernels, without a GPU: something else stands for what Inductor compiles and times."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.scheduler import Scheduler

from aotc.compiler.autotune.fusion import LAUNCH_MS, FusionRace, fusion_timers
from aotc.compiler.autotune.picker import Picker
from aotc.compiler.autotune.shared_picks import SharedPicks
from aotc.compiler.autotune.triton_configs import kernel_hooks
from aotc.picks import Pick

SOURCE = "def triton_poi_fused_add_0():\n    pass\n"


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Picker]:
    """A unit's picker, in a cache folder of its own."""

    def begin(name: str) -> Picker:
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        return Picker(shared=SharedPicks(tmp_path / "shared", ["an H200"], name))

    return begin


# -- what decides a fusion --------------------------------------------------------------------------------------------


def time_kernels(picker: Picker, measured: list[Any], ms: float, race: FusionRace) -> list[float]:
    """The times that a unit is told of its generated code `same.py` and of `<its own>.py`."""

    def benchmark(self: Any, module: Any, n_spills_threshold: int = 8, node_names: Any = None) -> tuple[float, str]:
        assert n_spills_threshold > 1000  # with any number of spilled registers, that is
        measured.append(module.__file__)
        return ms, module.__file__

    with mock.patch.object(TritonScheduling, "benchmark_codegened_module", benchmark):
        patches = fusion_timers(picker, [race])
        (timed,) = (function for owner, _, function in patches if owner is TritonScheduling)
        modules = [SimpleNamespace(__file__=f"/cache/{name}.py") for name in ("same", f"own{len(measured)}")]
        return [timed(None, module)[0] for module in modules]


@pytest.mark.parametrize("ms", [0.25, math.inf])
def test_equal_code_is_timed_once_to_decide_fusions(unit: Callable[[str], Picker], ms: float) -> None:
    measured: list[Any] = []
    first, second = unit("first"), unit("second")
    races = [FusionRace(Pick(kind="fusion", subject="buf0 + buf1", candidates=())) for _ in range(2)]
    assert time_kernels(first, measured, ms, races[0]) == [ms, ms]
    assert time_kernels(second, measured, 0.5, races[1]) == [ms, 0.5]
    assert len(measured) == 3
    assert (first.measurements, first.shared_times, second.measurements, second.shared_times) == (2, 0, 1, 1)


@pytest.mark.parametrize(("on_gpu", "gap"), [(True, LAUNCH_MS), (False, 0.0)])
def test_a_neighbour_of_its_own_costs_a_launch_beside_its_time_on_a_gpu(
    unit: Callable[[str], Picker], on_gpu: bool, gap: float
) -> None:
    race = FusionRace(Pick(kind="fusion", subject="buf0 + buf1", candidates=()), on_gpu)
    with mock.patch.object(Scheduler, "benchmark_fused_nodes", lambda _self, _nodes: (0.25, "same.py")):
        patches = fusion_timers(unit("first"), [race])
    (timed,) = (function for _, name, function in patches if name == "benchmark_fused_nodes")
    assert timed(None, []) == (0.25 + gap, "same.py")
    assert race.neighbour_ms == 0.25 + gap and LAUNCH_MS > 0


def test_a_fusion_is_another_unit_s_only_if_nothing_was_timed_here() -> None:
    race = FusionRace(Pick(kind="fusion", subject="buf0 + buf1", candidates=()))
    race.measured_in.add("first")
    assert race.measured().measured_in == "first"
    race.measured_here = True
    assert race.measured().measured_in == ""


# -- block sizes ------------------------------------------------------------------------------------------------------


def launcher(block: int) -> Any:
    return SimpleNamespace(config=SimpleNamespace(kwargs={"XBLOCK": block}, num_warps=4, num_stages=1))


class Kernel:
    """What Inductor calls while it compiles a kernel, finds its block size and saves it."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self._functions = functions
        name, path = PyCodeCache.write(SOURCE)
        cache = SimpleNamespace(local_cache=(None, f"/cache/ab/{name}.best_config"), configs_hash="h")
        self._autotuner = SimpleNamespace(
            heuristic_type="pointwise",
            save_cache_hook=SimpleNamespace(__self__=cache),
            inductor_meta={"kernel_name": "triton_poi_fused_add_0"},
            filename=path,
            fn=launcher,
        )

    def compile(self) -> None:
        self._functions["triton"](None, "triton_poi_fused_add_0", SOURCE)

    def bench(self, block: int) -> None:
        self._functions["bench"](self._autotuner, launcher(block))

    def save(self, block: int) -> None:
        self._functions["save_gpu_kernel"](self._autotuner, None, launcher(block))


@contextmanager
def inductor(picker: Picker) -> Iterator[Kernel]:
    """A launch takes as many milliseconds as its block is large."""
    with ExitStack() as patches:
        for owner, name, function in (
            (CachingAutotuner, "bench", lambda self, launcher: float(launcher.config.kwargs["XBLOCK"])),
            (CachingAutotuner, "save_gpu_kernel", lambda self, stream, launcher: None),
            (AsyncCompile, "triton", lambda self, kernel_name, source_code: None),
        ):
            patches.enter_context(mock.patch.object(owner, name, function))
        yield Kernel({name: function for _, name, function in kernel_hooks(picker)})


def test_the_block_size_that_another_unit_found_lies_where_inductor_looks_before_it_compiles(
    unit: Callable[[str], Picker], tmp_path: Path
) -> None:
    first = unit("first")
    with inductor(first) as kernel:
        kernel.compile()
        for block in (256, 128):
            kernel.bench(block)
        kernel.save(128)
    assert (len(first.tuned), first.compiled_elsewhere) == (1, 0)
    second = unit("second")
    with inductor(second) as kernel:
        kernel.compile()
        (found,) = (tmp_path / "second").rglob("*.best_config")
        assert json.loads(found.read_text())["XBLOCK"] == 128
        kernel.save(128)
    assert (second.tuned, second.compiled_elsewhere) == ([], 1)
    (taken,) = second.shared
    assert taken.measured_in == "first" and [candidate.ms for candidate in taken.candidates] == [128, 256]


def test_a_unit_alone_looks_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    picker = Picker()
    with inductor(picker) as kernel:
        kernel.compile()
        kernel.bench(128)
        kernel.save(128)
    assert not list(tmp_path.rglob("*.best_config")) and not picker.shared
