"""What a build for a GPU gives: results that verify, launch picks with their figures, errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_runs import FOLDER, Gpu, start_aotc

pytestmark = pytest.mark.cuda


def test_every_model_verifies(builds: Any, tmp_path: Path) -> None:
    """float32, float16, bfloat16 with autotuning, TF32, buffers, a range and a CPU operator: all as exact as eager."""
    output, caches = tmp_path / "verify.json", {"AOTC_CACHE_DIR": str(tmp_path / "cache")}
    process = start_aotc("verify", FOLDER / "manifest.yaml", "--store", builds.store, "--json", output=output, **caches)
    status = process.wait()
    reports = json.loads(output.read_text())
    bad = [(report["model"], report["sizes"], report["status"], report["detail"]) for report in reports]
    assert not [entry for entry in bad if entry[2] != "ok"] and status == 0, bad
    models = yaml.safe_load((FOLDER / "manifest.yaml").read_text())["models"]
    assert {report["model"] for report in reports} == models.keys()
    assert {report["target"].partition(":")[0] for report in reports} == {"cuda"}


def test_kernels_are_kept_inside_the_library(gpu: Gpu) -> None:
    for variant in gpu.artifact("mlp").variants:
        assert [file.name for file in variant.files] == [variant.library]


def test_the_faster_launch_is_picked_and_both_figures_are_kept(gpu: Gpu) -> None:
    for variant in gpu.artifact("mlp").variants:
        launch = variant.launch
        assert launch is not None and launch.reason == "measured"
        assert launch.direct_ms and launch.graph_ms
        ratio = launch.graph_ms / launch.direct_ms
        assert launch.graph is (ratio < 1) or abs(ratio - 1) < 0.03  # a tie goes to the direct launch


def test_a_launch_that_the_manifest_asks_for_is_kept(gpu: Gpu) -> None:
    (always,) = gpu.artifact("stateful").variants
    (never,) = gpu.artifact("mlp-fp16").variants
    assert always.launch is not None and always.launch.graph and always.launch.direct_ms and always.launch.graph_ms
    assert never.launch is not None and not never.launch.graph and never.launch.reason == "cuda_graphs: never"


def test_a_range_has_graphs_for_the_listed_sizes(gpu: Gpu) -> None:
    (variant,) = gpu.artifact("ranged").variants
    assert variant.launch is not None and variant.launch.graph
    assert [sizes["rows"] for sizes in variant.launch.sizes] == [8, 16, 32, 64, 128, 192, 256, 384, 512]


def test_a_model_that_no_graph_can_hold_is_launched_directly_with_the_reason(gpu: Gpu) -> None:
    (variant,) = gpu.artifact("round-trip").variants
    assert variant.launch is not None and not variant.launch.graph
    assert "no graph can be captured" in variant.launch.reason


# -- builds that fail -------------------------------------------------------------------------------------------------


def failure(report: dict[str, Any], model: str) -> str:
    (unit,) = (unit for unit in report["units"] if unit["model"] == model)
    assert unit["status"] == "failed" and model not in report["bundles"]
    return str(unit["error"])


def test_a_graph_that_is_asked_for_and_impossible_is_a_build_error(builds: Any) -> None:
    error = failure(builds.failing, "round-trip-as-graph")
    assert "CUDA graph" in error and "cuda_graphs: never" in error


def test_an_input_that_does_not_fit_is_a_build_error_with_a_hint(builds: Any) -> None:
    error = failure(builds.failing, "too-large")
    assert "out of memory" in error and "--jobs 1" in error


def test_a_tensor_inside_that_does_not_fit_is_a_build_error_with_a_hint(builds: Any) -> None:
    """It is allocated where kernels are tuned, or where the result is run once; the user is told the same."""
    error = failure(builds.failing, "too-large-inside")
    assert "memory" in error and "--jobs 1" in error


def test_a_compiler_that_links_libstdcxx_statically_does_no_harm(builds: Any) -> None:
    """Its copy would take the place of torch's, and crash, if the library exported it: the smoke run has been well."""
    (unit,) = builds.static["units"]
    assert unit["status"] == "built", unit["error"]
