"""Operators × dtypes × lengths × values against eager: what Inductor's code gives at extremes and at a vector's tail.

    python tests/fuzzing/values.py --builds 40 --seed 1                       # a table, and a line for each finding
    python tests/fuzzing/values.py --builds 4 --dtypes int8,uint8 --operators amin,argmax --off reductions_of_int8
    python tests/fuzzing/values.py --builds 9 --target cpu:x86-64-v4          # only compiled, where this CPU lacks it

A build is one library of many expressions (`value_operators.py`) of one dtype and one form, drawn from the seed and
the number of the build; its length is that of a vector, or one less, one more, or a range of all of them. It is called
with values of a dozen kinds: of one sign, at the dtype's limits, NaN, infinities, -0.0, denormals. Eager's result
decides, by the rule of `aotc/models/decided_values.py`. A case is one expression with one input:

    right      nothing that eager decides differs
    WRONG      something does: the operator, the dtype, the form, the values, and the first element
    refused    Inductor or the C++ compiler refuses the expression: none is, but for those of `REFUSED`
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fuzzing.value_operators import ALONG, OF_ONE, OF_TWO, WHOLE  # noqa: E402

from aotc.models.decided_values import first_wrong_value  # noqa: E402

DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
LENGTHS = (1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 65)
"""Those around a vector's elements: 8 and 16 of AVX2 and AVX512, 16 and 32 where all values are of half precision."""

RANGE = (2, 70)
FORMS = ("flat", "strided", "transposed", "broadcast")
REFUSED = {"prod_same": "bool"}
"""Expressions that torch does not compile, with their dtype. A build fails with the operator and its line."""

UNDECIDED = ("modulo", "fmod", "remainder", "div_floor", "floor_by", "add_alpha", "addcmul")
"""Operators that are not called with the kinds of values of `OVERFLOWING`. SLEEF's `fmod` is NaN where the quotient
overflows: in eager only in whole vectors, so that eager's result depends on an element's place. A product may overflow
unless it is added without being rounded."""

OVERFLOWING = ("limits", "large", "denormal", "tiny")


class Expression(NamedTuple):
    """An operator with its operands' places: `name` has no spaces, `call(x, y)` gives a list of tensors."""

    name: str
    call: Callable[[Tensor, Tensor], list[Tensor]]


class Finding(NamedTuple):
    """A case that is not right."""

    operator: str
    dtype: str
    form: str
    length: int
    values: str
    said: str


# -- what is drawn ----------------------------------------------------------------------------------------------------


def expressions() -> dict[str, Expression]:
    found = [Expression(name, _listing(lambda x, y, f=f: f(x))) for name, f in OF_ONE.items()]
    found += [Expression(name, _listing(lambda x, y, f=f: f(x, y))) for name, f in OF_TWO.items()]
    for dim, axis in (-1, "rows"), (0, "columns"):
        found += [
            Expression(f"{name}:{axis}", _listing(lambda x, y, f=f, dim=dim: f(_matrix(x), dim=dim)))
            for name, f in ALONG.items()
        ]
    found += [Expression(f"{name}:all", _listing(lambda x, y, f=f: f(x))) for name, f in WHOLE.items()]
    return {each.name: each for each in found}


