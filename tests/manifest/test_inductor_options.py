"""Inductor options are checked against the installed torch's own list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from aotc.compiler.codegen.option_check import OWNED, _option_types, check_options, check_patches
from aotc.errors import Issue
from aotc.manifest import read_manifest


def issues_of(folder: Path, options: dict[str, Any]) -> list[Issue]:
    path = folder / "m.yaml"
    model = {"factory": "p:f", "inputs": {}, "options": options}
    path.write_text(yaml.safe_dump({"version": 1, "models": {"m": model}}))
    return check_options(read_manifest(path))


def test_known_options_of_the_right_type_pass(tmp_path: Path) -> None:
    options = {
        "cpp.simdlen": 256,
        "triton.unique_kernel_names": True,
        "max_autotune_gemm_backends": "ATEN,CPP",
        "max_autotune_gemm_search_space": "EXHAUSTIVE",
        "coordinate_descent_tuning": True,
        "cpp.threads": 4,
    }
    assert issues_of(tmp_path, options) == []


@pytest.mark.parametrize(
    ("name", "value", "message", "hint"),
    [
        ("cpp.simdlne", 1, "Inductor has no option `cpp.simdlne`", "did you mean `cpp.simdlen`?"),
        ("simdlen", 1, "Inductor has no option `simdlen`", "did you mean `cpp.simdlen`?"),
        ("max_autotun", True, "no option `max_autotun`", "`max_autotune`, is set by aotc: write `mode: max-autotune`"),
        ("zzzzzz", 1, "Inductor has no option `zzzzzz`", "torch._inductor.config"),
        ("cpp.simdlen", "wide", '`cpp.simdlen` is "wide"; expected int | None', ""),
        ("epilogue_fusion", 1, "`epilogue_fusion` is 1; expected bool", ""),
        ("max_autotune_gemm_search_space", "ALL", "expected typing.Literal['DEFAULT', 'EXHAUSTIVE']", ""),
        ("post_grad_custom_pre_pass", None, "takes a Python object", "leave it out"),
        ("freezing", True, "`freezing` is set by aotc", "weights: frozen"),
        ("max_autotune", True, "`max_autotune` is set by aotc", "mode: max-autotune"),
        ("cpp_wrapper", True, "`cpp_wrapper` is set by aotc", "C++"),
        ("aot_inductor.package", True, "`aot_inductor.package` is set by aotc", "packages"),
        ("aot_inductor.output_path", "x", "`aot_inductor.output_path` is set by aotc", "packages"),
    ],
)
def test_an_option_that_cannot_be_is_told_with_its_line(
    tmp_path: Path, name: str, value: Any, message: str, hint: str
) -> None:
    (issue,) = issues_of(tmp_path, {name: value})
    assert message in issue.message
    assert hint in issue.hint
    assert issue.where == f"{tmp_path / 'm.yaml'}:5" or issue.where.endswith(":6")


def test_all_wrong_options_are_told(tmp_path: Path) -> None:
    assert len(issues_of(tmp_path, {"freezing": True, "no_such_option": 1, "epilogue_fusion": "yes"})) == 3


def test_most_of_the_options_that_aotc_owns_exist() -> None:
    """A misspelled entry would let the real option pass. Versions of torch differ in few."""
    unknown = set(OWNED) - set(_option_types())
    assert len(unknown) <= 3, unknown


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("serial_small_loop", "there is no patch `serial_small_loop` of torch", "did you mean `serial_small_loops`?"),
        (
            "dropout_copies",
            "the patch `dropout_copies` of torch cannot be switched off: it is for equal builds, or is applied in "
            "torch.export",
            "",
        ),
    ],
)
def test_patches_of_the_compiler_can_be_switched_off(tmp_path: Path, name: str, message: str, hint: str) -> None:
    path = tmp_path / "m.yaml"
    text = "version: 1\nmodels:\n  m:\n    factory: p:f\n    inputs: {}\n    patches:\n      known_bools: off\n"
    path.write_text(text)
    manifest = read_manifest(path)
    assert check_patches(manifest) == [] and manifest.models["m"].patches_off == {"known_bools"}
    path.write_text(f"{text}      {name}: off\n")
    (issue,) = check_patches(read_manifest(path))
    assert issue.message == message and hint in issue.hint and issue.where.endswith(":8")
