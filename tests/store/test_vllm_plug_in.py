"""The plug-in for vLLM, as far as it goes without vLLM: `tests/vllm` runs the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import ROOT, run_python

from aotc.errors import StoreError
from aotc.integrations.vllm.factors import FOLDER, Config, differences, keep, key_factors
from aotc.integrations.vllm.plugin import receipt_line, register
from aotc.integrations.vllm.replacements import REPLACEMENTS, apply_all
from aotc.integrations.vllm.vllm_libraries import NOTE, find_libraries, lacking, source_digest, write_note
from aotc.tools.caches.receipt import CompilerRun, Receipt

CALL = {"main_code": "int f();", "device_type": "cpu", "extra_flags": (), "optimized_code": None}
OPTIONS = {"cpp.simdlen": None, "cpp.cxx": ("g++",), "max_autotune": False}


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ({"main_code": "\nint f();  "}, {}),
        ({}, {"max_autotune": True}),
        ({}, {"cpp.cxx": ("/opt/bin/clang++",)}),
    ],
    ids=["space around the source", "an option of no flag", "another compiler"],
)
def test_a_library_has_the_same_digest_despite(call: dict[str, Any], options: dict[str, Any]) -> None:
    assert source_digest(CALL | call, OPTIONS | options) == source_digest(CALL, OPTIONS)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ({"main_code": "int g();"}, {}),
        ({"optimized_code": "int f();"}, {}),
        ({"extra_flags": ("-DX",)}, {}),
        ({}, {"cpp.simdlen": 256}),
    ],
    ids=["another source", "a part of its own", "a flag", "other vectors"],
)
def test_a_library_has_another_digest_because_of(call: dict[str, Any], options: dict[str, Any]) -> None:
    assert source_digest(CALL | call, OPTIONS | options) != source_digest(CALL, OPTIONS)


@pytest.mark.parametrize("target", ["platform.machine", "sysconfig.get_config_var", "torch.__version__"])
def test_a_library_is_for_one_target(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_digest(CALL, OPTIONS)
    name = target.rpartition(".")[2]
    monkeypatch.setattr(target, "2.99" if name == "__version__" else lambda *arguments: "another")
    assert source_digest(CALL, OPTIONS) != before


def test_a_library_is_found_where_its_instructions_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.main.so", "b.main.so"):
        (tmp_path / name).write_bytes(b"ELF")
        write_note(tmp_path / name, f"sha256:{name}")
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert find_libraries(moved) == {f"sha256:{name}": moved / name for name in ("a.main.so", "b.main.so")}
    (moved / "a.main.so").unlink()
    assert lacking(moved, "sha256:a.main.so") == "a.main.so"
    assert lacking(moved, "sha256:other") == "a library of the source sha256:other…"
    (moved / f"c.main.so{NOTE}").write_bytes(b"{")
    assert find_libraries(moved) == {"sha256:b.main.so": moved / "b.main.so"}
    monkeypatch.setattr("aotc.integrations.vllm.vllm_libraries.cpu_features", lambda: frozenset({"sse2"}))
    assert find_libraries(moved) == {}


def test_a_miss_names_the_factors_that_differ_from_the_nearest_key(tmp_path: Path) -> None:
    def of(model: str, sequences: int, digest: str) -> list[str]:
        configs = [
            Config("ModelConfig", {"model": model, "hf_config": '{"layers": 4}'}),
            Config("SchedulerConfig", {"n": sequences}, f"of {sequences}"),
            Config("LoadConfig", {"threads": sequences}, "of no field"),
        ]
        whole = ["env", digest, {"cpp.simdlen": None}]
        return keep(tmp_path, whole, key_factors(whole, configs, {"VLLM_X": True}))

    assert of("./llama", 8, "first") == []
    assert of("./llama", 8, "first") == []
    assert of("./gpt", 16, "second") == [
        "ModelConfig.model: the cache is of ./llama, here is ./gpt",
        "SchedulerConfig.n: the cache is of 8, here is 16",
    ]
    assert of("./gpt", 32, "third") == ["SchedulerConfig.n: the cache is of 16, here is 32"]
    assert len([*(tmp_path / FOLDER).iterdir()]) == 3


def test_factors_are_named_with_their_items_and_a_digest_only_where_nothing_else_tells() -> None:
    kept = key_factors(
        ["env", "one", {"cpp.simdlen": 1}], [Config("ModelConfig", {"hf_config": '{"layers": 4}'})], {"A": None}
    )
    assert kept == {
        "$A": "null",
        "ModelConfig.hf_config.layers": "4",
        "inductor 2.cpp.simdlen": "1",
        "all of vLLM's configuration": "one",
    }
    assert differences(kept, kept | {"all of vLLM's configuration": "two"}) == [
        "all of vLLM's configuration: the cache is of one, here is two"
    ]
    assert differences(kept, {**kept, "$B": "1", "all of vLLM's configuration": "two"}) == [
        "$B: the cache is of not a factor, here is 1"
    ]


def test_without_its_variable_the_plug_in_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And imports neither torch nor vLLM, in whatever process of whoever has aotc beside vLLM."""
    code = "import sys; from aotc.integrations.vllm.plugin import register; register(); print('torch' in sys.modules)"
    assert run_python(code) == "False\n"
    monkeypatch.setenv("AOTC_VLLM", "yes")
    with pytest.raises(StoreError, match="AOTC_VLLM is 'yes'"):
        register()


def test_the_receipt_is_one_line() -> None:
    found = Receipt(36, ("a", "b"), ("c",), (), (CompilerRun("g++", tuple(f"/x/{n}.cpp" for n in "abcd")),), 3)
    assert receipt_line(found).startswith(
        "receipt: 2 of 36 restored files used, 1 written anew, 0 replaced, 1 compiles (…, b.cpp, c.cpp, d.cpp); "
    )


def test_nothing_is_replaced_in_a_version_out_of_bounds(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    apply_all(tmp_path, "0.33.0", lambda: None)
    assert "vLLM 0.33.0 is not one of >=0.32,<0.33" in caplog.text


def test_each_replacement_has_a_text_for_upstream_and_is_in_the_guide() -> None:
    guide = (ROOT / "aotc/tools/caches/GUIDE.md").read_text()
    for each in REPLACEMENTS:
        assert "Expected: " in each.text and "Seen: " in each.text
        assert f"`{each.name}`" in guide
