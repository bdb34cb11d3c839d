"""What the C++ compiler refuses is told by its own words, of which Inductor's message begins with many others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from torch._inductor.exc import CppCompileError

from aotc.compiler.explain_failure import explain_failure


@pytest.mark.parametrize(
    ("code", "said", "hint"),
    [
        (
            "int x = not_declared(1);",
            "model.cpp:3:9: error: ‘not_declared’ was not declared",
            "another version of torch",
        ),
        ("#include <no_such_header.h>", "model.cpp:3:10: fatal error: no_such_header.h: No such file", "CUDA_HOME"),
    ],
)
def test_the_errors_of_a_compile_are_shown_with_a_hint(
    code: str, said: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    (tmp_path / "header.h").write_text("#warning much\n#warning is\n#warning said\n#warning before\n#warning it\n")
    (tmp_path / "model.cpp").write_text(f'#include "header.h"\n\n{code}\n')
    command = ["g++", "-c", str(tmp_path / "model.cpp"), "-o", str(tmp_path / "model.o")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    told = explain_failure(CppCompileError(command, ran.stderr), "compile")
    assert f"\n    {said}" in told.message and len(told.message.splitlines()) == 2
    assert str(tmp_path) not in told.message.splitlines()[1]
    assert hint in told.hint


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        ("g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.", "--jobs 1"),
        ("a.cpp:3:9: fatal error: error writing to /tmp/a.s: No space left on device", "free the disk"),
        ("g++: error: unrecognized command-line option '-std=c++20'", "set CXX"),
        ("/usr/bin/ld: cannot find -lgomp: No such file or directory\ncollect2: error: ld returned 1", "set CXX"),
    ],
)
def test_what_is_no_fault_of_the_code_is_told_so(output: str, hint: str) -> None:
    assert hint in explain_failure(CppCompileError(["g++"], output), "compile").hint
