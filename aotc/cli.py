"""The command line; the only module that prints.

Exit codes: 0 all well, 1 a unit failed to build or to verify, the store is damaged or over its limit, 2 the command
could not run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

import aotc
from aotc.errors import AotcError, SignatureError, StoreError

if TYPE_CHECKING:
    from aotc.build.build import BuildReport, Event, OnEvent
    from aotc.build.estimate import Estimate
    from aotc.build.executors import Executor
    from aotc.build.executors.on_ray import RayOptions
    from aotc.build.plan import PlannedUnit
    from aotc.inspection.picks import PickChange
    from aotc.manifest import Manifest
    from aotc.picks import PickFile, UnitPicks
    from aotc.records import Artifact, Leaf, Report
    from aotc.store import Bundle, Readable
    from aotc.store.copying import Copied
    from aotc.store.findings import FsckReport
    from aotc.store.freed import Freed
    from aotc.store.staging import Staging
    from aotc.store.trust import SeenSignature

DEFAULT_STORE = "aotc-store"


class _StorePath(click.Path):
    """A folder, or the URL of a remote store, which stays as it is: a Path would take its slashes away."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        return value if "://" in str(value) else super().convert(value, parameter, context)


store_option = click.option(
    "--store",
    "store_path",
    type=_StorePath(path_type=Path, file_okay=False),
    default=lambda: os.environ.get("AOTC_STORE", DEFAULT_STORE),
    show_default=f"$AOTC_STORE, else {DEFAULT_STORE}",
    help="The store's folder, or its URL: s3://BUCKET/PREFIX, gs://, az://, https://, ….",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Print an AotcError as it is and exit with 2; everything else is a bug and keeps its traceback."""
    try:
        yield
    except AotcError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)


class _Main(click.Group):
    def invoke(self, context: click.Context) -> Any:
        with _typed_errors():
            return super().invoke(context)


@click.group(cls=_Main)
@click.version_option(aotc.__version__, package_name="aotc")
def main() -> None:
    """Compile PyTorch models ahead of time; start services with no compiler in the process."""
    # torch says so wherever NumPy is not installed; aotc does not need it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


# -- build ------------------------------------------------------------------------------------------------------------


@main.command()
@click.argument("manifest", type=click.Path(path_type=Path))
@store_option
@click.option("--model", "models", multiple=True, help="Build only this model (may be given several times).")
@click.option("--tag", default="latest", show_default=True, help="The tag that names the result: MODEL:TAG.")
@click.option("--target", "targets", multiple=True, help="Build only for this target (may be given several times).")
@click.option("--jobs", type=click.IntRange(min=1), help="Units at a time.  [default: as cores and memory allow]")
@click.option(
    "--executor",
    "executor_name",
    type=click.Choice(("local", "ray")),
    default="local",
    show_default=True,
    help="Compile on this machine, or on a Ray cluster.",
)
@click.option("--address", help="The cluster's address.  [default: $RAY_ADDRESS, else the one on this machine]")
@click.option(
    "--ask",
    "asks",
    multiple=True,
    metavar="TARGET=NAME:AMOUNT,…",
    help="What a unit for TARGET asks of the cluster: num_cpus, num_gpus, memory, accelerator_type, or a resource.",
)
@click.option(
    "--runtime-env",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="YAML or JSON: more for Ray's runtime environment, like `pip` or `image_uri`.",
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
    """Compile the models of MANIFEST into the store."""
    from aotc.build.build import build as run_build
    from aotc.build.build import plan_build
    from aotc.build.shards import Shard, parse_shard, split
    from aotc.build.staged import keeping, publish_remotely, with_remote_units
    from aotc.errors import ManifestError
    from aotc.manifest import read_manifest
    from aotc.manifest.options import check_options
    from aotc.store import Store
    from aotc.store.plans import put_plan

    cluster = _cluster_options(executor_name, address, asks, runtime_env, wait_for_nodes, share)
    read = read_manifest(manifest, models)
    if issues := check_options(read):
        raise ManifestError(f"{manifest} has {len(issues)} mistakes", issues=tuple(issues))
    if suggest_regions:
        _suggest_regions(read, as_json)
        return
    picks = _picks_to_take(picks_path or read.picks, locked)
    staging = _staging(store_path)
    place = staging.store.path if staging else _local(store_path)
    planned = plan_build(read, place, force, picks, targets=targets, elsewhere=cluster is not None)
    part = parse_shard(shard) if shard else None
    planned, whole = split(planned, part or Shard(1, 1))
    if staging and not force:
        planned = with_remote_units(planned, staging)
    if check:
        _check_build(read, planned, place, jobs, as_json)
        return
    if dry_run or explain:
        _show_plan(planned, as_json, explain)
    if dry_run:
        return
    _end_on_sigterm()
    with _executor(read, planned, place, jobs, staging, cluster, share=share) as (executor, known):
        progress = _progress(planned, as_json, executor, known)
        with progress, _tracing(trace_path, progress.show) as show:
            on_event = keeping(staging, show) if staging else show
            report = run_build(
                read, planned, place, executor, tag=None if part else tag, force=force, locked=locked, on_event=on_event
            )
    if part and not staging:  # of a store at a URL no part is missing: the next build takes the units from there
        put_plan(Store.open(place), tag, whole)
    if staging:
        publish_remotely(planned, tuple(report.bundles), tag, staging)
    _show_report(report, tag, store_path, as_json)
    if part and not as_json:
        click.echo(f"shard {part}: {len(planned)} of {len(whole.units)} units; `aotc merge` publishes them")
    sys.exit(1 if report.failed else 0)


def _suggest_regions(manifest: Manifest, as_json: bool) -> None:
    from aotc.build.suggest import suggest_regions
    from aotc.manifest.auto import with_inputs
    from aotc.manifest.factory import build_module

    folder, specs = manifest.folder, manifest.models.values()
    full = [with_inputs(manifest, spec, build_module(spec, folder)) for spec in specs]
    found = [suggest_regions(spec, folder) for spec in full]
    if as_json:
        _print_json(found)
        return
    for model in found:
        if model.whole is None:
            click.echo(f"{model.model}: exports as a whole; regions would only make its build shorter")
        else:
            inside = f"`{model.whole.where}`" if model.whole.where else "its own forward"
            click.echo(f"{model.model}: does not export as a whole: in {inside}, {model.whole.line}")
            click.echo(f"    {model.whole.message}")
        for tried in model.candidates:
            verdict = tried.problem and f"cannot be a region: {tried.problem}"
            kinds = f"exports, {tried.kinds} to compile"
            share = f"{tried.count} × {tried.class_name}, {tried.share:.0%} of the parameters"
            click.echo(f"    {tried.pattern}  {share}: {verdict or kinds}")
        if not model.regions:
            click.echo("    nothing that repeats could be a region")
            continue
        patterns = ", ".join(json.dumps(pattern) for pattern in model.regions)
        click.echo(f"\n  {model.model}:\n    regions: [{patterns}]\n")


@main.command()
@click.argument("stores", metavar="STORE...", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--into", type=click.Path(path_type=Path, file_okay=False), required=True, help="The store to publish in."
)
@click.option("--tag", default="latest", show_default=True, help="The tag that was built, and that is published.")
@json_option
def merge(stores: Sequence[Path], into: Path, tag: str, as_json: bool) -> None:
    """Publish what several STOREs hold as one bundle for each model: shards, or whole bundles for other targets.

    All or nothing: where a unit is missing that a shard's build had planned, no tag moves.
    """
    from aotc.build.merging import merge_stores

    merged = merge_stores(stores, into, tag)
    if as_json:
        _print_json({**msgspec.to_builtins(merged), "store": str(into)})
        return
    click.echo(f"merged {merged.units} units; blobs copied: {sum(merged.copied.values())}")
    for model, digest in merged.bundles.items():
        click.echo(f"published {into}#{model}:{tag}  {digest}")


def _picks_to_take(path: Path | None, locked: bool) -> PickFile | None:
    from aotc.build.pins import read_picks_file

    if locked and path is None:
        raise click.UsageError("--locked needs picks: give --picks FILE, or `picks:` in the manifest")
    return read_picks_file(path) if path else None


def _check_build(
    manifest: Manifest, planned: Sequence[PlannedUnit], store_path: Path, jobs: int | None, as_json: bool
) -> None:
    from aotc.build.check import check

    _end_on_sigterm()
    with _executor(manifest, planned, store_path, jobs, again=True, share=False) as (executor, known):
        progress = _progress(planned, as_json, executor, known)
        with progress:
            checked = check(manifest, planned, store_path, executor, on_event=progress.show)
    if as_json:
        _print_json([{**msgspec.structs.asdict(unit), "same": unit.same} for unit in checked])
    for unit in checked if not as_json else ():
        name = f"{unit.model} {unit.bucket} {unit.target}"
        click.echo(f"{name}: {'the same, byte for byte' if unit.same else 'differs'}")
        for issue in unit.differences:
            click.echo(f"    {issue.message}: {issue.expected} in the store, {issue.actual} now")
        if unit.error:
            click.echo(f"    {unit.error}", err=True)
    sys.exit(0 if all(unit.same for unit in checked) else 1)


def _staging(store: Path | str) -> Staging | None:
    """What stands before a store at a URL; nothing before a folder."""
    if isinstance(store, Path):
        return None
    from aotc.store.staging import Staging

    return Staging(store)


def _end_on_sigterm() -> None:
    """A CI runner's stop is a Ctrl-C: every process of the build ends with it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _show_plan(planned: Sequence[PlannedUnit], as_json: bool, explain: bool) -> None:
    if as_json:
        _print_json(
            [
                {
                    "unit": plan.unit.name,
                    "key": plan.unit.key,
                    "cached": plan.cached is not None,
                    "reasons": plan.reasons,
                }
                for plan in planned
            ]
        )
        return
    for plan in planned:
        click.echo(f"{plan.unit.name}: {'up to date' if plan.cached else 'to compile'}")
        if explain or not plan.cached:
            for reason in plan.reasons:
                click.echo(f"    {reason.message}")


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
) -> Iterator[tuple[Executor, Estimate]]:
    """Who compiles: this machine, or the cluster; and what is known of the units.

    `again`: those that the store holds are compiled too. `share`: units share what they have measured and compiled. No
    cluster is asked for a build with nothing to compile.
    """
    from aotc.build.estimate import estimate
    from aotc.build.executors import LocalExecutor, default_jobs
    from aotc.store import Store

    store = Store.open(store_path) if (store_path / "oci-layout").exists() else None
    known = estimate(store, planned)
    units = [plan.unit for plan in planned if again or plan.cached is None]
    executor: Executor
    if cluster is not None and units:
        from aotc.build.executors.on_ray import RayExecutor

        executor = RayExecutor(units, manifest.folder, cluster, staging=staging, exclude=store_path, used=known.memory)
    else:
        executor = LocalExecutor(jobs or default_jobs(units, known.memory), share=share)
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
    from aotc.build.trace import Trace

    trace = Trace()

    def traced(event: Event) -> None:
        trace.add(event)
        on_event(event)

    try:
        yield traced
    finally:
        trace.write(path)


