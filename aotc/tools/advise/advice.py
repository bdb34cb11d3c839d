"""The advice: which kind of buckets is cheapest, which buckets, and how they compare with the manifest's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from aotc.errors import TraceError
from aotc.records import Bucket, SizeRange, bucket_name
from aotc.tools.advise.arrays import as_shapes, owners, table
from aotc.tools.advise.bucket_dispatch import Dispatch
from aotc.tools.advise.costs import Cost, check_cost
from aotc.tools.advise.cover import Cover
from aotc.tools.advise.partition import cheapest
from aotc.tools.advise.trace import DimSizes, Trace

MOST_BUCKETS = 1000
MOST_SEARCHED = 128
"""The same for a goal of waste with several padded dims."""

PADDED = "padded buckets"
PADDED_AND_RANGE = "padded buckets and a range"
EXACT = "exact buckets"
EXACT_AND_RANGE = "exact buckets and a range"


class Goal(msgspec.Struct, frozen=True):
    """At most so many buckets (`count`), or as few as keep the waste at or below a share (`waste`).

    up_to: where `count` buckets cannot take every call, as few as can, if they are not more than this.
    p95: of those, first those with the least `BucketPlan.p95_cost`; of one padded dim only.
    """

    count: int | None = None
    waste: float | None = None
    up_to: int = 0
    p95: bool = False


class BucketUse(msgspec.Struct, frozen=True):
    """The calls that run in one bucket, their cost, and the share of it that is padding or a range's slower code."""

    name: str
    sizes: Bucket
    calls: int
    cost: float
    waste: float
    lost: float
    """This bucket's share of all that is wasted."""


class BucketPlan(msgspec.Struct, frozen=True):
    """What some buckets do with a trace.

    coverage: the share of calls that a bucket takes. cost: of those, and `ideal`, if each ran in a bucket of its own
    sizes. waste: `1 - ideal / cost`. p95: what 95 % of the covered calls pay at most, over their own cost.
    p95_cost: what 95 % of the covered calls pay at most: a latency, where costs are milliseconds.
    """

    buckets: tuple[BucketUse, ...]
    coverage: float
    ideal: float
    cost: float
    waste: float
    p95: float
    p95_cost: float


class Option(msgspec.Struct, frozen=True):
    """A kind of buckets that was considered."""

    kind: str
    count: int
    waste: float


class Advice(msgspec.Struct, frozen=True):
    """The cheapest buckets that were found.

    kind: how they take calls. bound: no buckets of this kind and number waste less; `optimal` if that is their waste.
    curve: the waste for other numbers of buckets. padded: dims in which inputs need a `pad` rule. p95: of all buckets
    of this kind and number these have the least `p95_cost`; `bound`, `optimal` and `curve` are of those that have it.
    """

    dims: tuple[str, ...]
    calls: int
    distinct: int
    kind: str
    padded: tuple[str, ...]
    plan: BucketPlan
    bound: float
    optimal: bool
    options: tuple[Option, ...]
    curve: tuple[Option, ...]
    today: BucketPlan | None
    notes: tuple[str, ...]
    p95: bool = False


class _Found(msgspec.Struct, frozen=True):
    kind: str
    axes: tuple[int, ...]
    sizes: tuple[DimSizes, ...]
    with_range: bool
    plan: BucketPlan
    bound: float
    curve: tuple[Option, ...]

    @property
    def count(self) -> int:
        return len(self.sizes) + self.with_range


class _Problem(NamedTuple):
    trace: Trace
    asked: Mapping[DimSizes, int]  # the calls to cover
    rounded: Mapping[DimSizes, int]  # the same, rounded up to multiples
    steps: tuple[int, ...]
    cost: Cost
    elements: Callable[[DimSizes], float]
    range_cost: float | None
    limit: float | None = None  # the least p95 of what calls pay, where that is the goal