def _listing(call: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    return lambda x, y: [part for part in torch.utils._pytree.tree_leaves(call(x, y)) if isinstance(part, Tensor)]


def _matrix(x: Tensor) -> Tensor:
    return x if x.dim() > 1 else torch.stack([x, x.flip(0), x])


def kinds_of_values(dtype: torch.dtype) -> dict[str, Sequence[float]]:
    """The numbers of which inputs are drawn, by the name of their kind."""
    if dtype == torch.bool:
        return {"both": (0, 1), "true": (1,), "false": (0,)}
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        signed = (-1, -2, -3, -7, -20, -100) if info.min else (1,)
        return {
            "small": (0, 1, 2, 3, 5, 7, *signed),
            "positive": range(2, 100),
            "negative": range(-100, -1) if info.min else range(200, 255),
            "limits": (info.min, info.min + 1, info.max - 1, info.max, 0, 1),
            "most": (info.max,),
            "least": (info.min,),
        }
    info = torch.finfo(dtype)
    inf, nan, tiny = torch.inf, torch.nan, info.smallest_normal
    return {
        "ordinary": (0.1, -0.7, 1.5, 2, -3, 0.5, -1, 1, 0.3, 4, -0.25, 10),
        "positive": (0.1, 0.7, 1, 1.5, 2, 3, 8, 11, 20, 50),
        "negative": (-0.1, -0.7, -1, -1.5, -2, -3, -8, -11, -20, -50),
        "special": (nan, inf, -inf, 0.0, -0.0, 1, -1),
        "nan": (nan,),
        "one nan": (1, 2, -1, 0.5, -0.5, 3, 4, 5, nan),
        "infinite": (inf, -inf, 1, -1),
        "inf": (inf,),
        "minus inf": (-inf,),
        "one inf": (1, 2, -1, 0.5, -0.5, 3, 4, 5, inf),
        "zeros": (0.0, -0.0),
        "denormal": (tiny / 2, -tiny / 2, tiny, -tiny, info.smallest_normal * info.eps),
        "limits": (info.max, info.min, info.max / 2, tiny, -tiny, info.eps, 1 + info.eps),
        "large": (info.max / 3, -info.max / 5, info.max**0.75, -(info.max**0.75), info.max**0.5, 100, -100),
        "tiny": (info.eps, -info.eps, info.eps**2, -(info.eps**2), 1e-3, -1e-3, 1e-5),
    }


def drawn(numbers: Sequence[float], length: int, dtype: torch.dtype, form: str, random: Random) -> Tensor:
    """A tensor of `length` along its last axis: [length], or [5, length] where it is transposed."""
    rows = 5 if form == "transposed" else 1
    own = torch.tensor([random.choice(numbers) for _ in range(rows * length)], dtype=dtype)
    return own.reshape(length, rows).T if rows > 1 else own


class Plan(NamedTuple):
    """A library: its dtype, form, length (None for the range) and expressions."""

    dtype: torch.dtype
    form: str
    length: int | None
    chosen: tuple[Expression, ...]


class Wanted(NamedTuple):
    """What is drawn from; `length` 0 is the range, and None, as "" of `form`, any."""

    dtypes: Collection[str] = DTYPES
    operators: Collection[str] = ()
    form: str = ""
    length: int | None = None
    expressions: int = 24
    draws: int = 99


def plan_of(seed: int, number: int, wanted: Wanted) -> Plan:
    """Build `number` of a seed: the dtypes take turns, and each third build is of a range."""
    random = Random(f"{seed} {number}")
    dtype = getattr(torch, [*wanted.dtypes][number % len(wanted.dtypes)])
    form = wanted.form or random.choice(FORMS)
    length = None if random.random() < 0.35 else random.choice(LENGTHS)
    if wanted.length is not None:
        length = wanted.length or None
    operators = wanted.operators
    all_of_them = list(expressions().values())
    if operators:
        all_of_them = [each for each in all_of_them if each.name.partition(":")[0] in operators]
    possible = [
        each
        for each in all_of_them
        if REFUSED.get(each.name.partition(":")[0]) != _short(dtype) and _is_taken(each, dtype, form, length)
    ]
    return Plan(dtype, form, length, tuple(random.sample(possible, min(wanted.expressions, len(possible)))))


def _is_taken(expression: Expression, dtype: torch.dtype, form: str, length: int | None) -> bool:
    """Whether eager computes it for this dtype, and torch.export captures it."""
    numbers = next(iter(kinds_of_values(dtype).values()))
    given = [drawn(numbers, length or 9, dtype, form, Random(seed)) for seed in (1, 2)]
    call = in_form(expression, form)
    try:
        if not call(*given):
            return False
        with torch.device("meta"):
            return bool(call(*(each.to("meta") for each in given)))
    except (RuntimeError, NotImplementedError, IndexError, TypeError):
        return False


def in_form(expression: Expression, form: str) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """The expression of operands as the form has them, from contiguous or transposed inputs."""
    if form == "strided":
        return lambda x, y: expression.call(x.repeat_interleave(2)[::2], y.flip(0))
    if form == "broadcast":
        return lambda x, y: expression.call(x[:, None], y[None, :]) if x.dim() == 1 else expression.call(x, y)
    return expression.call


# -- a build ----------------------------------------------------------------------------------------------------------


class Report:
    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.findings: list[Finding] = []
        self.seconds = 0.0

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        sys.stderr.write(f"WRONG {' | '.join(map(str, finding))}\n")


def run_plan(plan: Plan, random: Random, off: Collection[str], target: str, report: Report, draws: int) -> None:
    """Compile the plan's expressions, call them with values of all kinds, and note what is not right."""
    for chosen, compiled in _compiled(plan, plan.chosen, off, target, report):
        for length in (*LENGTHS, 50) if plan.length is None else (plan.length,):
            if not RANGE[0] <= length and plan.length is None:
                continue
            _compare(plan, chosen, compiled, length, random, report, draws)


def _compare(
    plan: Plan,
    chosen: Sequence[Expression],
    compiled: Callable[..., Any],
    length: int,
    random: Random,
    report: Report,
    draws: int,
) -> None:
    kinds = kinds_of_values(plan.dtype)
    others = list(kinds)
    for kind in kinds if draws >= len(kinds) else random.sample(others, draws):
        other = kind if random.random() < 0.5 else random.choice(others)
        given = [drawn(kinds[each], length, plan.dtype, plan.form, random) for each in (kind, other)]
        results = list(compiled(*given))
        for expression in chosen:
            call = in_form(expression, plan.form)
            expected = call(*given)
            own, results = results[: len(expected)], results[len(expected) :]
            if expression.name.startswith(UNDECIDED) and {kind, other} & {*OVERFLOWING}:
                continue
            with contextlib.redirect_stderr(io.StringIO()):
                found = first_wrong_value(expected, own, lambda leaves, call=call: call(*leaves), given)
            report.counts["right" if found is None else "WRONG"] += 1
            if found:
                values = f"{kind}/{other}"
                report.add(Finding(expression.name, _short(plan.dtype), plan.form, length, values, found.said))


def _compiled(
    plan: Plan, chosen: Sequence[Expression], off: Collection[str], target: str, report: Report
) -> Iterator[tuple[Sequence[Expression], Callable[..., Any]]]:
    """The libraries of the expressions: one, or, where some are refused, those of the others."""
    if not chosen:
        return
    try:
        yield chosen, _library(plan, chosen, off, target)
    except Exception as error:
        if len(chosen) > 1:
            for half in (chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]):
                yield from _compiled(plan, half, off, target, report)
            return
        report.counts["refused"] += 1
        said = next((line for line in str(error).splitlines() if "error" in line.lower()), str(error))[:300]
        finding = Finding(chosen[0].name, _short(plan.dtype), plan.form, plan.length or 0, "-", f"refused: {said}")
        report.add(finding)


