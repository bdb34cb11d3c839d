"""Buckets with ranges: the dynamic shapes for torch.export, and the conditions on sizes that it finds."""

from __future__ import annotations

import ast
import math
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from aotc.amounts import listed
from aotc.compiler.capture.ranges.bucket_proposals import proposal, sizes_of, split_sizes
from aotc.compiler.explain_failure import lines_shown
from aotc.errors import BuildError
from aotc.expressions import Expression
from aotc.models.calls import fill, passed
from aotc.records import Bucket, Dims, Signature, Size, SizeRange, TensorLeaf, has_range, tuned_dims

SHOWN = 3
"""The number of conditions, and of refused sizes, that a message lists."""


def dynamic_shapes(signature: Signature, bucket: Bucket) -> dict[str, Any] | None:
    """torch.export's `dynamic_shapes` by parameter name, or None for a bucket of fixed sizes."""
    if not has_range(bucket):
        return None
    dims = {name: _dim(name, size) for name, size in bucket.items()}
    shapes = [
        {axis: _axis(entry, dims) for axis, entry in enumerate(leaf.shape)} if isinstance(leaf, TensorLeaf) else None
        for leaf in signature.leaves
    ]
    return {parameter.name: fill(parameter.tree, shapes) for parameter in passed(signature)}


def _dim(name: str, size: int | SizeRange) -> Any:
    """A fixed size itself, a range as torch.export's Dim; `multiple_of` becomes a derived Dim, so export knows it."""
    if isinstance(size, int):
        return size
    step = size.multiple_of
    low, high = -(-size.min // step), size.max // step
    if low == high:
        return low * step
    if step == 1:
        return torch.export.Dim(name, min=low, max=high)
    return step * torch.export.Dim(f"{name}_over_{step}", min=low, max=high)


def _axis(entry: int | str, dims: Mapping[str, Any]) -> Any:
    """The size of an axis, for torch.export. Its dims cannot be computed from several others: for `seq + seq2` it gets
    a size of its own, and finds a condition where the model needs that size to be the sum. The signature's shapes,
    which every call compares, meet such a condition."""
    if isinstance(entry, int):
        return None
    expression = Expression(entry)
    if _is_of_several(expression, dims):
        return torch.export.Dim.AUTO
    size = expression.evaluate(dims)
    return None if isinstance(size, int) else size


# -- conditions that export found -------------------------------------------------------------------------------------


def conditions(guards: Iterable[str], signature: Signature, bucket: Bucket) -> tuple[str, ...]:
    """The conditions on sizes that export found, over the manifest's dims.

    They come from the exported program's guards (plain Python over `L['x'].size()[0]`). Conditions without a range are
    left out, since fixed sizes are compared anyway. A condition over several dims is kept in the variant and checked on
    every call. Raises BuildError for a guard that cannot be written over dims, and for a condition over one dim that
    refuses a size of the bucket: the manifest promises that size.
    """
    if not has_range(bucket):
        return ()
    found = {condition.text: condition for condition in _sizes_of_two_or_more(signature, bucket)}
    for guard in guards:
        if ".size()" not in guard:
            continue
        try:
            condition = _in_dims(guard, signature)
        except (KeyError, IndexError, ValueError) as error:
            raise BuildError(
                f"export found a condition that aotc cannot use as a guard: {guard}",
                hint="list fixed buckets instead of the range",
                stage="export",
            ) from error
        if _compares_with_itself(condition.text):
            continue  # two axes that the manifest gives the same size
        if any(isinstance(bucket.get(name), SizeRange) for name in condition.names):
            found[condition.text] = condition
    _refuse_narrower(list(found.values()), bucket)
    return tuple(found)


def _sizes_of_two_or_more(signature: Signature, bucket: Bucket) -> Iterator[Expression]:
    """The conditions that no size of several dims is 0 or 1: of `Dim.AUTO`, torch.export takes that for granted."""
    least = {name: size.min if isinstance(size, SizeRange) else size for name, size in bucket.items()}
    entries = (entry for leaf in signature.leaves if isinstance(leaf, TensorLeaf) for entry in leaf.shape)
    for entry in dict.fromkeys(entries):
        if isinstance(entry, int) or not _is_of_several(Expression(entry), bucket):
            continue
        grows = not re.search(r"[^\w\s+*()]|\bm(in|ax)\b", entry)  # sums and products, least where their dims are
        if not (grows and Expression(entry).evaluate(least) >= 2):
            yield Expression(f"({entry}) >= 2")


def _is_of_several(expression: Expression, sizes: Mapping[str, Any]) -> bool:
    return sum(not isinstance(sizes[name], int) for name in expression.names) > 1


def _compares_with_itself(text: str) -> bool:
    """Whether the condition is trivial, such as `seq == seq` or `-1 * seq >= -1 * seq`."""
    match ast.parse(text, mode="eval").body:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.LtE() | ast.GtE()], comparators=[right]):
            return ast.dump(left) == ast.dump(right)
    return False


