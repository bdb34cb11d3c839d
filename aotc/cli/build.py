"""`aotc build`: who compiles, what is shown meanwhile, and what becomes of the result."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aotc.cli.build_output import failures_shown, show_checked, show_plan, show_report, show_suggestions
from aotc.cli.options import json_option, local_folder, store_option, valid_tag
from aotc.cli.output import echo, printing_to_stderr
from aotc.cli.stopping import end_on_sigterm

if TYPE_CHECKING:
    from torch import nn

    from aotc.compiler.estimate import Estimate
    from aotc.compiler.executors import Executor
    from aotc.compiler.executors.ray.executor import RayOptions
    from aotc.compiler.pipeline import Event, OnEvent, Outcome
    from aotc.compiler.plan import PlannedUnit
    from aotc.compiler.workers.forks import ForkServers
    from aotc.manifest import Manifest
    from aotc.picks import PickFile
    from aotc.store.staging import Staging


@click.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@store_option
@click.option("--model", "models", multiple=True, help="Build only this model (repeatable).")
@click.option(
    "--tag",
    default="latest",
    show_default=True,
    callback=valid_tag,
    help="The TAG of MODEL:TAG, which names the result.",
)
@click.option("--target", "targets", multiple=True, help="Build only for this target (repeatable).")
@click.option("--jobs", type=click.IntRange(min=1), show_default="as cores and memory allow", help="Units at a time.")
@click.option(
    "--executor",
    "executor_name",
    type=click.Choice(("local", "ray")),
    default="local",
    show_default=True,
    help="Compile on this machine, or on a Ray cluster.",
)
@click.option("--address", show_default="$RAY_ADDRESS, else the one on this machine", help="The cluster's address.")
@click.option(
    "--ask",
    "asks",
    multiple=True,
    metavar="TARGET=NAME:AMOUNT,…",
    help="What a unit for TARGET asks of the cluster: num_cpus, num_gpus, memory, accelerator_type, or a resource "
    "(repeatable).",
)
@click.option(
    "--runtime-env",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A YAML or JSON file: more for Ray's runtime environment, like `pip` or `image_uri`.",
)
@click.option("--wait-for-nodes", is_flag=True, help="Ask also for what no node of the cluster has now.")
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a trace of the build, over all workers, for ui.perfetto.dev.",
)
@click.option("--shard", metavar="I/N", help="Build the I-th of N parts and publish nothing; `aotc merge` does.")
@click.option("--dry-run", is_flag=True, help="Say what would be compiled; write nothing.")
@click.option("--explain", is_flag=True, help="Say of every unit that is not up to date why.")
@click.option("--force", is_flag=True, help="Compile everything, also what the store already holds.")
@click.option(
    "--picks",
    "picks_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Take the autotune picks of this file; measure what is not in it.",
)
@click.option("--locked", is_flag=True, help="Measure nothing: fail where a pick is missing or stale.")
@click.option(
    "--share/--no-share",
    default=True,
    show_default=True,
    help="Let units share what they have measured and compiled, or each do all of it.",
)
@click.option("--suggest-regions", is_flag=True, help="Say which submodules could be `regions:`; compile nothing.")
@click.option("--check", is_flag=True, help="Compile again what the store holds, with its picks, and compare.")
@json_option
def build(
    manifest: Path,
    store_path: Path | str,
    models: Sequence[str],
    tag: str,
    targets: Sequence[str],
    jobs: int | None,
    executor_name: str,
    address: str | None,
    asks: Sequence[str],
    runtime_env: Path | None,
    wait_for_nodes: bool,
    trace_path: Path | None,
    shard: str | None,
    dry_run: bool,
    explain: bool,
    force: bool,
    picks_path: Path | None,
    locked: bool,
    share: bool,
    suggest_regions: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Compile the models of MANIFEST into the store.

    Exit code 1 where a unit fails, or differs under --check; 2 where the build cannot run.
    """
    from aotc.compiler.workers.forks import ForkServers
    from aotc.garbage import no_collection
    from aotc.manifest import read_manifest

    if check and executor_name != "local":
        raise click.UsageError(f"--check compiles on this machine: leave out --executor {executor_name}")
    read = read_manifest(manifest, models)
    servers = ForkServers()
    click.get_current_context().call_on_close(servers.close)
    compiles = executor_name == "local" and not (check or dry_run or suggest_regions)
    if compiles and _is_new(read, store_path, tag):
        servers.begin()  # they import torch and its compiler while this process does, and plans
    with no_collection():
        from aotc.compiler.codegen.option_check import check_options, check_patches
        from aotc.compiler.patches.registry import untested
        from aotc.compiler.pipeline import build as run_build
        from aotc.compiler.pipeline import plan_build
        from aotc.compiler.publish.url_store import keeping, publish_remotely, with_remote_units
        from aotc.compiler.shards import Shard, parse_shard, split
        from aotc.errors import ManifestError
        from aotc.store import Store
        from aotc.store.plans import put_plan

    cluster = _cluster_options(executor_name, address, asks, runtime_env, wait_for_nodes, share)
    if issues := [*check_options(read), *check_patches(read)]:
        raise ManifestError(f"{manifest} has {len(issues)} mistakes", issues=tuple(issues))
    if warning := untested():
        echo(f"warning: {warning}", err=True)
    if suggest_regions:
        _suggest_regions(read, as_json)
        return
    picks = _picks_to_take(picks_path or read.picks, locked)
    staging = _staging(store_path)
    place = staging.store.path if staging else local_folder(store_path)
    modules = _made_once(read, servers) if compiles else None
    with printing_to_stderr():
        planned = plan_build(
            read, place, force and not check, picks, targets=targets, elsewhere=cluster is not None, modules=modules
        )
    del modules  # the processes of their units have those that they need
    part = parse_shard(shard) if shard else None
    planned, whole = split(planned, part or Shard(1, 1))
    if staging and not force:
        planned = with_remote_units(planned, staging)
    if check:
        _check_build(read, planned, place, jobs, as_json)
        return
    if dry_run or (explain and not as_json):
        show_plan(planned, as_json, explain)
    if dry_run:
        return
    end_on_sigterm()
    outcomes: list[Outcome] = []
    with failures_shown(outcomes, len(planned)):
        with _executor(read, planned, place, jobs, staging, cluster, share=share, servers=servers) as (executor, known):
            progress = _progress(planned, as_json, executor, known)
            with progress, _tracing(trace_path, progress.show) as show:
                on_event = _collecting(outcomes, keeping(staging, show) if staging else show)
                report = run_build(
                    read,
                    planned,
                    place,
                    executor,
                    tag=None if part else tag,
                    locked=locked,
                    on_event=on_event,
                )
        if part and not staging:  # of a store at a URL no part is missing: the next build takes the units from there
            put_plan(Store.open(place), tag, whole)
        if staging:
            publish_remotely(planned, tuple(report.bundles), tag, staging)
    show_report(report, tag, store_path, as_json, planned if explain else ())
    if part and not as_json:
        echo(f"shard {part}: {len(planned)} of {len(whole.units)} units; `aotc merge` publishes them")
    sys.exit(1 if report.failed else 0)