def _progress(planned: Sequence[PlannedUnit], quiet: bool, executor: Executor, known: Estimate) -> Any:
    from aotc.progress import LineProgress, LiveProgress

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
    from aotc.build.executors.asks import parse_ask
    from aotc.build.executors.on_ray import RayOptions, read_runtime_env

    shipped = read_runtime_env(environment) if environment else {}
    return RayOptions(address, dict(map(parse_ask, asks)), shipped, wait, share)


def _show_report(report: BuildReport, tag: str, store_path: Path | str, as_json: bool) -> None:
    if as_json:
        _print_json(
            {
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
                "shared": report.shared,
                "store": str(store_path),
            }
        )
        return
    _print_table(
        ("model", "bucket", "target", "seconds", "compressed", "status"),
        [
            (o.model, o.bucket, o.target, f"{o.seconds:.1f}", _size(o.size) if o.size else "-", o.status)
            for o in report.outcomes
        ],
    )
    for outcome in report.outcomes:
        for note in outcome.notes:
            click.echo(f"{outcome.model} {outcome.bucket} {outcome.target}: {note}")
    if taken := str(report.shared):
        click.echo(f"shared between units: {taken}")
    for outcome in report.failed:
        click.echo(f"\nfailed: {outcome.model} {outcome.bucket} {outcome.target}", err=True)
        if outcome.error and outcome.error.fields.get("source"):
            click.echo(f"  at {outcome.error.fields['source']}", err=True)
        click.echo(f"  {outcome.error}", err=True)
        click.echo(f"  log: {outcome.log}", err=True)
    for model, digest in report.bundles.items():
        click.echo(f"published {store_path}#{model}:{tag}  {digest}")


