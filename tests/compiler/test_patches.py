"""The patches of torch: the list is all that is replaced, and a torch that is not as it says is refused."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT
from torch._inductor.virtualized import V

import aotc
from aotc.advisories import Feed, own_feed, release, within
from aotc.compiler.patches.machinery import apply
from aotc.compiler.patches.machinery.apply import left_out, patched, untested, usable
from aotc.compiler.patches.machinery.graph_operators import operators_of
from aotc.compiler.patches.machinery.pages import feed_of, pages
from aotc.compiler.patches.machinery.patch import Patch, PatchStage, chosen, entry_of, flaw_of, operator, parts_of
from aotc.compiler.patches.machinery.registry import HOOKS, PATCHES

COMPILER = ROOT / "aotc" / "compiler"


def example(first: int, second: int, *more: int, third: int = 0) -> None: ...


def named(function: Any, name: str) -> Any:
    function.__name__ = name
    return function


Place = tuple[int, Any]
"""The id of a module, a class, an object or a table, and the name of what it holds."""


def owners() -> dict[int, Any]:
    """What torch's modules consist of: themselves, their classes, objects and tables."""
    from torch._inductor.decomposition import fast_random_decomps

    modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] == "torch"]
    values = [value for module in modules for value in [*vars(module).values()]]
    kinds = dict | type | types.FunctionType
    parts = [value for value in values if isinstance(value, kinds) or type(value).__module__.startswith("torch.")]
    everything = [*modules, *parts, fast_random_decomps()]
    return {id(owner): owner for owner in everything if isinstance(owner, dict) or hasattr(owner, "__dict__")}


def held(owners: Mapping[int, Any]) -> dict[Place, Any]:
    tables = {place: owner if isinstance(owner, dict) else vars(owner) for place, owner in owners.items()}
    return {(place, name): value for place, table in tables.items() for name, value in [*table.items()]}


def replaced_at(target: str) -> set[Place]:
    from torch._inductor import decomposition

    module, path, key, _ = parts_of(target)
    if module is None:
        tables: Any = (decomposition.decompositions, decomposition.fast_random_decomps())
        return {(id(table), operator(path)) for table in tables}
    *parents, name = path.split(".")
    owner: Any = functools.reduce(getattr, parents, importlib.import_module(module))
    return {(id(getattr(owner, name)), entry_of(key))} if key else {(id(owner), name)}


