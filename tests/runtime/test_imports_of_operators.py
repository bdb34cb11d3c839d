"""Which modules a load may import for the operators that they register, and that no compiler comes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hand_built import make_artifact, tensor
from processes import run_python

from aotc.errors import CorruptError
from aotc.records import OperatorNeed
from aotc.store.layout.check_record import check_record

CODE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, aotc
from aotc.records import OperatorNeed
from aotc.runtime.libraries.required_operators import provide_operators

for module, allowed in eval(sys.argv[2]):
    if os.fork() == 0:  # each with nothing imported
        try:
            provide_operators([OperatorNeed("acme_ops::none", module)], allowed)
        except aotc.OperatorError as error:
            imported = sorted({"acme", "acme.ops", "acmebar", "ac"} & sys.modules.keys())
            print(*imported, "|", str(error).replace("\\n", " "), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    (tmp_path / "acme").mkdir()
    for name in ("acme/__init__", "acme/ops", "acmebar", "ac"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "compiling.py").write_text("import functorch.compile")
    (tmp_path / "compiling_and_broken.py").write_text("import functorch.compile; 1 / 0")
    return tmp_path


ALLOWED: list[tuple[str, Any, str]] = [
    ("acmebar", "acmebar", "acmebar"),
    ("acmebar", ["acme"], ""),
    ("acmebar", "acme", ""),
    ("acme", "acmebar", ""),
    ("ac", "acme", ""),
    ("acme.ops", "acme", "acme acme.ops"),
    ("acme.ops", {"acme"}, "acme acme.ops"),
    ("acme", ["acme.ops"], ""),
    ("acme", "", ""),
    ("acme", True, "acme"),
    ("acme", False, ""),
]


def test_a_module_is_allowed_by_its_own_name_or_its_package_s(modules: Path) -> None:
    shown = run_python(CODE, modules, [(module, allowed) for module, allowed, _ in ALLOWED]).splitlines()
    assert [line.partition("|")[0].strip() for line in shown] == [imported for *_, imported in ALLOWED]


def test_a_module_that_imports_a_compiler_is_refused(modules: Path) -> None:
    names = ("compiling", "compiling_and_broken")
    for module, shown in zip(
        names, run_python(CODE, modules, [(name, True) for name in names]).splitlines(), strict=True
    ):
        assert f"importing `{module}`" in shown and "imported torch._dynamo, torch._inductor" in shown
        assert f"import {module} before aotc.load" in shown


@pytest.mark.parametrize("module", ["functorch.compile", "functorch", "torchgen.gen", "isympy", "sympy.core"])
def test_a_record_cannot_name_what_comes_with_a_compiler(module: str) -> None:
    def with_operators(*operators: OperatorNeed) -> Any:
        artifact = make_artifact([tensor("x", "batch", 4)], [{"batch": 4}])
        variant = msgspec.structs.replace(artifact.variants[0], operators=operators)
        return msgspec.structs.replace(artifact, variants=(variant,))

    check_record(with_operators(OperatorNeed("acme::scale", f"my{module}")))
    with pytest.raises(CorruptError, match="not a module of a user"):
        check_record(with_operators(OperatorNeed("acme::scale", module)))
