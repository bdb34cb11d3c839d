"""`aotc build`: turns options into a request, and shows the build's progress and its result."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aotc.amounts import counted
from aotc.cli.build_output import (
    failures_shown,
    show_checked,
    show_fixed_buckets,
    show_native,
    show_plan,
    show_report,
    show_suggestions,
    show_unmatched_picks,
    totals,
)
from aotc.cli.options import json_option, local_folder, store_option, valid_tag
from aotc.cli.output import echo, echo_lines, notice, printing_to_stderr, progress_console
from aotc.cli.signals import ctrl_c_kept, end_on_sigterm

if TYPE_CHECKING:
    from aotc.compiler.build_report import Event, OnEvent, Outcome
    from aotc.compiler.executors.ray.requests import RayOptions
    from aotc.compiler.messages import Settings
    from aotc.compiler.planning.cache_lookup import PlannedUnit
    from aotc.compiler.planning.estimate import Estimate
    from aotc.compiler.request import BuildRequest
    from aotc.compiler.workers.unit_servers import ForkServers
    from aotc.manifest import Manifest
    from aotc.picks import PickFile


ASK_ABOVE = 100
"""Units to compile; a slip in a manifest's buckets makes thousands."""


@dataclass(frozen=True)
class BuildOptions:
    """The options of the command line."""

    manifest: Path
    store_path: Path | str
    settings: Settings
    models: Sequence[str] = ()
    tag: str = "latest"
    targets: Sequence[str] = ()
    executor_name: str = "local"
    address: str | None = None
    asks: Sequence[str] = ()
    runtime_env: Path | None = None
    wait_for_nodes: bool = False
    trace_path: Path | None = None
    shard: str | None = None
    dry_run: bool = False
    explain: bool = False
    picks_path: Path | None = None
    yes: bool = False
    suggest_regions: bool = False
    fix_buckets: bool = False
    check: bool = False
    attest: bool = False
    signing_key: str | None = None
    as_json: bool = False

    @property
    def compiles_here(self) -> bool:
        return self.executor_name == "local" and not (self.check or self.dry_run or self.suggest_regions)


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
@click.option(
    "--target",
    "targets",
    multiple=True,
    help="Build only for this target (repeatable): one that a model names, or any if a model names `native` or none.",
)
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
    help="Resources that a unit for TARGET asks for: num_cpus, num_gpus, memory, accelerator_type, or a resource "
    "(repeatable).",
)
@click.option(
    "--runtime-env",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A YAML or JSON file: more for Ray's runtime environment, like `pip` or `image_uri`.",
)
@click.option("--wait-for-nodes", is_flag=True, help="Also ask for resources that no node has now, and wait.")
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a trace of the build, over all workers, for ui.perfetto.dev.",
)
@click.option("--shard", metavar="I/N", help="Build the I-th of N parts and publish nothing; `aotc merge` does.")
@click.option("--dry-run", is_flag=True, help="Show what would be compiled; write nothing.")
@click.option("--explain", is_flag=True, help="Say why each unit is not up to date.")
@click.option("--force", is_flag=True, help="Compile all units, also those that the store holds.")
@click.option(
    "--picks",
    "picks_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Use the autotune picks of this file; measure all other decisions.",
)
@click.option("--locked", is_flag=True, help="Measure nothing: fail where a pick is missing or stale.")
@click.option(
    "--untuned",
    is_flag=True,
    help="For a GPU that this machine lacks: take Inductor's default where a pick is missing, and record that.",
)
@click.option(
    "--share/--no-share",
    default=True,
    show_default=True,
    help="Share measurements and compiled kernels between units.",
)
@click.option(
    "--dummy-weights",
    is_flag=True,
    help="Do not fill the modules' parameters: for live weights that are larger than this machine's memory. The checks "
    "of the build run on random values.",
)
@click.option(
    "--partial",
    is_flag=True,
    help="Publish a model of which a unit failed, too, with the units that were built; else its tag stays as it is.",
)
@click.option("--yes", is_flag=True, help=f"In a terminal: do not ask before more than {ASK_ABOVE} units are compiled.")
@click.option("--suggest-regions", is_flag=True, help="Suggest submodules for `regions:`; compile nothing.")
@click.option(
    "--fix-buckets",
    is_flag=True,
    help="First capture every bucket, and write others into MANIFEST for those that are refused, as a diff shows. With "
    "--dry-run: show the diff only.",
)
@click.option(
    "--attest",
    is_flag=True,
    help="Attach SLSA provenance and a CycloneDX SBOM to each bundle, for scanners and policies.",
)
@click.option(
    "--sign", "signing_key", metavar="FILE|env://NAME", help="With --attest: sign both with this private key."
)
@click.option("--check", is_flag=True, help="Compile the store's units again, with their picks, and compare all bytes.")
@json_option
def build(**given: Any) -> None:
    """Compile the models of MANIFEST into the store.

    Exit code 1 if a unit fails, or differs under --check; 2 if the build cannot run.
    """
    from aotc.compiler.messages import Settings
    from aotc.compiler.mistakes import read_checked
    from aotc.compiler.workers.unit_servers import ForkServers

    settings = Settings(**{name: given.pop(name) for name in Settings.__struct_fields__})
    options = BuildOptions(settings=settings, **given)
    if options.check and options.executor_name != "local":
        raise click.UsageError(f"--check compiles on this machine: leave out --executor {options.executor_name}")
    if options.fix_buckets and (options.check or options.suggest_regions):
        raise click.UsageError("--fix-buckets goes with neither --check nor --suggest-regions")
    if options.signing_key and not options.attest:
        raise click.UsageError("--sign goes with --attest")
    if options.attest and (options.shard or options.check or options.dry_run or options.suggest_regions):
        raise click.UsageError("--attest goes with a build that publishes")
    manifest = read_checked(options.manifest, options.models)
    if options.fix_buckets:
        manifest = _fix_buckets(options, manifest)
        if options.dry_run:
            return
    servers = ForkServers()
    click.get_current_context().call_on_close(servers.close)
    if options.compiles_here and _is_new(manifest, options.store_path, options.tag):
        servers.begin()  # they import torch and its compiler while this process does, and plans
    import_pipeline()
    request = request_of(options, manifest)
    if options.suggest_regions:
        _suggest_regions(manifest, options.as_json)
    elif options.check:
        _check(options, request)
    elif options.dry_run:
        _dry_run(options, request)
    else:
        _build(options, request, servers)