# -- verify -----------------------------------------------------------------------------------------------------------


@main.command()
@click.argument("what", metavar="REF|MANIFEST")
@store_option
@click.option("--model", "models", multiple=True, help="With a manifest: verify only this model.")
@click.option("--tag", default="latest", show_default=True, help="With a manifest: the tag to verify.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Sets of random inputs.")
@click.option("--key", "keys", multiple=True, help="Run only what this public key signed; else $AOTC_TRUSTED_KEYS.")
@json_option
def verify(
    what: str, store_path: Path, models: Sequence[str], tag: str, seeds: int, keys: Sequence[str], as_json: bool
) -> None:
    """Compare compiled code with eager, bucket by bucket, in a fresh process."""
    from aotc.verify.run import verify_manifest, verify_reference

    if keys:  # the processes that verify starts read it too
        os.environ["AOTC_TRUSTED_KEYS"] = os.pathsep.join(keys)
    if Path(what).suffix in (".yaml", ".yml"):
        reports = verify_manifest(Path(what), models, store_path, tag, seeds)
    else:
        reports = verify_reference(what, store_path, seeds)
    if as_json:
        _print_json(reports)
    else:
        _print_table(
            ("model", "bucket", "target", "sizes", "error", "eager's", "allowed", "result"),
            [
                (
                    r.model,
                    r.bucket,
                    r.target,
                    r.sizes,
                    _error(r.error),
                    _error(r.eager_error),
                    _error(r.allowed),
                    r.status,
                )
                for r in reports
            ],
        )
        for report in reports:
            if report.status != "ok":
                click.echo(
                    f"{report.status}: {report.model} {report.bucket} {report.target}: {report.detail}", err=True
                )
    statuses = {report.status for report in reports}
    sys.exit(2 if "could not run" in statuses or not reports else 1 if statuses != {"ok"} else 0)


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


