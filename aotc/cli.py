"""The command line; the only module that prints.

Exit codes: 0 all well, 1 a unit failed to build or to verify, 2 the command could not run.
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
from aotc.errors import AotcError, StoreError

if TYPE_CHECKING:
    from aotc.build.build import BuildReport
    from aotc.build.plan import PlannedUnit
    from aotc.records import Artifact
    from aotc.store import Readable
    from aotc.store.copying import Copied
    from aotc.store.staging import Staging

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
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Units compiled side by side.")
@click.option("--dry-run", is_flag=True, help="Say what would be compiled; write nothing.")
@click.option("--explain", is_flag=True, help="Say of every unit that is not up to date why.")
@click.option("--force", is_flag=True, help="Compile everything, also what the store already holds.")
@json_option
def build(
    manifest: Path,
    store_path: Path | str,
    models: Sequence[str],
    tag: str,
    jobs: int,
    dry_run: bool,
    explain: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Compile the models of MANIFEST into the store."""
    from aotc.build.build import build as run_build
    from aotc.build.build import plan_build
    from aotc.build.staged import keeping, publish_remotely, with_remote_units
    from aotc.errors import ManifestError
    from aotc.manifest import read_manifest
    from aotc.manifest.options import check_options

    read = read_manifest(manifest, models)
    if issues := check_options(read):
        raise ManifestError(f"{manifest} has {len(issues)} mistakes", issues=tuple(issues))
    staging = _staging(store_path)
    place = staging.store.path if staging else _local(store_path)
    planned = plan_build(read, place, force)
    if staging and not force:
        planned = with_remote_units(planned, staging)
    if dry_run or explain:
        _show_plan(planned, as_json, explain)
    if dry_run:
        return
    _end_on_sigterm()
    progress = _progress(planned, quiet=as_json)
    with progress:
        on_event = keeping(staging, progress.show) if staging else progress.show
        report = run_build(read, planned, place, tag=tag, jobs=jobs, force=force, on_event=on_event)
    if staging:
        publish_remotely(planned, tuple(report.bundles), tag, staging)
    _show_report(report, tag, store_path, as_json)
    sys.exit(1 if report.failed else 0)


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


def _progress(planned: Sequence[PlannedUnit], quiet: bool) -> Any:
    from aotc.progress import LineProgress, LiveProgress

    console = Console(stderr=True)
    kind = LiveProgress if console.is_terminal and not quiet else LineProgress
    return kind(console, planned)


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
                        "error": str(outcome.error) if outcome.error else None,
                        "source": outcome.error.fields.get("source", "") if outcome.error else "",
                    }
                    for outcome in report.outcomes
                ],
                "bundles": report.bundles,
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
@json_option
def verify(what: str, store_path: Path, models: Sequence[str], tag: str, seeds: int, as_json: bool) -> None:
    """Compare compiled code with eager, bucket by bucket, in a fresh process."""
    from aotc.verify.run import verify_manifest, verify_reference

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
@json_option
def inspect(ref: str, store_path: Path | str, as_json: bool) -> None:
    """Show one artifact: buckets, guards, kernels and what was fused into them, sizes, environment."""
    from aotc.store import open_readable, parse_reference, read_artifact, read_bundle

    reference = parse_reference(ref)
    store = open_readable(reference.store or str(store_path))
    bundle = read_bundle(store, reference)
    artifacts = [read_artifact(store, entry.digest) for entry in bundle.artifacts]
    if as_json:
        _print_json(
            {
                "model": bundle.model,
                "digest": bundle.digest,
                "created": bundle.created,
                "artifacts": [_with_reports(store, artifact) for artifact in artifacts],
            }
        )
        return
    click.echo(f"{bundle.model}  {bundle.digest}\ncreated {bundle.created}")
    for artifact in artifacts:
        _show_artifact(store, artifact)


REPORT_LIMIT = 256 << 20


def _with_reports(store: Readable, artifact: Artifact) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(artifact)
    for variant, shown in zip(artifact.variants, data["variants"], strict=True):
        if variant.report:
            shown["kernels"] = json.loads(store.blobs.load(variant.report, REPORT_LIMIT))["kernels"]
    return data


def _show_artifact(store: Readable, artifact: Artifact) -> None:
    from aotc.records import ConstantLeaf, bucket_name
    from aotc.store import each_file

    needs = artifact.environment
    files = {file.blob: file for file in each_file(artifact)}.values()
    click.echo(f"\n{artifact.target}  built by aotc {artifact.aotc} with torch {needs.torch}")
    click.echo(
        f"  weights      {artifact.weights}, {len(artifact.state)} tensors of class {artifact.module.class_name}"
    )
    click.echo(f"  needs        {needs.os} {needs.machine}, glibc {needs.libc or 'any'}, {_needs_hardware(artifact)}")
    click.echo(
        f"  size         {_size(sum(f.blob_size for f in files))} compressed, {_size(sum(f.size for f in files))} hot"
    )
    click.echo("  guards")
    for leaf in artifact.signature.leaves:
        if isinstance(leaf, ConstantLeaf):
            click.echo(f"    {leaf.path} is {leaf.value!r}")
        else:
            shape = ", ".join(map(str, leaf.shape))
            click.echo(f"    {leaf.path} is a {leaf.layout} {leaf.dtype} [{shape}]")
    modes = artifact.ambient
    click.echo(
        f"    autocast {modes.autocast or 'off'}, default dtype {modes.default_dtype}, float32 matmul precision "
        f"{modes.float32_matmul_precision}, deterministic {modes.deterministic}, training {artifact.module.training}"
    )
    for variant in artifact.variants:
        size = sum(file.blob_size for file in variant.files)
        click.echo(f"  bucket {bucket_name(variant.bucket)}  {_size(size)}")
        for condition in variant.conditions:
            click.echo(f"    only where {condition}")
        if variant.report:
            for kernel in json.loads(store.blobs.load(variant.report, REPORT_LIMIT))["kernels"]:
                operators = " + ".join(kernel.get("operators", ()))
                click.echo(f"    {kernel['calls']:4} × {kernel['kind']:6} {kernel['name']}: {operators}")


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
def schema() -> None:
    """Print the JSON Schema of manifests, for editors."""
    from aotc.manifest import SCHEMA

    _print_json(SCHEMA)


# -- printing ---------------------------------------------------------------------------------------------------------


def _print_json(value: Any) -> None:
    click.echo(json.dumps(msgspec.to_builtins(value, enc_hook=str), indent=2, ensure_ascii=False))


def _print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    console.print(table, soft_wrap=True)


def _size(count: int) -> str:
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
