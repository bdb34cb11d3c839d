"""Which modules a load may import for the operators that they register."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_python

CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, aotc
from aotc.records import OperatorNeed
from aotc.runtime.operators import provide_operators
try:
    provide_operators([OperatorNeed("acme_ops::none", sys.argv[2])], eval(sys.argv[3]))
except aotc.OperatorError as error:
    print(*sorted({"acme", "acme.ops", "acmebar", "ac"} & sys.modules.keys()))
    print(error)
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    (tmp_path / "acme").mkdir()
    for name in ("acme/__init__", "acme/ops", "acmebar", "ac"):
        (tmp_path / f"{name}.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("module", "allowed", "imported"),
    [
        ("acmebar", "'acmebar'", "acmebar"),
        ("acmebar", "['acme']", ""),
        ("acmebar", "'acme'", ""),
        ("acme", "'acmebar'", ""),
        ("ac", "'acme'", ""),
        ("acme.ops", "'acme'", "acme acme.ops"),
        ("acme.ops", "{'acme'}", "acme acme.ops"),
        ("acme", "['acme.ops']", ""),
        ("acme", "''", ""),
        ("acme", "True", "acme"),
        ("acme", "False", ""),
    ],
)
def test_a_module_is_allowed_by_its_own_name_or_its_package_s(
    modules: Path, module: str, allowed: str, imported: str
) -> None:
    assert run_python(CODE, modules, module, allowed).splitlines()[0] == imported