def import_pipeline() -> Any:
    """The module `aotc.compiler.pipeline`, and with it torch."""
    from aotc.garbage import no_collection

    with no_collection(), ctrl_c_kept():
        return importlib.import_module("aotc.compiler.pipeline")


def request_of(options: BuildOptions, manifest: Manifest) -> BuildRequest:
    """Raises ManifestError, BuildError, UsageError for options that are wrong, or do not go together."""
    from aotc.compiler.mistakes import check_settings
    from aotc.compiler.planning.shards import parse_shard
    from aotc.compiler.request import BuildRequest

    cluster, settings = _cluster(options), options.settings
    if settings.locked and settings.untuned:
        raise click.UsageError("--locked refuses decisions without a pick, --untuned allows them: give one of the two")
    check_settings(manifest)
    return BuildRequest(
        manifest,
        options.store_path,
        options.tag,
        settings,
        tuple(options.targets),
        shard=parse_shard(options.shard) if options.shard else None,
        picks=_picks_to_take(options.picks_path or manifest.picks, settings.locked),
        cluster=cluster,
    )


def _cluster(options: BuildOptions) -> RayOptions | None:
    if options.executor_name == "local":
        if options.address or options.asks or options.runtime_env or options.wait_for_nodes:
            raise click.UsageError("--address, --ask, --runtime-env and --wait-for-nodes go with --executor ray")
        return None
    from aotc.compiler.executors.ray.ray_executor import read_runtime_env
    from aotc.compiler.executors.ray.requests import RayOptions, parse_ask

    shipped = read_runtime_env(options.runtime_env) if options.runtime_env else {}
    return RayOptions(options.address, dict(map(parse_ask, options.asks)), shipped, options.wait_for_nodes)


def _picks_to_take(path: Path | None, locked: bool) -> PickFile | None:
    from aotc.compiler.autotune.picks_file import read_picks_file

    if locked and path is None:
        raise click.UsageError("--locked needs picks: give --picks FILE, or `picks:` in the manifest")
    return read_picks_file(path) if path else None


def _build(options: BuildOptions, request: BuildRequest, servers: ForkServers) -> None:
    from aotc.compiler.pipeline import build

    began, key = datetime.now(UTC), None
    if options.attest:
        local_folder(options.store_path, "attest in a folder, and `aotc push` from there")
    if options.signing_key:
        from aotc.cli.release import ask_password
        from aotc.store.signing.keys import read_private_key

        key = read_private_key(options.signing_key, ask_password)  # before anything is compiled
    shown = Shown(options, request.picks)
    with failures_shown(shown.outcomes, shown.plan):
        report = build(request, servers, shown)
    if options.attest:
        from aotc.compiler.publish.supply_chain import attest_bundles
        from aotc.store.layout.store import Store

        for model in attest_bundles(Store.open(Path(options.store_path)), report.bundles, began, key):
            signed = f", signed by {key.public.fingerprint}" if key else ""
            notice(f"attested {model}: provenance and SBOM{signed}")
    show_report(report, options.tag, options.store_path, options.as_json, shown.plan if options.explain else ())
    if request.shard and not options.as_json:
        units = counted(report.units, "unit")
        echo(f"shard {request.shard}: {len(shown.plan)} of {units}; `aotc merge` publishes them")
    sys.exit(1 if report.failed else 0)


def _check(options: BuildOptions, request: BuildRequest) -> None:
    from aotc.compiler.rebuild_check import check

    checked = check(request, Shown(options))
    show_checked(checked, options.as_json)
    sys.exit(0 if all(unit.same for unit in checked) else 1)