_SIZE = re.compile(r"""L(?P<path>(?:\[(?:'[^']*'|"[^"]*"|\d+)\])+)\.size\(\)\[(?P<axis>\d+)\]""")


def _in_dims(guard: str, signature: Signature) -> Expression:
    """A guard of export as a condition over dims. Raises KeyError, IndexError or ValueError for any other guard."""
    return Expression(_text_in_dims(guard, signature))


def _text_in_dims(guard: str, signature: Signature) -> str:
    indices = range(len(signature.leaves))
    trees = {parameter.name: fill(parameter.tree, indices) for parameter in signature.parameters}
    shapes = {
        keystr(path): leaf.shape  # `['batch']['ids']` and `['xs'][0]`, as export writes them
        for path, index in tree_flatten_with_path(trees)[0]
        if isinstance(leaf := signature.leaves[index], TensorLeaf)
    }

    def entry(match: re.Match[str]) -> str:
        size = shapes[match["path"]][int(match["axis"])]
        return str(size) if isinstance(size, int) or size.isidentifier() else f"({size})"

    text = _SIZE.sub(entry, guard).replace("torch.sym_max(", "max(").replace("torch.sym_min(", "min(")
    try:
        return ast.unparse(ast.parse(text, mode="eval"))
    except SyntaxError as error:
        raise ValueError(f"`{text}` is not an expression") from error


class _Computed:
    """A guard that no record can hold, such as `round(n / 2) != 1`, to find the sizes that it refuses. Python evaluates
    it, since torch wrote it."""

    def __init__(self, text: str, bucket: Bucket) -> None:
        self.text = text
        tree = ast.parse(text, mode="eval")
        self.names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in bucket)
        self._code = compile(tree, "<a guard of torch.export>", "eval")

    def evaluate(self, sizes: Mapping[str, int]) -> bool:
        return bool(eval(self._code, {"math": math, "torch": torch}, dict(sizes)))


def _needed(guard: str, signature: Signature, bucket: Bucket) -> Expression | _Computed | None:
    """A guard of export as a condition; None for one that cannot be evaluated, or refuses the captured sizes."""
    try:
        text = _text_in_dims(guard, signature)
    except (KeyError, IndexError, ValueError):
        return None
    try:
        return Expression(text)
    except ValueError:
        computed = _Computed(text, bucket)
    try:
        return computed if computed.evaluate(tuned_dims(bucket)) else None
    except Exception:  # a function that is not Python's
        return None


def _refuse_narrower(needed: Sequence[Expression | _Computed], bucket: Bucket) -> None:
    """Raises BuildError where a dim's own conditions refuse a size of its range."""
    for dim, sizes in bucket.items():
        if isinstance(sizes, SizeRange) and (problem := _narrowed(dim, sizes, needed, bucket)):
            raise problem


def _narrowed(
    dim: str, sizes: SizeRange, needed: Sequence[Expression | _Computed], bucket: Bucket
) -> BuildError | None:
    fixed = tuned_dims({name: size for name, size in bucket.items() if isinstance(size, int)})
    own = [condition for condition in needed if dim in condition.names and condition.names <= {dim, *fixed}]

    def takes(size: int) -> bool:
        return all(holds(condition, {**fixed, dim: size}) for condition in own)

    refused = [size for size in sizes_of(sizes) if not takes(size)]
    if not refused:
        return None
    breaking = {
        _plainly(condition, dim, sizes, fixed)
        for condition in own
        if any(not holds(condition, {**fixed, dim: size}) for size in refused)
    }
    reasons = sorted(breaking, key=lambda text: (len(text), text))
    return _split_error(dim, sizes, refused, reasons, split_sizes(sizes, takes))


