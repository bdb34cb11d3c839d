"""The output of `aotc build`: the plan, the report, the comparison of `--check`, suggested regions."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from aotc.amounts import counted, size_text
from aotc.cli.output import duration, echo_lines, notice, print_json, print_table

if TYPE_CHECKING:
    from aotc.compiler.build_report import BuildReport, Outcome
    from aotc.compiler.capture.regions.suggest_regions import Suggestion
    from aotc.compiler.planning.cache_lookup import PlannedUnit
    from aotc.compiler.planning.estimate import Estimate
    from aotc.compiler.rebuild_check import RebuiltUnit
    from aotc.manifest.edit import ModelEdit
    from aotc.picks import PickFile


def show_plan(planned: Sequence[PlannedUnit], as_json: bool, explain: bool) -> None:
    if as_json:
        print_json(plan_data(planned))
        return
    for plan in planned:
        echo_lines(f"{plan.unit.name}: {'up to date' if plan.cached else 'to compile'}")
        if explain or not plan.cached:
            for reason in plan.reasons:
                echo_lines(f"    {reason}")


def totals(planned: Sequence[PlannedUnit], known: Estimate, parallel: int = 1) -> str:
    """One line: how many units there are to compile, for which targets; about how long that takes, and how many bytes
    of the store. Both are guessed from earlier units of the same models, and unknown without."""
    from aotc.compiler.planning.estimate import remaining

    waiting = [plan.unit for plan in planned if plan.cached is None]
    targets = ", ".join(dict.fromkeys(unit.target.name for unit in waiting))
    seconds = remaining(known.seconds, [unit.name for unit in waiting], {}, [], parallel)
    return "".join(
        (
            f"{len(waiting)} of {counted(len(planned), 'unit')} to compile",
            f" for {targets}" if waiting else "",
            f", about {duration(seconds)} with {parallel} at a time" if seconds else "",
            f", {_disk(known, len(waiting))}" if waiting else "",
        )
    )


def _disk(known: Estimate, units: int) -> str:
    """About how much of the store the units to compile will take."""
    unknown = units - len(known.disk)
    if unknown == units:
        return "time and disk unknown: no such unit was built before" if not known.seconds else "disk unknown"
    size = size_text(sum(known.disk.values()) + known.weights)
    return f"{size} of disk" + (f" and an unknown amount for {unknown} of the units" if unknown else "")


def show_native(planned: Sequence[PlannedUnit]) -> None:
    """Which target `native` became, and which machines load the result."""
    from aotc.machine.native_target import resolve_target

    native = [plan.unit.target for plan in planned if "native" in plan.unit.spec.targets and plan.cached is None]
    if not native or (name := resolve_target("native")) not in {target.name for target in native}:
        return
    target = next(target for target in native if target.name == name)
    if target.device == "cuda":
        notice(f"native is {name} here: only GPUs of compute capability {target.capability} load the result")
        return
    notice(f"native is {name} here: only CPUs with {target.cpu_features[-1]} load the result")
    if name != PORTABLE:
        notice(f"  hint: --target {PORTABLE} builds for servers of the last ten years")


def show_unmatched_picks(planned: Sequence[PlannedUnit], picks: PickFile | None) -> None:
    """A warning where a file of picks has none for any unit of the build, which then measures all decisions."""
    if picks is None or not planned or any(plan.unit.pins.own or plan.unit.pins.seeds for plan in planned):
        return
    theirs = [unit.name for unit in picks.units if unit.picks]
    ours = [plan.unit.name for plan in planned]
    echo_lines("warning: no pick of the file is for a unit of this build: all decisions are measured", err=True)
    echo_lines(f"  picks for: {_some(theirs) or 'no unit'}", err=True)
    echo_lines(f"  units here: {_some(ours)}", err=True)
    echo_lines("  hint: write the picks of these units with `aotc picks REF --export FILE`", err=True)


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


PORTABLE = "cpu:x86-64-v3"


def plan_data(planned: Sequence[PlannedUnit]) -> list[dict[str, Any]]:
    return [
        {"unit": plan.unit.name, "key": plan.unit.key, "cached": plan.cached is not None, "reasons": plan.reasons}
        for plan in planned
    ]


def show_report(
    report: BuildReport, tag: str, store_path: Path | str, as_json: bool, explained: Sequence[PlannedUnit] = ()
) -> None:
    """`explained`: the plan, which a JSON report then holds."""
    if as_json:
        print_json(
            {
                **({"plan": plan_data(explained)} if explained else {}),
                "units": [
                    {
                        **{
                            name: getattr(outcome, name)
                            for name in ("model", "bucket", "target", "status", "size", "log", "notes")
                        },
                        "seconds": round(outcome.seconds, 3),
                        "shared": outcome.shared,
                        "error": str(outcome.error) if outcome.error else None,
                        "source": outcome.error.fields.get("source", "") if outcome.error else "",
                    }
                    for outcome in report.outcomes
                ],
                "bundles": report.bundles,
                "before": report.before,
                "unpublished": report.unpublished,
                "shared": report.shared,
                "store": str(store_path),
            }
        )
        return
    print_table(
        ("model", "bucket", "target", "seconds", "compressed", "status"),
        [
            (o.model, o.bucket, o.target, f"{o.seconds:.1f}", size_text(o.size) if o.size else "-", o.status)
            for o in report.outcomes
        ],
    )
    for outcome in report.outcomes:
        for note in outcome.notes:
            echo_lines(f"{outcome.model} {outcome.bucket} {outcome.target}: {note}")
    if taken := str(report.shared):
        echo_lines(f"shared between units: {taken}")
    for outcome in report.failed:
        show_failure(outcome)
    for model, digest in report.bundles.items():
        units = [outcome for outcome in report.outcomes if outcome.model == model]
        built = sum(outcome.status != "failed" for outcome in units)
        part = f"  (only {built} of {counted(len(units), 'unit')})" if built < len(units) else ""
        before = report.before.get(model, "")
        was = "" if not before else "  (as before)" if before == digest else f"  (was {before})"
        echo_lines(f"published {store_path}#{model}:{tag}  {digest}{part}{was}")
    for model, why in report.unpublished.items():
        names = f"; {model}:{tag} still names {report.before[model]}" if model in report.before else ""
        echo_lines(f"not published: {model}: {why}{names}", err=True)
    if report.unpublished:
        kept = "what did compile stays in the store, and the next build compiles the rest only"
        echo_lines(f"  hint: {kept}; --partial publishes what there is", err=True)


@contextmanager
def failures_shown(outcomes: Sequence[Outcome], planned: Sequence[PlannedUnit]) -> Iterator[None]:
    """Where a build ends without a report (Ctrl-C, an error), print the failures so far and how many units finished.

    `outcomes`: those so far of the `planned` units.
    """
    try:
        yield
    except BaseException:
        for outcome in outcomes:
            if outcome.status == "failed":
                show_failure(outcome)
        if finished := sum(outcome.status != "failed" for outcome in outcomes):
            echo_lines(f"\n{finished} of {counted(len(planned), 'unit')} are finished; the store keeps them", err=True)
        raise


def show_failure(outcome: Outcome) -> None:
    echo_lines(f"\nfailed: {outcome.model} {outcome.bucket} {outcome.target}", err=True)
    if outcome.error and outcome.error.fields.get("source"):
        echo_lines(f"  at {outcome.error.fields['source']}", err=True)
    echo_lines(f"  {outcome.error}", err=True)
    if outcome.log:
        echo_lines(f"  log: {outcome.log}", err=True)


def show_checked(checked: Sequence[RebuiltUnit], as_json: bool) -> None:
    if as_json:
        print_json([{**msgspec.structs.asdict(unit), "same": unit.same} for unit in checked])
        return
    for unit in checked:
        name = f"{unit.model} {unit.bucket} {unit.target}"
        echo_lines(f"{name}: {'the same, byte for byte' if unit.same else 'differs'}")
        for issue in unit.differences:
            both = f": {issue.expected} in the store, {issue.actual} now" if issue.expected or issue.actual else ""
            echo_lines(f"    {issue.message}{both}" + (f"; {issue.hint}" if issue.hint else ""))
        if unit.error:
            echo_lines(f"    {unit.error}", err=True)


def show_fixed_buckets(
    path: Path, before: str, after: str, found: Sequence[ModelEdit], as_json: bool, is_all: bool
) -> None:
    """The change of the manifest as a diff, and the buckets that no change helps. `is_all`: nothing else is printed, so
    this is the command's result."""
    from aotc.records import bucket_name

    lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
    diff = "".join(difflib.unified_diff(*lines, str(path), f"{path} with buckets that can be captured"))
    if as_json and is_all:
        print_json({"models": found, "diff": diff})
        return
    echo_lines(diff or f"{path}: no bucket to change", err=not is_all)
    for model in found:
        if problem := model.problem:
            echo_lines(f"{model.model} {bucket_name(problem.bucket)}: no other sizes help", err=True)
            if problem.source:
                echo_lines(f"  at {problem.source}", err=True)
            echo_lines(f"  {problem.message}", err=True)
            if problem.hint:
                echo_lines(f"  hint: {problem.hint}", err=True)