# -- sign -------------------------------------------------------------------------------------------------------------


@main.command()
@click.argument("ref", required=False)
@store_option
@click.option("--key", metavar="FILE|env://NAME", help="The private key: cosign's, or PEM (ECDSA P-256, RSA, Ed25519).")
@click.option("--as", "names", multiple=True, metavar="MODEL:TAG", help="Sign for this name; by default REF itself.")
@click.option("--expires", metavar="TIME", help="How long the signature is good: 30d, 12h. Default: for ever.")
@click.option("--identity", metavar="HOST/REPO", help="The docker-reference in it, for policies of other tools.")
@click.option("--generate-key-pair", "prefix", metavar="PREFIX", help="Make PREFIX.key and PREFIX.pub instead.")
@json_option
def sign(
    ref: str | None,
    store_path: Path | str,
    key: str | None,
    names: Sequence[str],
    expires: str | None,
    identity: str | None,
    prefix: str | None,
    as_json: bool,
) -> None:
    """Sign a bundle, as cosign does with a key. The password of the key is $COSIGN_PASSWORD, or is asked for."""
    from aotc.store import Store, generate_key_pair, parse_reference, read_private_key
    from aotc.store.release import sign_release

    if prefix is not None:
        click.echo(" ".join(map(str, generate_key_pair(prefix, _password(confirm=True)))))
        return
    if ref is None or key is None:
        raise click.UsageError("give REF and --key, or --generate-key-pair")
    reference = parse_reference(ref)
    store = Store.open(_local(reference.store or store_path))
    private = read_private_key(key, _password)
    claims = sign_release(store, reference, private, names=names, lifetime=expires, identity=identity)
    if as_json:
        _print_json({"key": private.public.fingerprint, "signatures": claims})
        return
    for claim in claims:
        until = f", until {claim.expires}" if claim.expires else ""
        click.echo(f"signed {claim.name or claim.digest}  {claim.digest}  by {private.public.fingerprint}{until}")


def _password(confirm: bool = False) -> bytes:
    if (given := os.environ.get("COSIGN_PASSWORD")) is not None:
        return given.encode()
    if not sys.stdin.isatty():
        raise SignatureError("the key has a password, and nobody can be asked", hint="set COSIGN_PASSWORD")
    asked: str = click.prompt("Password of the key", hide_input=True, confirmation_prompt=confirm, err=True, default="")
    return asked.encode()


# -- looking ----------------------------------------------------------------------------------------------------------


@main.command("ls")
@store_option
@json_option
def list_store(store_path: Path | str, as_json: bool) -> None:
    """List what is in the store."""
    from aotc.store import Reference, each_file, open_readable, read_artifact, read_bundle

    store = open_readable(str(store_path))
    rows: list[dict[str, Any]] = []
    for entry in store.tags():
        bundle = read_bundle(store, Reference(None, entry.model, tag=entry.tag))
        artifacts = [read_artifact(store, artifact.digest) for artifact in bundle.artifacts]
        blobs = {file.blob: file.blob_size for artifact in artifacts for file in each_file(artifact)}
        rows.append(
            {
                "model": entry.model,
                "tag": entry.tag,
                "digest": bundle.digest,
                "created": bundle.created,
                "targets": [artifact.target for artifact in artifacts],
                "buckets": max((len(artifact.variants) for artifact in artifacts), default=0),
                "weights": sorted({artifact.weights for artifact in artifacts}),
                "size": sum(blobs.values()),
            }
        )
    if as_json:
        _print_json(rows)
        return
    _print_table(
        ("model:tag", "targets", "buckets", "weights", "compressed", "created", "digest"),
        [
            (
                f"{r['model']}:{r['tag']}",
                " ".join(r["targets"]),
                str(r["buckets"]),
                " ".join(r["weights"]),
                _size(r["size"]),
                r["created"],
                r["digest"][:19],
            )
            for r in rows
        ],
    )