def _made_once(manifest: Manifest, servers: ForkServers) -> dict[str, nn.Module]:
    """Every model's module; a process is forked that keeps those which took long to make, for their units."""
    from aotc.compiler.workers.module_holder import hold, make_modules

    with printing_to_stderr():
        made = make_modules(manifest)
    servers.holder = hold(made)
    return made.modules


def _suggest_regions(manifest: Manifest, as_json: bool) -> None:
    from aotc.compiler.capture.suggest_regions import suggest_regions
    from aotc.models.auto_inputs import with_inputs
    from aotc.models.factory import build_module

    folder, specs = manifest.folder, manifest.models.values()
    with printing_to_stderr():
        full = [with_inputs(manifest, spec, build_module(spec, folder)) for spec in specs]
        found = [suggest_regions(spec, folder) for spec in full]
    show_suggestions(found, as_json)


def _picks_to_take(path: Path | None, locked: bool) -> PickFile | None:
    from aotc.compiler.autotune.pins import read_picks_file

    if locked and path is None:
        raise click.UsageError("--locked needs picks: give --picks FILE, or `picks:` in the manifest")
    return read_picks_file(path) if path else None


def _check_build(
    manifest: Manifest, planned: Sequence[PlannedUnit], store_path: Path, jobs: int | None, as_json: bool
) -> None:
    from aotc.compiler.rebuild_check import check

    end_on_sigterm()
    with _executor(manifest, planned, store_path, jobs, again=True, share=False) as (executor, known):
        progress = _progress(planned, as_json, executor, known)
        with progress:
            checked = check(manifest, planned, store_path, executor, on_event=progress.show)
    show_checked(checked, as_json)
    sys.exit(0 if all(unit.same for unit in checked) else 1)