def show_suggestions(found: Sequence[Suggestion], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    for model in found:
        if model.whole is None:
            echo_lines(f"{model.model}: exports as a whole; regions would only make its build shorter")
        else:
            inside = f"`{model.whole.where}`" if model.whole.where else "its own forward"
            echo_lines(f"{model.model}: does not export as a whole: in {inside}, {model.whole.line}")
            echo_lines(f"    {model.whole.message}")
        for tried in model.candidates:
            verdict = tried.problem and f"cannot be a region: {tried.problem}"
            kinds = f"exports, {tried.kinds} to compile"
            share = f"{tried.count} × {tried.class_name}, {tried.share:.0%} of the parameters"
            echo_lines(f"    {tried.pattern}  {share}: {verdict or kinds}")
        if not model.regions:
            echo_lines("    nothing that repeats could be a region")
            continue
        outside = f"; outside of them: {', '.join(model.eager)}" if model.eager else ""
        echo_lines(f"    the regions take {model.time:.0%} of the time of a call in eager{outside}")
        patterns = ", ".join(json.dumps(pattern) for pattern in model.regions)
        live = "    weights: live  # those of regions cannot be frozen\n" if model.frozen else ""
        echo_lines(f"\n  {model.model}:\n    regions: [{patterns}]\n{live}")