def _plainly(condition: Expression | _Computed, dim: str, sizes: SizeRange, fixed: Dims) -> str:
    """A condition as text, divisibility simplified: `2 * seq % 16 == 0` as `seq % 8 == 0`."""
    every = sizes_of(sizes)
    accepted = [size for size in every if holds(condition, {**fixed, dim: size})]
    step = math.gcd(*accepted)
    divisible = step > 1 and len(accepted) > 1 and accepted == [size for size in every if size % step == 0]
    return f"{dim} % {step} == 0" if divisible else condition.text


def holds(condition: Expression | _Computed, dims: Mapping[str, int]) -> bool:
    try:
        return bool(condition.evaluate(dims))
    except (ArithmeticError, ValueError):  # it has no value at these sizes
        return False


def _split_error(
    dim: str, sizes: SizeRange, refused: Sequence[int], reasons: Sequence[str], instead: tuple[Size, ...]
) -> BuildError:
    edit = proposal(dim, instead)
    shown = listed([*map(str, refused)], SHOWN)
    because = f": it needs {' and '.join(f'`{reason}`' for reason in reasons[:SHOWN])}" if reasons else ""
    return BuildError(
        f"the model does not take all of `{dim}: {sizes}` as one graph{because}; the range also holds {shown}",
        hint=f"edit the manifest's buckets: {edit}" if edit else "list fixed buckets instead of the range",
        stage="export",
        dim=dim,
        refused=list(refused[:SHOWN]),
        instead=instead,
    )


# -- ranges that export refused ---------------------------------------------------------------------------------------


@contextmanager
def constraints_explained(module: nn.Module, signature: Signature, bucket: Bucket) -> Iterator[None]:
    """While active, torch.export's errors about a range become a BuildError about the manifest's dim; in its errors
    about a tensor's values, dims replace torch's symbols."""
    from torch._dynamo.exc import UserError
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        yield
    except GuardOnDataDependentSymNode as error:
        error.args = (_in_words(error, signature), *error.args[1:])
        raise
    except UserError as error:
        if (problem := explain_constraints(str(error), signature, bucket)) is None:
            raise
        if constant := _CONSTANT.search(str(error)):
            if any(isinstance(part, nn.RNNBase) for part in module.modules()):
                problem.hint += _UNROLLED
            elif line := _line_of_constant(error, _public(constant["dim"]), signature):
                problem.hint += (
                    _UNROLLED_LOOP if re.search(r"\bfor\b.+\b(range|enumerate|zip)\(|\bwhile\b", line) else ""
                )
                problem.hint += _KEPT if re.search(r"\b(int|float|round|math)\b", line) else ""
                problem = problem.with_fields(source=line)
        raise problem from error


_UNROLLED = (
    ". If the dim is a sequence length: under autocast, torch.export unrolls nn.LSTM, nn.GRU and nn.RNN into a graph "
    "of one length. Call such layers outside autocast, or leave them to eager, with `regions` for others"
)


_KEPT = ". Or keep it a size there: `//`, `*`, `min` and `max` of sizes give sizes, `int` and `math` give numbers"

_UNROLLED_LOOP = (
    ". Or compute without the loop, which a graph holds unrolled, for one number of turns: by operators on whole "
    "tensors (`cumsum`, products of matrices), or leave this part to eager, with `regions` for others"
)

_VALUE = re.compile(r"\bz?[uf]+\d+\b")
"""torch's symbols for values of tensors."""