def _staging(store: Path | str) -> Staging | None:
    """What stands before a store at a URL; nothing before a folder."""
    if isinstance(store, Path):
        return None
    from aotc.store.staging import Staging

    return Staging(store)


def _is_new(manifest: Manifest, store_path: Path | str, tag: str) -> bool:
    """Whether the folder holds nothing under this tag of some model: then there is something to compile."""
    from aotc.store import Store
    from aotc.store.disk import exists

    if isinstance(store_path, str):
        return False
    if not exists(store_path / "oci-layout"):
        return True
    known = {(entry.model, entry.tag) for entry in Store.open(store_path).tags()}
    return any((model, tag) not in known for model in manifest.models)


@contextmanager
def _executor(
    manifest: Manifest,
    planned: Sequence[PlannedUnit],
    store_path: Path,
    jobs: int | None,
    staging: Staging | None = None,
    cluster: RayOptions | None = None,
    again: bool = False,
    share: bool = True,
    servers: ForkServers | None = None,
) -> Iterator[tuple[Executor, Estimate]]:
    """Who compiles: this machine, or the cluster; and what is known of the units.

    `again`: those that the store holds are compiled too. `share`: units share what they have measured and compiled. No
    cluster is asked for a build with nothing to compile.
    """
    from aotc.compiler.estimate import estimate
    from aotc.compiler.executors import LocalExecutor, jobs_for, targets_of_many
    from aotc.store import Store
    from aotc.store.disk import exists

    store = Store.open(store_path) if exists(store_path / "oci-layout") else None
    known = estimate(store, planned)
    units = [plan.unit for plan in planned if again or plan.cached is None]
    executor: Executor
    if cluster is not None and units:
        from aotc.compiler.executors.ray.executor import RayExecutor

        executor = RayExecutor(units, manifest.folder, cluster, staging=staging, exclude=store_path, used=known.memory)
    else:
        side_by_side = jobs_for(units, jobs, known.memory)
        executor = LocalExecutor(side_by_side, share=share, precompiled=targets_of_many(units), servers=servers)
    try:
        yield executor, known
    finally:
        executor.close()


@contextmanager
def _tracing(path: Path | None, on_event: OnEvent) -> Iterator[OnEvent]:
    """`on_event`, which also collects what the trace at `path` shall show; it is written however the build ends."""
    if path is None:
        yield on_event
        return
    from aotc.compiler.workers.build_trace import Trace
    from aotc.store.disk import is_replaceable

    trace = Trace()
    if is_replaceable(path):
        trace.write(path)  # where it cannot be written, that is said before anything is compiled

    def traced(event: Event) -> None:
        trace.add(event)
        on_event(event)

    try:
        yield traced
    finally:
        trace.write(path)


def _collecting(outcomes: list[Outcome], on_event: OnEvent) -> OnEvent:
    """`on_event`, which also adds each ended unit's outcome to `outcomes`."""

    def collected(event: Event) -> None:
        if event.outcome is not None:
            outcomes.append(event.outcome)
        on_event(event)

    return collected


def _progress(planned: Sequence[PlannedUnit], quiet: bool, executor: Executor, known: Estimate) -> Any:
    from rich.console import Console

    from aotc.cli.build_progress import LineProgress, LiveProgress

    console = Console(stderr=True)
    kind = LiveProgress if console.is_terminal and not quiet else LineProgress
    return kind(console, planned, executor.parallel, known)


def _cluster_options(
    name: str, address: str | None, asks: Sequence[str], environment: Path | None, wait: bool, share: bool
) -> RayOptions | None:
    if name == "local":
        if address or asks or environment or wait:
            raise click.UsageError("--address, --ask, --runtime-env and --wait-for-nodes go with --executor ray")
        return None
    from aotc.compiler.executors.ray.executor import RayOptions, read_runtime_env
    from aotc.compiler.executors.ray.requests import parse_ask

    shipped = read_runtime_env(environment) if environment else {}
    return RayOptions(address, dict(map(parse_ask, asks)), shipped, wait, share)