@main.command()
@click.argument("ref")
@store_option
@click.option("--html", "page", type=click.Path(path_type=Path), help="Write a page for a browser to this file.")
@json_option
def inspect(ref: str, store_path: Path | str, page: Path | None, as_json: bool) -> None:
    """Show one artifact: buckets, guards, kernels and what was fused into them, sizes, environment."""
    from aotc.store import (
        look_at_signatures,
        open_readable,
        parse_reference,
        read_artifact,
        read_bundle,
        read_trust,
        reader_of,
    )

    if page is not None and as_json:
        raise click.UsageError("--html and --json are two outputs: ask for one")
    reference = parse_reference(ref)
    store = open_readable(reference.store or str(store_path))
    bundle = read_bundle(store, reference)
    if page is not None:
        _write_page(store, bundle, ref, page)
        return
    signatures = look_at_signatures(reader_of(store), store.attachment, bundle.digest, reference, read_trust())
    artifacts = [read_artifact(store, entry.digest) for entry in bundle.artifacts]
    if as_json:
        _print_json(
            {
                "model": bundle.model,
                "digest": bundle.digest,
                "created": bundle.created,
                "signatures": signatures,
                "artifacts": [_with_reports(store, artifact) for artifact in artifacts],
            }
        )
        return
    click.echo(f"{bundle.model}  {bundle.digest}\ncreated {bundle.created}")
    for signature in signatures:
        click.echo(_signature_text(signature))
    for artifact in artifacts:
        _show_artifact(store, artifact)


def _write_page(store: Readable, bundle: Bundle, ref: str, path: Path) -> None:
    from aotc.inspection.page import render_page
    from aotc.store.disk import write_atomically

    data = render_page(store, bundle, ref).encode()
    write_atomically(path.absolute(), data)
    click.echo(f"wrote {path}  {_size(len(data))}")


def _signature_text(seen: SeenSignature) -> str:
    if seen.claims is None:
        return "signed  in a form that cannot be read"
    by = f"by {seen.key}" if seen.key else "by nobody in AOTC_TRUSTED_KEYS, so all of this may be a lie"
    until = f", until {seen.claims.expires}" if seen.claims.expires else ""
    flaw = f", but {seen.flaw}" if seen.key and seen.flaw else ""
    return f"signed  for {seen.claims.name or 'no name'} at {seen.claims.signed or 'no time'}{until} {by}{flaw}"


def _with_reports(store: Readable, artifact: Artifact) -> dict[str, Any]:
    from aotc.inspection.reports import read_report

    data: dict[str, Any] = msgspec.to_builtins(artifact)
    for variant, shown in zip(artifact.variants, data["variants"], strict=True):
        if report := read_report(store, variant):
            shown["kernels"] = msgspec.to_builtins(report.kernels)
    return data


def _show_artifact(store: Readable, artifact: Artifact) -> None:
    from aotc.inspection.reports import read_report
    from aotc.records import part_name
    from aotc.store import each_file

    needs = artifact.environment
    files = {file.blob: file for file in each_file(artifact)}.values()
    click.echo(f"\n{artifact.target}  built by aotc {artifact.aotc} with torch {needs.torch}")
    if artifact.regions:
        click.echo("  regions      the rest of the model runs eagerly")
    for region in artifact.regions:
        count, tensors = len(region.instances), len(region.state)
        click.echo(f"    {region.name}  {count} instances, {tensors} tensors each: {_listed(region.instances)}")
    if not artifact.regions:
        click.echo(
            f"  weights      {artifact.weights}, {len(artifact.state)} tensors of class {artifact.module.class_name}"
        )
    click.echo(f"  needs        {needs.os} {needs.machine}, glibc {needs.libc or 'any'}, {_needs_hardware(artifact)}")
    click.echo(
        f"  size         {_size(sum(f.blob_size for f in files))} compressed, {_size(sum(f.size for f in files))} hot"
    )
    click.echo("  guards")
    _show_leaves("", () if artifact.regions else artifact.signature.leaves)
    for region in artifact.regions:
        _show_leaves(f"{region.name} ", region.signature.leaves)
    modes = artifact.ambient
    click.echo(
        f"    autocast {modes.autocast or 'off'}, default dtype {modes.default_dtype}, float32 matmul precision "
        f"{modes.float32_matmul_precision}, deterministic {modes.deterministic}, training {artifact.module.training}"
    )
    listed: dict[tuple[str, ...], str] = {}
    for variant in artifact.variants:
        size = sum(file.blob_size for file in variant.files)
        name = part_name(variant.region, variant.bucket)
        click.echo(f"  bucket {name}  {_size(size)}")
        for condition in variant.conditions:
            click.echo(f"    only where {condition}")
        kernels = _kernel_lines(read_report(store, variant))
        if kernels and kernels in listed:
            kernels = (f"    kernels as in bucket {listed[kernels]}",)
        else:
            listed[kernels] = name
        for line in kernels:
            click.echo(line)