def _in_words(error: BaseException, signature: Signature) -> str:
    """torch's message about a condition on a tensor's values, with dims in place of torch's symbols for sizes."""
    text = re.sub(r"  \(Size-like symbols: [^)]*\)", "", str(error))
    environment = _environment(error)
    for symbol in environment.var_to_sources if environment is not None else ():
        if size := _size_of(symbol, environment, signature):
            text = re.sub(rf"\b{re.escape(str(symbol))}\b", size if size.isidentifier() else f"({size})", text)
    first, newline, rest = text.partition("\n")
    if values := sorted({*_VALUE.findall(first)}):
        are = "is a value" if len(values) == 1 else "are values"
        first = f"{first.rstrip('. ')}, where {' and '.join(values)} {are} in a tensor"
    return first + newline + rest


def _line_of_constant(error: BaseException, dim: str, signature: Signature) -> str:
    """The line of the model that made the dim's size a number, or the last that demanded an equation of it; "" where
    none is known. torch's own words for the place, `framework_loc`, may be a line of ours that calls the operator."""
    environment = _environment(error)
    if environment is None:
        return ""
    symbols = {symbol for symbol in environment.var_to_sources if _size_of(symbol, environment, signature) == dim}
    places = [place for symbol, place in environment.replacements_slocs.items() if symbol in symbols]
    equations = [guard for guard in environment.guards if getattr(guard.expr, "is_Equality", False)]
    places += [guard.sloc for guard in reversed(equations) if symbols & guard.expr.free_symbols]
    frames = (place.framework_loc for place in places)
    lines = (lines_shown([frame]) for frame in frames if isinstance(frame, traceback.FrameSummary))
    return next(filter(None, lines), "")


def _environment(error: BaseException) -> Any:
    """The ShapeEnv of the capture that failed, or None."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    cause: BaseException | None = error
    while cause is not None:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if isinstance(found := frame.f_locals.get("self"), ShapeEnv):
                return found
        cause = cause.__context__
    return None


def _size_of(symbol: Any, environment: Any, signature: Signature) -> str:
    """The size that one of torch's symbols stands for, in dims; "" where the symbol is not one."""
    try:
        name: Any = environment.var_to_sources[symbol][0].name
        return _in_dims(name() if callable(name) else name, signature).text  # until torch 2.12 it is a method
    except (KeyError, IndexError, ValueError):
        return ""


_GUARD = re.compile(r"satisfy the generated guard (?P<guard>.+?)\.?$", re.MULTILINE)
_CONSTANT = re.compile(r"You marked (?P<dim>\w+) as dynamic but your code specialized it to be a constant \((\d+)\)")
_RELATED = re.compile(r"must always be related to the values of .+ by (?P<dim>\w+) = (?P<by>.+?)\.?$", re.MULTILINE)
_EQUAL = re.compile(r"The values of (?P<one>\w+) = .+ and (?P<other>\w+) = .+ must always be equal")


def explain_constraints(text: str, signature: Signature, bucket: Bucket) -> BuildError | None:
    """The BuildError for torch.export's "Constraints violated", or None for another text."""
    if "onstraints violated" not in text:
        return None
    if match := _EQUAL.search(text):
        one, other = sorted((_public(match["one"]), _public(match["other"])))
        return BuildError(
            f"the model needs `{one}` and `{other}` to be equal",
            hint=f"use one dim for both in the inputs' shapes, `{one}`",
            stage="export",
            related=(other, one),
        )
    if match := _RELATED.search(text):
        return _related(match["dim"], match["by"])
    if match := _CONSTANT.search(text):
        return _specialized(_public(match["dim"]), int(match[2]), bucket)
    found = (_needed(match["guard"], signature, bucket) for match in _GUARD.finditer(text))
    needed = [condition for condition in found if condition is not None]
    for dim, sizes in bucket.items():
        if isinstance(sizes, SizeRange) and (problem := _narrowed(dim, sizes, needed, bucket)):
            return problem
    return _suggested(text.partition("uggested fixes")[2], bucket) or _not_proved(text, needed, bucket)


