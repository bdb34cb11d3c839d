"""What fixes a part that differs: an option of Inductor, or leaving out a patch of aotc or a decomposition of torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from aotc.compiler.patches.machinery.registry import PATCHES
from aotc.compiler.wrong_code.bisection_records import Remedy
from aotc.compiler.wrong_code.lowering import CompileOverrides, Lowering, LoweringStep
from aotc.compiler.wrong_code.search import difference
from aotc.compiler.wrong_code.subgraphs import Part

NO_FUSION = {
    "max_fusion_size": 1,
    "epilogue_fusion": False,
    "realize_opcount_threshold": 0,
    "realize_reads_threshold": 0,
}
"""Options with which Inductor makes a kernel of each operator, as far as it can."""


class _Option(NamedTuple):
    name: str
    options: dict[str, Any]
    steps: tuple[LoweringStep, ...]
    write: str


_OPTIONS = (
    _Option(
        "emulate_precision_casts",
        {"emulate_precision_casts": True},
        ("lowered",),
        "options: {emulate_precision_casts: true}",
    ),
    _Option(
        "fallback_random", {"fallback_random": True}, ("decomposed", "lowered"), "options: {fallback_random: true}"
    ),
    _Option(
        "no autotuning", {"max_autotune": False, "coordinate_descent_tuning": False}, ("lowered",), "mode: default"
    ),
    _Option(
        "no fusion",
        NO_FUSION,
        ("lowered",),
        f"options: {{{', '.join(f'{name}: {str(value).lower()}' for name, value in NO_FUSION.items())}}}",
    ),
)


def remedies(lowering: Lowering, step: LoweringStep, part: Part, whole: Part) -> Iterator[Remedy]:
    """Changes with which the part is right, until one mends the whole, too."""

    def mends(change: CompileOverrides, of: Part) -> bool:
        try:
            return difference(lowering.changed(change), step, of) is None
        except Exception:  # what cannot be compiled so is not mended
            return False

    for option in _OPTIONS:
        change = CompileOverrides(options=option.options)
        is_set = all(lowering.options.get(name) == value for name, value in option.options.items())
        if step in option.steps and not is_set and mends(change, part):
            remedy = Remedy(f"`{option.name}`", option.write, mends(change, whole))
            yield remedy
            if remedy.whole:
                return
    if operators := _with_decompositions(part):
        change = CompileOverrides(kept=frozenset(operators))
        if mends(change, part):
            names = ", ".join(map(str, operators))
            yield Remedy(f"torch's own kernel of {names}, in the place of its decomposition", "", mends(change, whole))
            return
    for name in _patches(lowering, part, mends):
        can_be_off = next(patch.can_be_off for patch in PATCHES if patch.name == name)
        write = f"patches: {{{name}: false}}" if can_be_off else ""
        remedy = Remedy(
            f"leaving out aotc's patch `{name}`", write, mends(CompileOverrides(off=frozenset({name})), whole)
        )
        yield remedy
        if remedy.whole:
            return


def _patches(lowering: Lowering, part: Part, mends: Any) -> Iterator[str]:
    """The patches that break the part: without one of them it is right. By halving, since each try compiles."""
    suspects = lowering.patches()
    if not suspects or not mends(CompileOverrides(off=frozenset(suspects)), part):
        return
    while len(suspects) > 1:
        first = suspects[: len(suspects) // 2]
        suspects = first if mends(CompileOverrides(off=frozenset(first)), part) else suspects[len(first) :]
    if mends(CompileOverrides(off=frozenset(suspects)), part):
        yield suspects[0]


def _with_decompositions(part: Part) -> list[Any]:
    """The operators of a part that Inductor decomposes."""
    from torch._inductor import decomposition

    targets = [node.target for node in part.graph.graph.nodes if node.op == "call_function"]
    return [target for target in dict.fromkeys(targets) if target in decomposition.decompositions]


def where_decomposed(part: Part) -> str:
    """Where the decompositions of a part's operators are defined, as text."""
    from torch._inductor import decomposition

    places = []
    for target in _with_decompositions(part):
        function = inspect.unwrap(decomposition.decompositions[target])
        if (code := getattr(function, "__code__", None)) is not None:
            name = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
            places.append(f"{target} is decomposed by `{function.__name__}` at {name}")
    return "; ".join(places)