def _dry_run(options: BuildOptions, request: BuildRequest) -> None:
    from aotc.compiler.pipeline import plan_build
    from aotc.compiler.planning.estimate import estimate
    from aotc.compiler.publish.url_store import place_of

    place = place_of(request.store)
    with printing_to_stderr():
        planned, _ = plan_build(request, place)
    show_plan(planned, options.as_json, options.explain)
    show_unmatched_picks(planned, request.picks)
    if not options.as_json:
        echo(totals(planned, estimate(place.opened(), planned), options.settings.jobs or 1))


def _fix_buckets(options: BuildOptions, manifest: Manifest) -> Manifest:
    """Write the manifest with buckets that can be captured, unless this is a dry run, and read it again."""
    import_pipeline()
    from aotc.compiler.fix_buckets import fix_buckets
    from aotc.compiler.mistakes import check_settings
    from aotc.manifest import read_manifest
    from aotc.manifest.edit import edited, rewrite
    from aotc.models.auto_inputs import with_inputs
    from aotc.models.factory import build_module

    check_settings(manifest)
    folder, specs = manifest.folder, manifest.models.values()
    with printing_to_stderr():
        full = [with_inputs(manifest, spec, build_module(spec, folder)) for spec in specs]
        found = [fix_buckets(spec, folder) for spec in full]
    before = manifest.path.read_bytes().decode("utf-8-sig")
    after, errors = edited(before, found, comments=manifest.path.suffix != ".json")
    show_fixed_buckets(manifest.path, before, after, found, options.as_json, options.dry_run)
    for error in errors:
        echo_lines(f"warning: {error}", err=True)
    if options.dry_run or after == before:
        return manifest
    rewrite(manifest.path, after)
    return read_manifest(manifest.path, options.models)


def _suggest_regions(manifest: Manifest, as_json: bool) -> None:
    from aotc.compiler.capture.regions.suggest_regions import suggest_regions
    from aotc.models.auto_inputs import with_inputs
    from aotc.models.factory import build_module

    folder, specs = manifest.folder, manifest.models.values()
    with printing_to_stderr():
        full = [with_inputs(manifest, spec, build_module(spec, folder)) for spec in specs]
        found = [suggest_regions(spec, folder) for spec in full]
    show_suggestions(found, as_json)


def _is_new(manifest: Manifest, store_path: Path | str, tag: str) -> bool:
    """Whether the folder lacks this tag for some model, so that something must be compiled."""
    from aotc.store.files.disk import exists
    from aotc.store.layout.store import Store

    if isinstance(store_path, str):
        return False
    if not exists(store_path / "oci-layout"):
        return True
    known = {(entry.model, entry.tag) for entry in Store.open(store_path).tags()}
    return any((model, tag) not in known for model in manifest.models)


class Shown:
    """A build as a person sees it: a `Watcher`."""

    def __init__(self, options: BuildOptions, picks: PickFile | None = None) -> None:
        self._options = options
        self._picks = picks
        self.plan: list[PlannedUnit] = []
        self.outcomes: list[Outcome] = []

    @contextmanager
    def planning(self) -> Iterator[None]:
        with printing_to_stderr(), ctrl_c_kept():
            yield

    def planned(self, planned: Sequence[PlannedUnit]) -> None:
        self.plan += planned
        if self._options.explain and not (self._options.as_json or self._options.check):
            show_plan(planned, False, True)
        if not self._options.as_json:
            show_native(planned)
        show_unmatched_picks(planned, self._picks)
        waiting = sum(plan.cached is None for plan in planned)
        if waiting > ASK_ABOVE and not self._options.yes and sys.stdin.isatty():
            click.confirm(f"compile {counted(waiting, 'unit')}?", abort=True, err=True)
        end_on_sigterm()

    @contextmanager
    def compiling(self, planned: Sequence[PlannedUnit], parallel: int, known: Estimate) -> Iterator[OnEvent]:
        if not self._options.as_json:
            notice(totals(planned, known, parallel))
        progress = _progress(planned, self._options.as_json, parallel, known)
        with progress, _tracing(self._options.trace_path, progress.show) as show:

            def on_event(event: Event) -> None:
                if event.outcome is not None:
                    self.outcomes.append(event.outcome)
                show(event)

            yield on_event


@contextmanager
def _tracing(path: Path | None, on_event: OnEvent) -> Iterator[OnEvent]:
    """`on_event` that also collects the events of a trace, which is written to `path` however the build ends."""
    if path is None:
        yield on_event
        return
    from aotc.compiler.workers.build_trace import BuildTrace
    from aotc.store.files.writing import is_replaceable

    trace = BuildTrace()
    if is_replaceable(path):
        trace.write(path)  # where it cannot be written, that is said before anything is compiled

    def traced(event: Event) -> None:
        trace.add(event)
        on_event(event)

    try:
        yield traced
    finally:
        trace.write(path)


def _progress(planned: Sequence[PlannedUnit], quiet: bool, parallel: int, known: Estimate) -> Any:
    from aotc.cli.progress.build_progress import LineProgress, LiveProgress

    console = progress_console()
    kind = LiveProgress if console.is_terminal and not quiet else LineProgress
    return kind(console, planned, parallel, known)