@pytest.mark.filterwarnings("ignore")  # what torch says of its deprecated attributes, which are looked at too
@pytest.mark.parametrize("stage", ["export", "export again", "compile"])
def test_all_that_a_patch_replaces_is_on_the_list(
    stage: PatchStage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    patches = [patch for patch in usable(chosen(PATCHES, "cuda", {}), ()) if patch.stage == stage]
    with patched(stage, "cuda", graph=torch.fx.Graph()):
        pass  # whatever is imported only when a patch is applied
    graph, everything = torch.fx.Graph(), owners()
    before, differing = held(everything), list[str]()
    for patch in patches:
        listed = {place for target in patch.targets for place in replaced_at(target)}
        with patch.apply(graph):
            patched_torch, handler = held(everything), V.choices
        changed = {place for place, value in patched_torch.items() if before.get(place) is not value}
        assert changed <= listed, (patch.name, [name for _, name in changed - listed])
        # A handler of choices replaces nothing; of a graph without ranges, nothing is replaced.
        assert changed or handler is not V.choices or patch.of_graph, patch.name
        compared = [differs(before[place], patched_torch[place], place[1]) for place in changed if place in before]
        differing += [f"{patch.name}: {flaw}" for flaw in compared if flaw]
    assert differing == [], "\n".join(differing)
    assert held(everything) == before


def differs(before: Any, after: Any, entry: Any = None) -> str:
    """How a replacement can be told from what it replaces by its name, by what it is called on, or by a call that it
    does not take; "" if it cannot. The entry of an operator in a table takes the calls of the operator's schema."""
    if type(before) is not type(after) and {type(before), type(after)} & {staticmethod, classmethod}:
        return f"{before} is replaced by {after}"
    old, new = (getattr(value, "__func__", value) for value in (before, after))
    if not callable(old) or not hasattr(old, "__name__"):
        return ""
    if old.__name__ != new.__name__:
        return f"{old.__name__} is replaced by {new.__name__}"
    try:
        taken = inspect.signature(old).parameters.values()
    except ValueError:  # it is of C
        return ""
    if isinstance(entry, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        taken = parameters_of(entry, len(taken))
    given = inspect.signature(new, follow_wrapped=False)
    for call in calls_of(list(taken)):
        try:
            given.bind(*call[0], **call[1])
        except TypeError as error:
            return f"{old.__name__}({', '.join(map(str, taken))}) is replaced by {given}: {error}"
    return ""


def parameters_of(operator: Any, count: int) -> list[inspect.Parameter]:
    """Those of an operator's schema; an operator that takes functions has none, and is called by position."""
    kinds = inspect.Parameter
    if not isinstance(operator, torch._ops.OpOverload):
        return [kinds(f"at_{place}", kinds.POSITIONAL_ONLY) for place in range(count)]
    return [
        kinds(
            argument.name,
            kinds.KEYWORD_ONLY if argument.kwarg_only else kinds.POSITIONAL_OR_KEYWORD,
            default=argument.default_value if argument.has_default_value() else kinds.empty,
        )
        for argument in operator._schema.arguments
    ]


def calls_of(parameters: list[inspect.Parameter]) -> list[tuple[list[Any], dict[str, Any]]]:
    """Calls that a function takes: by position and by name, with all its parameters and with the required ones."""
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    single = [each for each in parameters if each.kind not in stars]
    if not single:  # it takes any
        return []
    found = []
    for some in single, [each for each in single if each.default is each.empty]:
        placed = [each for each in some if each.kind in by_place]
        for positions in range(len([each for each in placed if each.kind is by_place[0]]), len(placed) + 1):
            named = [*placed[positions:], *(each for each in some if each not in placed)]
            if placed and not positions:
                continue  # `self`, and the tensor of an operator, are always given by position
            found.append(([0] * positions, {each.name: 0 for each in named}))
    return found


@pytest.mark.parametrize(
    ("after", "flaw"),
    [
        (lambda first, second, *more, third=0: None, "example is replaced by <lambda>"),
        (named(lambda first, second, *more, third=0: None, "example"), ""),
        (named(lambda *args, **kwargs: None, "example"), ""),
        (named(lambda first, second: None, "example"), "got an unexpected keyword argument 'third'"),
        (named(lambda first, other, *more, third=0: None, "example"), "missing a required argument: 'other'"),
        (staticmethod(example), "is replaced by <staticmethod"),
    ],
)
def test_a_replacement_that_can_be_told_from_the_original_is_found(after: Any, flaw: str) -> None:
    found = differs(example, after)
    assert flaw in found if flaw else not found


def test_torch_is_replaced_by_patches_and_listed_hooks_alone() -> None:
    """Any other module of the compiler that replaces an attribute would be a patch that is on no list."""
    hooks = {
        *HOOKS,
        "autotune/inductor_hooks.py",
        "autotune/benchmarks.py",
        "workers/inductor_progress.py",
    }
    # aotc's own attributes, tqdm's, Python's print, and a default of torch.distributions. `build_only` notes who reads
    # that default, so it cannot be a hook's target, which is read.
    others = {"workers/module_holder.py", "toolchain/pattern_warmup.py", "capture/analysis/build_only.py"}
    using = {
        path.relative_to(COMPILER).as_posix()
        for path in COMPILER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in ("unittest", "aotc.compiler.scoped")
    } - {"scoped.py"}
    of_patches = {name for name in {*hooks, *using} if name.startswith("patches/")}
    assert using - of_patches == (hooks - of_patches) | others


def test_the_pages_are_written_from_the_patches() -> None:
    """`python -m aotc.compiler.patches.machinery.pages` makes them so."""
    for path, text in pages().items():
        assert path.read_text() == text, path


def test_the_text_of_a_patch_has_a_title() -> None:
    """A bug's title names the part of torch, as those of torch's issues do."""
    titles = {patch.name: patch.title for patch in PATCHES}
    assert {name for name, title in titles.items() if not title.endswith(".") or "|" in title} == set()
    assert {patch.name for patch in PATCHES if patch.title.startswith("[") != (patch.kind == "bug")} == set()


def operators_of_torch() -> set[str]:
    """As `operators_of` names them, with the functions of Python that a graph of sizes calls."""
    names = {name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}
    higher = {f"higher_order.{name}" for name in torch._ops._higher_order_ops}
    return {*names, *higher, "builtins.round", "math.floor", "operator.floordiv"}


def test_a_bug_says_what_it_does_to_which_units() -> None:
    """And what else a patch is for, does nothing to any."""
    known, advised = operators_of_torch(), [patch for patch in PATCHES if patch.severity in ("silent", "crash")]
    assert {patch.name for patch in PATCHES if (patch.severity is not None) != (patch.kind == "bug")} == set()
    assert {patch.name for patch in PATCHES if bool(patch.advisory) != (patch in advised)} == set()
    for patch in PATCHES:
        needed = patch.operators if patch.is_for("cpu") or patch.is_for("cuda") else ()
        # Functions of Inductor's passes lie within others; the reproducers show that they are so called.
        needed = [start for start in needed if not start.startswith("torch._inductor.")]
        unknown = [start for start in needed if not any(name.startswith(start) for name in known)]
        assert not unknown, f"{patch.name}: this torch has no operator that begins with {unknown}"
        assert all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in patch.dtypes), patch.name
        assert release(patch.since) <= release(aotc.__version__), patch.name
        assert patch.operators or not patch.complete, patch.name


def test_an_id_names_one_advisory_for_good() -> None:
    ids = [patch.advisory for patch in PATCHES if patch.advisory]
    assert len(ids) == len({*ids})
    assert {each for each in ids if not re.fullmatch(r"AOTC-20\d\d-\d{4}", each)} == set()
    first, second, *_ = (patch for patch in PATCHES if patch.advisory)
    own = own_feed()
    assert feed_of([], own) == own, "an advisory whose patch is removed is kept"
    with pytest.raises(ValueError, match=f"of `{second.name}` is the id of `{first.name}`: take a new one"):
        feed_of([dataclasses.replace(second, advisory=first.advisory)], own)


def test_an_advisory_that_changes_has_the_time_of_the_change() -> None:
    (patch, *_), now = (patch for patch in PATCHES if patch.advisory), datetime(2030, 1, 2, tzinfo=UTC)
    (before,) = feed_of([patch], Feed(1, ()), datetime(2029, 1, 1, tzinfo=UTC)).advisories
    (same,) = feed_of([patch], Feed(1, (before,)), now).advisories
    (changed,) = feed_of([dataclasses.replace(patch, dtypes=("int8",))], Feed(1, (before,)), now).advisories
    assert same == before and before.published == before.modified == "2029-01-01T00:00:00Z"
    assert (changed.published, changed.modified) == ("2029-01-01T00:00:00Z", "2030-01-02T00:00:00Z")


@pytest.mark.parametrize(
    ("bounds", "version", "expected"),
    [
        (">=2.11", "2.11.0", True),
        (">=2.11,<2.13", "2.12.1+cu130", True),
        (">=2.11,<2.13", "2.13.0a0+git123", False),
        (">=2.15", "2.14.1", False),
        (">=2.15", "3.0.0", True),
    ],
)
def test_bounds_are_of_major_and_minor(bounds: str, version: str, expected: bool) -> None:
    assert within(bounds, version) == expected


class Examples:
    table = {torch.ops.aten.sin.default: example}  # noqa: RUF012

    def method(self, first: int, second: int) -> None: ...


@pytest.mark.parametrize(
    ("target", "flaw"),
    [
        ("example(first, second, *more)", ""),
        ("example(first, ...)", ""),
        ("example(first)", "takes (first, second, *more, third), expected (first)"),
        ("example(second, first)", "takes (first, second, *more, third), expected (second, first)"),
        ("example", ""),
        ("Examples.method(first, second)", ""),
        ("Examples.method(first, second, third)", "takes (first, second), expected (first, second, third)"),
        ("Examples.gone", "has no attribute 'gone'"),
        ("Examples.table[aten.sin.default]", ""),
        ("Examples.table[aten.cos.default]", "<OpOverload(op='aten.cos', overload='default')>"),
    ],
)
def test_a_target_has_the_parameters_that_are_expected(target: str, flaw: str) -> None:
    found = flaw_of(f"{__name__}:{target}")
    assert found.endswith(flaw) if flaw else not found


def test_an_operator_is_looked_at_by_its_schema() -> None:
    assert not flaw_of("aten.cat.default(tensors, dim)")
    assert "takes (tensors, dim), expected (parts)" in flaw_of("aten.cat.default(parts)")
    assert flaw_of("aten.gone.default(self)")


def test_a_torch_without_what_is_replaced_is_one_error_that_names_every_patch_and_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking = [
        Patch("renamed", targets=("torch:gone",), upstream="pytorch#12345"),
        Patch("changed", targets=("torch._inductor.lowering:view(y)",)),
        Patch("faster", targets=("torch:gone",), kind="performance"),
    ]
    whole = Patch("whole", targets=("torch:Tensor",))
    monkeypatch.setattr(apply, "HOOKS", {"toolchain/some.py": ("torch._inductor.cpp_builder:CppBuilder.gone",)})
    with pytest.raises(
        aotc.BuildError, match=f"torch {re.escape(torch.__version__)} is not as aotc's patches"
    ) as caught:
        usable([*lacking, whole], ())
    shown = [issue.message for issue in caught.value.issues]
    assert shown[0].startswith("`renamed` (https://github.com/pytorch/pytorch/issues/12345): torch:gone: ")
    assert shown[1].startswith("`changed` (UPSTREAM.md#changed): torch._inductor.lowering:view takes (x, sizes)")
    assert shown[2].startswith("aotc/compiler/toolchain/some.py: torch._inductor.cpp_builder:CppBuilder.gone: ")
    assert len(shown) == 3
    monkeypatch.setattr(apply, "HOOKS", {})
    assert usable([lacking[2], whole], ()) == [whole]
    (note,) = left_out([lacking[2], whole])
    assert note.startswith("the performance patch `faster` is left out: torch:gone: ")


def test_a_torch_without_what_is_replaced_builds_graphs_that_have_none_of_the_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Patch("loop", targets=("torch:gone",), operators=("higher_order.",), complete=True)
    monkeypatch.setattr(apply, "PATCHES", [loop])

    class Branching(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, [x])

    branching = torch.export.export(Branching(), (torch.ones(2, 2),)).graph_module.graph
    straight = torch.fx.symbolic_trace(torch.nn.Linear(2, 2)).graph
    with patched("export"), patched("compile", graph=straight) as applied:
        (note,) = applied.left_out
    assert note.startswith("the patch `loop` is left out, as the graph has none of its operators: torch:gone: ")
    with pytest.raises(aotc.BuildError, match="`loop`"), patched("compile", graph=branching):
        pytest.fail("built")
    assert {"higher_order.cond", "aten.cos.default"} <= operators_of(branching)


@pytest.mark.parametrize(("version", "warns"), [("2.15.1+cpu", False), ("2.16.0.dev1", True), ("3.0.0", True)])
def test_a_torch_newer_than_what_was_tested_is_told(monkeypatch: pytest.MonkeyPatch, version: str, warns: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert untested().startswith(f"torch {version} is newer than 2.15") if warns else not untested()


def test_a_patch_is_chosen_by_bounds_device_options_and_name() -> None:
    patches = [
        Patch("any", targets=()),
        Patch("old", targets=(), torch=">=2.11,<2.13"),
        Patch("gpu", targets=(), device="cuda"),
        Patch("option", targets=(), wanted=lambda options: "own" not in options),
    ]

    def names(*args: Any, version: str = "2.13.0") -> list[str]:
        return [each.name for each in chosen(patches, *args, version=version)]

    assert names("cpu", {}) == ["any", "option"]
    assert names("cuda", {"own": 1}) == ["any", "gpu"]
    assert names("cpu", {}, {"any"}, version="2.12.1") == ["old", "option"]