def _show_leaves(where: str, leaves: Sequence[Leaf]) -> None:
    from aotc.records import ConstantLeaf

    for leaf in leaves:
        if isinstance(leaf, ConstantLeaf):
            click.echo(f"    {where}{leaf.path} is {leaf.value!r}")
        else:
            shape = ", ".join(map(str, leaf.shape))
            click.echo(f"    {where}{leaf.path} is a {leaf.layout} {leaf.dtype} [{shape}]")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _kernel_lines(report: Report | None) -> tuple[str, ...]:
    return tuple(
        f"    {kernel.calls:4} × {kernel.kind:6} {kernel.name}: {' + '.join(kernel.operators)}"
        for kernel in (report.kernels if report else ())
    )


def _needs_hardware(artifact: Artifact) -> str:
    needs = artifact.environment
    if needs.cuda_capability:
        return f"a GPU of capability {needs.cuda_capability}, CUDA {needs.cuda}"
    return f"CPU features {' '.join(needs.cpu_features)}"


# -- push and pull ----------------------------------------------------------------------------------------------------


@main.command()
@click.argument("ref")
@click.argument("destination", metavar="oci://HOST/REPO:TAG|URL[#MODEL:TAG]")
@store_option
@json_option
def push(ref: str, destination: str, store_path: Path | str, as_json: bool) -> None:
    """Upload a bundle to a registry or object storage: only what is not there, the tag last."""
    from aotc.store import Store, parse_reference
    from aotc.store.copying import parse_destination
    from aotc.store.copying import push as run_push
    from aotc.transfer_progress import TransferProgress

    _end_on_sigterm()
    reference = parse_reference(ref)
    to = parse_destination(destination, reference)
    store = Store.open(_local(reference.store or store_path))
    with TransferProgress(Console(stderr=True), f"push {reference.name}") as progress:
        copied = run_push(store, reference, to, on_event=progress.show)
    _show_copied("pushed", copied, as_json)


@main.command()
@click.argument("source", metavar="oci://HOST/REPO:TAG|URL#MODEL[:TAG]")
@store_option
@click.option("--tag", help="What to call it here: MODEL:TAG. Default: the source's tag.")
@click.option("--target", "targets", multiple=True, help="Only the artifact for this target (several may be given).")
@json_option
def pull(source: str, store_path: Path | str, tag: str | None, targets: Sequence[str], as_json: bool) -> None:
    """Download a bundle of a registry or a URL into the store: only what is not there, the tag last."""
    from aotc.store import parse_reference
    from aotc.store.copying import pull as run_pull
    from aotc.transfer_progress import TransferProgress

    _end_on_sigterm()
    reference = parse_reference(source)
    with TransferProgress(Console(stderr=True), f"pull {reference.name}") as progress:
        copied = run_pull(reference, _local(store_path), tag=tag, targets=targets, on_event=progress.show)
    _show_copied("pulled", copied, as_json)


def _local(store: Path | str) -> Path:
    """The folder of a store. Raises StoreError for a URL."""
    if "://" in str(store):
        raise StoreError(f"{store} is no folder, and this command works on one", hint="`aotc pull` from there first")
    return Path(store)


def _show_copied(did: str, copied: Copied, as_json: bool) -> None:
    if as_json:
        _print_json(copied)
        return
    click.echo(f"{did} {copied.reference}  {copied.digest}")
    click.echo(
        f"  {copied.moved} of {copied.blobs} blobs moved; {_size(copied.sent)} sent, {_size(copied.received)} received "
        f"in {copied.requests} requests and {copied.seconds:.1f} s"
    )


@main.command()
@click.argument("refs", metavar="REF...", nargs=-1, required=True)
@store_option
@click.option("--diff", is_flag=True, help="Of two REFs: show where the second picked otherwise, and what it cost.")
@click.option(
    "--export", type=click.Path(path_type=Path, dir_okay=False), help="Write a file for `aotc build --picks`."
)
@json_option
def picks(refs: Sequence[str], store_path: Path | str, diff: bool, export: Path | None, as_json: bool) -> None:
    """Show what autotuning decided in REF: winner, runner-up, margin, how often it is used."""
    from aotc.inspection.picks import changes, exported, picks_of
    from aotc.store.disk import write_atomically

    found = [picks_of(ref, store_path) for ref in refs]
    if diff:
        if len(found) != 2:
            raise click.UsageError("--diff compares two references")
        _show_pick_changes(changes(*found), as_json)
        return
    units = [unit for bundle in found for unit in bundle]
    if export:
        write_atomically(export.absolute(), exported(units))
        click.echo(f"wrote {sum(len(unit.picks) for unit in units)} picks of {len(units)} units to {export}")
        return
    if as_json:
        _print_json(units)
        return
    for unit in units:
        _show_unit_picks(unit)