def advise(
    trace: Trace,
    goal: Goal,
    *,
    cost: Cost = math.prod,
    elements: Callable[[DimSizes], float] = math.prod,
    padded: Sequence[str] | None = None,
    range_cost: float | None = None,
    cover: float = 1.0,
    multiple_of: Mapping[str, int] | None = None,
    today: tuple[Sequence[Bucket], frozenset[str]] | None = None,
) -> Advice:
    """The cheapest buckets for a trace.

    Args:
        goal: how many buckets, or how much waste.
        cost: of a call at some sizes; positive, and never less when a dim grows.
        elements: input elements of a call, by which the loader chooses between buckets.
        padded: the dims in which calls are padded; None for all.
        range_cost: how many times the cost of a fixed bucket a range has. None keeps ranges out.
        cover: the share of the calls that must find a bucket; the costliest sizes may be left out.
        multiple_of: for padded dims, what every size of a bucket is a multiple of.
        today: the buckets of a manifest and the dims that it pads.

    Raises TraceError where the goal cannot be reached.

    Example:
        >>> trace = Trace(("seq",), {(100,): 5, (120,): 5, (500,): 1})
        >>> [bucket.name for bucket in advise(trace, Goal(count=2)).plan.buckets]
        ['seq=120', 'seq=500']
    """
    dims = trace.dims
    pads = tuple(axis for axis, dim in enumerate(dims) if padded is None or dim in padded)
    steps = tuple((multiple_of or {}).get(dim, 1) for dim in dims)
    if wrong := [dim for axis, dim in enumerate(dims) if steps[axis] > 1 and axis not in pads]:
        raise TraceError(f"`{wrong[0]}` is not padded, so calls cannot be rounded up in it", hint="pad it: --pad")
    check_cost(cost, trace.counts, dims)
    asked = _costliest_left_out(trace.counts, cost, cover)
    rounded: dict[DimSizes, int] = defaultdict(int)
    for shape, count in asked.items():
        rounded[_round_up(shape, steps)] += count
    if goal.p95:  # a dim of one size needs no padding
        pads = tuple(axis for axis in pads if len({shape[axis] for shape in rounded}) > 1) or pads[:1]
    limit = _least_p95(dims, rounded, cost, pads, range_cost) if goal.p95 else None
    if limit is not None and goal.count == 1:
        limit = None  # every call runs in the one bucket
    problem = _Problem(trace, asked, rounded, steps, cost, elements, range_cost, limit)
    kinds = [(PADDED if pads else EXACT, pads, False)]
    if range_cost is not None:
        kinds += [(PADDED_AND_RANGE, pads, True)] if pads else []
        kinds += [(EXACT_AND_RANGE, (), True)] if max(steps) == 1 else []

    def search(goal: Goal) -> list[_Found]:
        return [one for kind, axes, ranged in kinds if (one := _solve(problem, goal, kind, axes, ranged))]

    found = search(goal)
    judged = evaluate(trace, *today, cost, elements, range_cost or 1.0) if today else None
    notes = list(trace.notes)
    if not found and goal.count and goal.count < (least := _fewest(problem, pads)) <= goal.up_to:
        more = f"{least} buckets are the fewest; pad rules (try them: --pad DIM) or a range (--range-cost) need fewer"
        notes.append(f"{_too_few(problem, goal.count, pads)}; {more}")
        goal = msgspec.structs.replace(goal, count=least)
        found = search(goal)
    if not found:
        raise _unreachable(problem, goal, pads, judged)
    best = min(found, key=lambda one: (one.plan.waste, one.count) if goal.count else (one.count, one.plan.waste))
    return Advice(
        dims=dims,
        calls=trace.calls,
        distinct=len(trace.counts),
        kind=best.kind,
        padded=tuple(dims[axis] for axis in best.axes),
        plan=best.plan,
        bound=best.bound,
        optimal=best.plan.waste - best.bound < 1e-6,
        options=tuple(Option(one.kind, one.count, one.plan.waste) for one in found),
        curve=best.curve,
        today=judged,
        notes=tuple(notes),
        p95=goal.p95,
    )


def _least_p95(
    dims: Sequence[str], counts: Mapping[DimSizes, int], cost: Cost, pads: Sequence[int], range_cost: float | None
) -> float:
    """What 95 % of the calls cost at most in buckets of their own sizes: no other buckets have less. Those have as much
    that keep the calls that cost more out of the buckets of the others."""
    if range_cost is not None:
        raise TraceError(
            f"p95 is minimised without ranges; a range was let in at {range_cost:g} times the cost of a fixed bucket",
            hint="leave the range cost out, or minimise waste",
        )
    varied = [dim for axis, dim in enumerate(dims) if len({shape[axis] for shape in counts}) > 1]
    if len(pads) != 1 or {*varied} - {dims[axis] for axis in pads}:
        raise TraceError(
            f"p95 is minimised for one padded dim; the sizes of {', '.join(varied) or 'no dim'} differ in the trace, "
            f"and calls are padded in {', '.join(dims[axis] for axis in pads) or 'no dim'}",
            hint="name the dim that decides, --dims seq, or minimise waste: --cost and --latency weigh long calls more",
        )
    prices: dict[float, int] = defaultdict(int)
    for shape, count in counts.items():
        prices[cost(shape)] += count
    return _p95(prices, 0.0)