def _library(plan: Plan, chosen: Sequence[Expression], off: Collection[str], target: str) -> Callable[..., Any]:
    from aotc.compiler.codegen.instruction_sets import code_for
    from aotc.compiler.patches.machinery.apply import usable
    from aotc.compiler.patches.machinery.reproducing import Torch
    from aotc.machine.targets import parse_target

    usable((), ())  # compares the hooks' targets with torch, one of which `code_for` replaces

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        return [part for each in chosen for part in in_form(each, plan.form)(x, y)]

    numbers = next(iter(kinds_of_values(plan.dtype).values()))
    length = plan.length or 23
    given = [drawn(numbers, length, plan.dtype, plan.form, Random(seed)) for seed in (1, 2)]
    shapes = None
    if plan.length is None:
        size = torch.export.Dim("size", min=RANGE[0], max=RANGE[1])
        shapes = [{given[0].dim() - 1: size}] * 2
    with code_for(parse_target(target)):
        made: Callable[..., Any] = Torch(off).library(function, *given, shapes=shapes, **_OPTIONS)
    return made


_OPTIONS = {"cpp.dynamic_threads": True, "aot_inductor.enable_line_tables": False}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- the command ------------------------------------------------------------------------------------------------------


def run(
    builds: Sequence[int], seed: int, wanted: Wanted, off: Collection[str] = (), target: str = "cpu:x86-64-v3"
) -> Report:
    """Runs these builds of a seed; see `Report`."""
    report, began = Report(), time.process_time()
    for number in builds:
        plan = plan_of(seed, number, wanted)
        run_plan(plan, Random(f"{seed} {number} values"), off, target, report, wanted.draws)
        sys.stderr.write(f"build {number}: {_short(plan.dtype)} {plan.form} {plan.length or 'range'}\n")
    report.seconds = time.process_time() - began
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the number of the first build")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--operators", default="", help="names of value_operators.py; all")
    parser.add_argument("--form", default="", help=f"{', '.join(FORMS)}; any")
    parser.add_argument("--length", type=int, help="0 for the range; any")
    parser.add_argument("--expressions", type=int, default=24, help="of a library")
    parser.add_argument("--draws", type=int, default=99, help="kinds of values for each length; all")
    parser.add_argument("--off", default="", help="patches to leave out")
    parser.add_argument("--target", default="cpu:x86-64-v3")
    options = parser.parse_args()
    dtypes, operators, off = (
        [name for name in each.split(",") if name] for each in (options.dtypes, options.operators, options.off)
    )
    wanted = Wanted(dtypes, operators, options.form, options.length, options.expressions, options.draws)
    report = run(range(options.first, options.first + options.builds), options.seed, wanted, off, options.target)
    by_operator: dict[str, list[Finding]] = collections.defaultdict(list)
    for finding in report.findings:
        by_operator[f"{finding.operator} {finding.dtype}"].append(finding)
    for name, found in sorted(by_operator.items()):
        sys.stdout.write(f"{name}: {len(found)}; {json.dumps(found[0][2:])}\n")
    counts = " | ".join(f"{report.counts[kind]} {kind}" for kind in ("right", "WRONG", "refused"))
    sys.stdout.write(f"| {options.builds} builds | {counts} | {report.seconds:.0f} s of CPU |\n")
    sys.exit(bool(report.findings))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