def _show_unit_picks(unit: UnitPicks) -> None:
    from aotc.records import part_name

    click.echo(
        f"\n{unit.model} {part_name(unit.region, unit.bucket)} {unit.target}, on {unit.device}, torch {unit.torch}"
    )
    rows = []
    for pick in unit.picks:
        runner_up = pick.runner_up
        rows.append(
            (
                pick.kind,
                pick.subject,
                " ".join(text.partition(" stride")[0] for text in pick.inputs)[:80],
                str(pick.winner),
                _ms(pick.winner.ms),
                str(runner_up) if runner_up else "-",
                _ms(runner_up.ms if runner_up else None),
                "-" if pick.margin is None else f"{pick.margin:+.1%}",
                f"{pick.uses}×",
            )
        )
    _print_table(("kind", "what", "inputs", "winner", "ms", "runner-up", "ms", "margin", "used"), rows)


def _show_pick_changes(found: Sequence[PickChange], as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    _print_table(
        ("unit", "kind", "what", "first", "ms", "second", "ms", "cost"),
        [
            (
                change.unit,
                change.kind,
                change.subject,
                str(change.first) if change.first else "-",
                _ms(change.first.ms if change.first else None),
                str(change.second) if change.second else "-",
                _ms(change.second.ms if change.second else None),
                "-" if change.cost is None else f"{change.cost:+.1%}",
            )
            for change in found
        ],
    )
    if not found:
        click.echo("the same picks")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


@main.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@store_option
@click.option("--target", help="Compare only the artifacts for this target.")
@click.option("--sources", is_flag=True, help="Show how the sources of changed kernels differ.")
@json_option
def diff(a: str, b: str, store_path: Path | str, target: str | None, sources: bool, as_json: bool) -> None:
    """Show what differs between two artifacts, and why where that is known: exit code 0 if nothing, 1 if anything."""
    from aotc.inspection.compare import compare_bundles, open_side
    from aotc.inspection.tree import difference_tree
    from aotc.store import open_readable, parse_reference

    references = [parse_reference(ref) for ref in (a, b)]
    sides = [open_side(open_readable(ref.store or str(store_path)), ref) for ref in references]
    difference = compare_bundles(sides[0], sides[1], target)
    if as_json:
        _print_json({"equal": difference.equal, **msgspec.to_builtins(difference)})
    else:
        _console().print(difference_tree(a, b, difference, sources=sources), soft_wrap=True)
    sys.exit(0 if difference.equal else 1)


@main.command()
@click.argument("factory", metavar="FACTORY")
@click.option("--call", metavar="FUNCTION", help="package.module:function that gives the arguments of one call.")
@click.option("--kwarg", "kwargs", multiple=True, metavar="NAME=VALUE", help="An argument of the factory, as in YAML.")
@click.option("--name", help="The model's name; else the factory's.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("manifest.yaml"), show_default=True)
def init(factory: str, call: str | None, kwargs: Sequence[str], name: str | None, output: Path) -> None:
    """Write a first manifest, from a model's FACTORY (package.module:name) and one example call."""
    from aotc.manifest.first import write_first_manifest

    click.echo(write_first_manifest(output, factory, call, _read_kwargs(kwargs), name), nl=False)
    click.echo(f"wrote {output}", err=True)


def _read_kwargs(texts: Sequence[str]) -> dict[str, Any]:
    import yaml

    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--kwarg")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise click.BadParameter(f"{name}: {error}", param_hint="--kwarg") from None
    return found


@main.command()
def schema() -> None:
    """Print the JSON Schema of manifests, for editors."""
    from aotc.manifest import SCHEMA

    _print_json(SCHEMA)


# -- keeping the store ------------------------------------------------------------------------------------------------

cache_option = click.option(
    "--cache", is_flag=True, help="The hot copies of this host ($AOTC_CACHE_DIR) instead of the store."
)


@main.command()
@store_option
@cache_option
@click.option("--repair", is_flag=True, help="Remove what cannot be right and restore what is certain; say all of it.")
@json_option
def fsck(store_path: Path | str, cache: bool, repair: bool, as_json: bool) -> None:
    """Check every byte of the store. Builds may run meanwhile. 1 where something is wrong; garbage is not."""
    from aotc.store import default_hot_folder
    from aotc.store.fsck import fsck as check
    from aotc.store.fsck_hot import fsck_hot

    report = fsck_hot(default_hot_folder(), repair=repair) if cache else check(_local(store_path), repair=repair)
    if as_json:
        _print_json({**msgspec.to_builtins(report), "clean": not report.errors})
    else:
        _show_findings(report)
    sys.exit(1 if report.errors else 0)


def _show_findings(report: FsckReport) -> None:
    for done in report.repairs:
        click.echo(f"repaired: {done.path}: {done.action}")
    for found in report.findings:
        if found.severity == "garbage":
            continue
        click.echo(f"{found.severity}: {found.kind}: {found.path}: {found.message}", err=True)
        if found.expected or found.actual:
            click.echo(f"    expected {found.expected or '-'}, found {found.actual or '-'}", err=True)
        if found.needed_by:
            click.echo(f"    needed by {', '.join(found.needed_by)}", err=True)
        if found.hint:
            click.echo(f"    hint: {found.hint}", err=True)
    garbage = [found for found in report.findings if found.severity == "garbage"]
    if garbage:
        click.echo(
            f"garbage: {len(garbage)} things, {_size(sum(found.size for found in garbage))}; `aotc gc` frees them"
        )
    click.echo(f"{report.folder}: {report.blobs} blobs, {_size(report.size)} read, {len(report.errors)} errors")


@main.command()
@store_option
@cache_option
@click.option("--older-than", metavar="AGE", help="Units and logs (with --untag, tags too) not used for AGE, like 30d.")
@click.option("--max-size", metavar="SIZE", help="What was used least recently, until SIZE is left, like 20GiB.")
@click.option("--untag", is_flag=True, help="Remove tags at all: by --keep, --keep-last, --older-than or --max-size.")
@click.option("--keep", metavar="PATTERN", multiple=True, help="With --untag: keep tags like 'model:*' (repeatable).")
@click.option("--keep-last", type=click.IntRange(min=0), help="With --untag: keep each model's newest N.  [default: 1]")
@click.option(
    "--grace", metavar="AGE", default="1h", show_default=True, help="Keep for AGE what nothing names any more."
)
@click.option("--dry-run", is_flag=True, help="Say what would go; remove nothing.")
@json_option
def gc(
    store_path: Path | str,
    cache: bool,
    older_than: str | None,
    max_size: str | None,
    untag: bool,
    keep: Sequence[str],
    keep_last: int | None,
    grace: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Free what nothing names. What a tag reaches always stays; 1 where --max-size cannot be kept for that."""
    from aotc.store import Store, default_hot_folder
    from aotc.store.amounts import parse_age, parse_size
    from aotc.store.gc import collect
    from aotc.store.gc_hot import collect_hot
    from aotc.store.retention import Policy

    age, size = parse_age(older_than) if older_than else None, parse_size(max_size) if max_size else None
    if cache:
        if untag or keep or keep_last is not None:
            raise click.UsageError("--cache has no tags: leave out --untag, --keep and --keep-last")
        freed = collect_hot(
            default_hot_folder(), max_size=size, older_than=age, grace=parse_age(grace), dry_run=dry_run
        )
    else:
        policy = Policy(age, size, untag, tuple(keep), keep_last, parse_age(grace))
        freed = collect(Store.open(_local(store_path)), policy, dry_run=dry_run)
    if as_json:
        _print_json({**msgspec.to_builtins(freed), "freed": freed.freed})
    else:
        _show_freed(freed)
    sys.exit(1 if freed.over else 0)


def _show_freed(freed: Freed) -> None:
    for removal in freed.removed:
        size = f"  {_size(removal.size)}" if removal.size else ""
        click.echo(f"{removal.kind} {removal.name}{size}: {removal.reason}")
    verb = "would be freed" if freed.dry_run else "freed"
    click.echo(f"{freed.folder}: {_size(freed.freed)} {verb}, {_size(freed.kept)} kept")
    if freed.waiting:
        click.echo(f"{_size(freed.waiting)} more may go after the grace period, since somebody may still be using them")
    for writer in freed.writers:
        click.echo(f"spared what has been written since it began: {writer}")
    if freed.over:
        click.echo(f"error: {_size(freed.over)} over the size limit", err=True)
        click.echo("  hint: the rest is tagged or in use: --untag lets gc remove tags, or raise the limit", err=True)


# -- printing ---------------------------------------------------------------------------------------------------------


def _print_json(value: Any) -> None:
    click.echo(json.dumps(msgspec.to_builtins(value, enc_hook=str), indent=2, ensure_ascii=False))


def _print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    _console().print(table, soft_wrap=True)


def _console() -> Console:
    """Standard output; where it is no terminal, lines are as long as they need to be."""
    console = Console()
    return console if console.is_terminal else Console(width=10_000)


def _size(count: int) -> str:
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