def _not_proved(text: str, needed: Sequence[Expression | _Computed], bucket: Bucket) -> BuildError | None:
    """The BuildError that names the ranges which torch.export refuses, whatever its reason is."""
    named = re.search(r"onstraints violated \((?P<dims>[\w, ]+)\)", text)
    dims = dict.fromkeys(map(_public, named["dims"].split(", "))) if named else {}
    ranges = {dim: sizes for dim in dims if isinstance(sizes := bucket.get(dim), SizeRange)}
    if not ranges:
        return None
    reasons = [f"`{condition.text}`" for condition in needed[:SHOWN]] or re.findall(r"^\s*- (.+?)\.?$", text, re.M)[:1]
    because = f": {' and '.join(reasons)}" if reasons else ""
    return BuildError(
        f"torch.export cannot prove that one graph holds for all of "
        f"{' and '.join(f'`{dim}: {sizes}`' for dim, sizes in ranges.items())}{because}",
        hint="narrow the range, or list sizes in its place in the manifest's buckets: "
        + " and ".join(f"`{dim}: {sizes.tune_at}`, …" for dim, sizes in ranges.items()),
        stage="export",
    )


_FIX = re.compile(r"^\s*(?P<name>\w+) = (?P<value>.+)$", re.MULTILINE)
_LIMITS = re.compile(r"Dim\('\w+'(?:, min=(?P<min>\d+))?(?:, max=(?P<max>\d+))?\)")


def _suggested(fixes: str, bucket: Bucket) -> BuildError | None:
    """The BuildError for the first of torch.export's suggested fixes that changes a range of the bucket."""
    values = {match["name"]: match["value"].strip() for match in _FIX.finditer(fixes)}
    for name, value in values.items():
        dim, step = _public(name), _step(name)
        sizes = bucket.get(dim)
        if not isinstance(sizes, SizeRange):
            continue
        if value.isdigit():
            return _specialized(dim, int(value) * step, bucket)
        if times := re.fullmatch(rf"(\d+)\s*\*\s*_{name}", value):
            value, step = values.get(f"_{name}", ""), step * int(times[1])
        if found := _LIMITS.fullmatch(value):
            low, high = (int(found[end]) * step if found[end] else getattr(sizes, end) for end in ("min", "max"))
            condition = Expression(f"{dim} % {step} == 0 and {low} <= {dim} <= {high}")
            if problem := _narrowed(dim, sizes, [condition], bucket):
                return problem
    return None


def _related(name: str, by: str) -> BuildError:
    """The error of a dim whose size must follow from other dims."""
    size = re.sub(r"(\w+)_over_(\d+)", r"(\1 // \2)", by)
    dim, size = _public(name), f"{_step(name)}*({size})" if _step(name) > 1 else size
    return BuildError(
        f"the model needs `{dim}` to be `{size}`",
        hint=f'write "{size}" for `{dim}` in the inputs\' shapes, and leave `{dim}` out of the buckets',
        stage="export",
        related=(dim, size),
    )


def _public(name: str) -> str:
    """The manifest's dim for a name that `_dim` has made."""
    return re.sub(r"_over_\d+$", "", name)


def _step(name: str) -> int:
    """The `multiple_of` in a name that `_dim` has made."""
    return int(found[1]) if (found := re.search(r"_over_(\d+)$", name)) else 1


def _specialized(dim: str, constant: int, bucket: Bucket) -> BuildError | None:
    sizes = bucket.get(dim)
    if not isinstance(sizes, SizeRange):
        return None
    size = constant * (sizes.multiple_of if constant * sizes.multiple_of == sizes.tune_at else 1)
    if constant < 2:
        larger = next((size for size in sizes_of(sizes) if size > max(1, sizes.tune_at)), sizes.max)
        return BuildError(
            f"`{dim}: {sizes}` is tuned at {sizes.tune_at}, and torch.export makes a size of 0 or 1 a constant",
            hint=f"tune the range at a larger size, like `tune_at: {larger}`",
            stage="export",
            dim=dim,
            instead=(msgspec.structs.replace(sizes, tune_at=larger) if larger > 1 else sizes.max,),
        )
    return BuildError(
        f"the captured graph holds for `{dim}` of {size} only, the manifest has {sizes}: a size became a number in it, "
        "whatever eager takes",
        hint=f"edit the manifest's buckets: `{dim}: {size}`, and a bucket for each other size that is called",
        stage="export",
        dim=dim,
        instead=(size,),
    )