def _costliest_left_out(counts: Mapping[DimSizes, int], cost: Cost, cover: float) -> dict[DimSizes, int]:
    left = sum(counts.values()) * (1 - cover) + 1e-9
    kept = dict(counts)
    for shape in sorted(counts, key=lambda one: (cost(one), one), reverse=True):
        left -= counts[shape]
        if left < 0 or len(kept) == 1:
            break
        del kept[shape]
    return kept


def _round_up(shape: DimSizes, steps: Sequence[int]) -> DimSizes:
    return tuple([-(-size // step) * step for size, step in zip(shape, steps, strict=True)])


def _solve(problem: _Problem, goal: Goal, kind: str, axes: tuple[int, ...], ranged: bool) -> _Found | None:
    """The buckets of one kind that reach the goal; None if none do."""
    curve: list[Option] = []
    chosen: tuple[DimSizes, ...] | None = None
    ideal = sum(count * problem.cost(shape) for shape, count in problem.asked.items())
    spare = _spare(problem) if ranged else None
    cover = Cover(problem.rounded, problem.cost, axes, spare) if len(axes) > 1 else None
    for fixed, total, sizes in _solutions(problem, goal, axes, ranged, cover):
        count = fixed + ranged
        if total == math.inf or not count:
            continue
        waste = 1 - ideal / total
        curve.append(Option(kind, count, waste))
        if goal.waste is None or waste <= goal.waste + 1e-12:
            chosen = sizes
        if goal.waste is not None and chosen is not None:
            break
    if chosen is None:
        return None
    sizes, bound = chosen, None
    if cover:
        sizes, bound = cover.improved(sizes) if sizes else ((), cover.total(()))
    buckets, needs_range = _buckets(problem, axes, sizes, ranged)
    padded = frozenset(problem.trace.dims[axis] for axis in axes)
    plan = evaluate(problem.trace, buckets, padded, problem.cost, problem.elements, problem.range_cost or 1.0)
    least = plan.waste if bound is None else min(max(0.0, 1 - ideal / bound), plan.waste)
    return _Found(kind, axes, sizes, needs_range, plan, least, tuple(curve))


def _solutions(
    problem: _Problem, goal: Goal, axes: tuple[int, ...], ranged: bool, cover: Cover | None
) -> Iterator[tuple[int, float, tuple[DimSizes, ...]]]:
    """(fixed buckets, cost, their sizes), by rising number of buckets."""
    counts, cost = problem.rounded, problem.cost
    spare = _spare(problem) if ranged else None
    most = (goal.count or _most(axes)) - ranged
    if cover:
        if spare:
            yield 0, cover.total(()), ()
        for fixed, (total, sizes) in enumerate(cover.grown(most), 1):
            yield fixed, total, sizes
        return
    axis = axes[0] if axes else None
    first, size = 0, most if goal.count else min(most, 16)
    while True:
        rows = cheapest(counts, cost, axis, size, spare, problem.limit)
        for fixed in range(first, size + 1):
            yield fixed, *rows[fixed]
        first = size + 1
        if size >= min(most, len(counts)):
            return
        size = min(most, size * 4)


def _most(axes: Sequence[int]) -> int:
    return MOST_BUCKETS if len(axes) < 2 else MOST_SEARCHED


def _spare(problem: _Problem) -> Cost:
    factor, cost = problem.range_cost or 1.0, problem.cost
    return lambda shape: factor * cost(shape)


def _buckets(
    problem: _Problem, axes: tuple[int, ...], sizes: Sequence[DimSizes], ranged: bool
) -> tuple[list[Bucket], bool]:
    """The fixed buckets, and a range for the calls that none of them takes."""
    dims = problem.trace.dims
    buckets: list[Bucket] = [dict(zip(dims, size, strict=True)) for size in sizes]
    if not ranged:
        return buckets, False
    shapes, _ = table(problem.rounded)
    rest = {s: problem.rounded[s] for s in as_shapes(shapes[owners(sizes, shapes, axes) < 0])}
    if not rest:
        return buckets, False
    wide: Bucket = {}
    for axis, dim in enumerate(dims):
        low, high = min(s[axis] for s in problem.rounded), max(s[axis] for s in rest)
        if low == high:
            wide[dim] = low
        else:
            tuned = _median(rest, axis, problem.cost)
            wide[dim] = SizeRange(min=low, max=high, multiple_of=problem.steps[axis], tune_at=tuned)
    return [*buckets, wide], True


def _median(counts: Mapping[DimSizes, int], axis: int, cost: Cost) -> int:
    """The size of one dim at which half of the cost is below."""
    weights: dict[int, float] = defaultdict(float)
    for shape, count in counts.items():
        weights[shape[axis]] += count * cost(shape)
    half, passed = sum(weights.values()) / 2, 0.0
    for size in sorted(weights):
        passed += weights[size]
        if passed >= half:
            break
    return size


def _fewest(problem: _Problem, pads: tuple[int, ...]) -> int:
    """How many padded or exact buckets take every call: one for each sizes of the dims that are not padded."""
    axes = [axis for axis in range(len(problem.trace.dims)) if axis not in pads]
    return len({tuple(shape[axis] for axis in axes) for shape in problem.rounded})


def _too_few(problem: _Problem, count: int, pads: tuple[int, ...]) -> str:
    exact = [dim for axis, dim in enumerate(problem.trace.dims) if axis not in pads]
    return (
        f"{count} bucket{'' if count == 1 else 's'} cannot take every call: {', '.join(exact)} "
        f"{'is' if len(exact) == 1 else 'are'} not padded, and came in {_fewest(problem, pads):,} sizes"
    )


def _unreachable(problem: _Problem, goal: Goal, pads: tuple[int, ...], today: BucketPlan | None) -> TraceError:
    if goal.waste is not None:
        rounding = " with sizes that are multiples" if max(problem.steps) > 1 else ""
        return TraceError(
            f"no {_most(pads)} buckets keep the waste at {goal.waste:.1%} or less{rounding}",
            hint="allow more waste, round less, or leave rare calls out with --cover",
        )
    assert goal.count is not None
    covered = f"; today's {len(today.buckets)} take {today.coverage:.2%} of the calls" if today else ""
    return TraceError(
        _too_few(problem, goal.count, pads) + covered,
        hint="add pad rules to the manifest's inputs (try them: --pad DIM), let a range take the rest (--range-cost), "
        f"leave rare calls out (--cover), or allow --buckets {_fewest(problem, pads)}",
    )


def evaluate(
    trace: Trace,
    buckets: Sequence[Bucket],
    padded: frozenset[str],
    cost: Cost,
    elements: Callable[[DimSizes], float] = math.prod,
    range_cost: float = 1.0,
) -> BucketPlan:
    """What these buckets do with a trace, by the loader's rule."""
    dispatch = Dispatch(buckets, trace.dims, padded, elements)
    calls, ideals, costs = [0] * len(buckets), [0.0] * len(buckets), [0.0] * len(buckets)
    ratios: dict[float, int] = defaultdict(int)
    prices: dict[float, int] = defaultdict(int)
    for (shape, count), taken in zip(trace.counts.items(), dispatch.choose([*trace.counts]), strict=True):
        if taken is None:
            continue
        index, run = taken
        own, paid = cost(shape), cost(run) * (range_cost if dispatch.is_range(index) else 1.0)
        calls[index] += count
        ideals[index] += count * own
        costs[index] += count * paid
        ratios[paid / own] += count
        prices[paid] += count
    ideal, total, covered = math.fsum(ideals), math.fsum(costs), sum(calls)
    lost = total - ideal
    uses = tuple(
        BucketUse(
            name=bucket_name(bucket),
            sizes=bucket,
            calls=calls[n],
            cost=costs[n],
            waste=1 - ideals[n] / costs[n] if costs[n] else 0.0,
            lost=(costs[n] - ideals[n]) / lost if lost > 0 else 0.0,
        )
        for n, bucket in enumerate(buckets)
    )
    return BucketPlan(
        buckets=uses,
        coverage=covered / trace.calls,
        ideal=ideal,
        cost=total,
        waste=1 - ideal / total if total else 0.0,
        p95=_p95(ratios, 1.0),
        p95_cost=_p95(prices, 0.0),
    )


def _p95(values: Mapping[float, int], empty: float) -> float:
    left = 0.95 * sum(values.values())
    found = empty
    for found in sorted(values):
        left -= values[found]
        if left <= 1e-9:
            break
    return found


def manifest_block(advice: Advice) -> str:
    """The `buckets` of the manifest, as YAML to paste under a model. A comment names the pad rules that they need."""
    pads = ", ".join(f"{dim}: …" for dim in advice.padded)
    comment = f"# for inputs with `pad: {{{pads}}}`" if pads else "# for inputs without `pad`"
    return "\n".join([comment, "buckets:", *(f"  - {_in_yaml(use.sizes)}" for use in advice.plan.buckets)]) + "\n"


def _in_yaml(bucket: Bucket) -> str:
    return "{" + ", ".join(f"{dim}: {_size_in_yaml(size)}" for dim, size in bucket.items()) + "}"


def _size_in_yaml(size: int | SizeRange) -> str:
    if isinstance(size, int):
        return str(size)
    step = f", multiple_of: {size.multiple_of}" if size.multiple_of > 1 else ""
    return f"{{range: [{size.min}, {size.max}]{step}, tune_at: {size.tune_at}}}"
