"""One name, one concept: a public type's name is defined once in `aotc`, and so is a module's."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from processes import ROOT

TYPE = re.compile(r"[A-Z]\w*[a-z]\w*")
"""How a type is named; a type variable is one letter, a constant has no small one."""

FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "aotc").rglob("*.py"))}


def types_of(path: Path) -> Iterator[str]:
    """The public types of a module: its classes, its aliases (`Size = Extent | SizeRange`), and types of `aotc` that it
    imports by another name."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("aotc"):
            yield from (alias.asname for alias in node.names if alias.asname and TYPE.fullmatch(alias.asname))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (target.id for target in targets if isinstance(target, ast.Name) and TYPE.fullmatch(target.id))


def test_a_public_type_s_name_is_defined_once() -> None:
    homes = defaultdict(list)
    for name, path in FILES.items():
        for defined in types_of(path):
            homes[defined].append(name)
    assert len(homes) > 500
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_a_module_s_name_is_defined_once() -> None:
    """But for those that are named after something else: modules of the command line after their commands, those of
    `runtime/explain` after the modules whose refusals they explain."""
    named_after = ("aotc/cli/", "aotc/runtime/explain/")
    homes = defaultdict(list)
    for name, path in FILES.items():
        if path.stem not in ("__init__", "__main__") and not name.startswith(named_after):
            homes[path.stem].append(name)
    assert len(homes) > 300
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
