"""`aotc inspect`: the contents of one bundle as text, as JSON, or as an HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from aotc.amounts import counted, listed, size_text
from aotc.cli.options import json_option, page_option, store_of, store_option
from aotc.cli.output import echo, print_json, written
from aotc.errors import one_line

if TYPE_CHECKING:
    from aotc.provenance import BuiltArtifact, BuiltVariant, Report
    from aotc.records import File, Leaf, Parameter
    from aotc.store.layout.bundle import Bundle
    from aotc.store.layout.compiler_cache import CompilerCache
    from aotc.store.readable import ReadableStore
    from aotc.store.signing.trust import SeenSignature
    from aotc.verification import Verification
    from aotc.verify.verdicts import VerifyReport


@click.command()
@click.argument("ref")
@store_option
@page_option
@click.option(
    "--verified",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="With --html: show these verdicts, the output of `aotc verify REF --json`.",
)
@json_option
def inspect(ref: str, store_path: Path | str, page: Path | None, verified: Path | None, as_json: bool) -> None:
    """Show a bundle: buckets, guards, kernels, sizes, signatures, attestations.

    Also shows the operators fused into each kernel, the environment that each artifact needs, and whether it can run
    without torch, or what keeps it from that.
    """
    from aotc.standalone.misfits import misfits
    from aotc.store.layout.built import read_built
    from aotc.store.layout.bundle import read_bundle
    from aotc.store.layout.compiler_cache import read_cache
    from aotc.store.opening import open_readable
    from aotc.store.reference import parse_reference
    from aotc.store.signing.attachments import reader_of
    from aotc.store.signing.build_statements import statements_of
    from aotc.store.signing.trust import look_at_signatures, read_trust
    from aotc.store.signing.verified import verified_in

    if page is not None and as_json:
        raise click.UsageError("give --html or --json, not both")
    if verified is not None and page is None:
        raise click.UsageError("--verified goes with --html")
    reference = parse_reference(ref)
    store = open_readable(*store_of(store_path, reference))
    bundle = read_bundle(store, reference)
    if page is not None:
        whole = msgspec.structs.replace(reference, store=reference.store or str(store_path))
        from aotc.tools.inspection.bundle_page import render_page

        verdicts = _verdicts(verified, bundle) if verified else ()
        echo(written(page, render_page(store, bundle, str(whole), verdicts).encode()))
        return
    trust = read_trust()
    signatures = look_at_signatures(reader_of(store), store.attachment, bundle.digest, reference, trust)
    attested = verified_in(store, bundle.digest, trust)
    stated = list(statements_of(store, bundle.digest, trust.keys if trust else ()))
    cached = [read_cache(store, entry) for entry in bundle.artifacts if entry.is_cache]
    models = [entry for entry in bundle.artifacts if not entry.is_cache]
    artifacts = [read_built(store, entry) for entry in models]
    if as_json:
        print_json(
            {
                "model": bundle.model,
                "digest": bundle.digest,
                "created": bundle.created,
                "signatures": signatures,
                "statements": stated,
                "artifacts": [
                    {
                        "digest": entry.digest,
                        "verified": attested.get(entry.digest),
                        "misfits": misfits(artifact),
                        **_with_reports(store, artifact),
                    }
                    for entry, artifact in zip(models, artifacts, strict=True)
                ],
                **({"caches": cached} if cached else {}),
            }
        )
        return
    echo(f"{bundle.model}  {bundle.digest}")
    if bundle.created:
        echo(f"created {bundle.created}")
    for signature in signatures:
        echo(_signature_text(signature))
    for one in stated:
        signed = f"signed by {one.key}" if one.key else "signed by no trusted key"
        echo(f"{'built by' if one.kind == 'provenance' else 'SBOM'} {one.said}, {signed}")
    for cache in cached:
        _show_cache(cache)
    for entry, artifact in zip(models, artifacts, strict=True):
        _show_artifact(store, artifact, attested.get(entry.digest))


def _verified_text(verification: Verification) -> Iterator[str]:
    where = verification.environment.gpu or verification.environment.machine
    yield f"{verification.verdict} `aotc verify` at {verification.created:%FT%TZ} on {where}"
    for limit in verification.limits:
        yield f"  {limit.verdict}: {limit.name} {limit.found}, {limit.limit}"


def _verdicts(path: Path, bundle: Bundle) -> list[VerifyReport]:
    """What `aotc verify --json` has said of this bundle. Raises CorruptError, NotFoundError, StoreError."""
    from aotc.errors import NotFoundError
    from aotc.store.files.disk import typed_errors
    from aotc.verify.verdicts import decode_reports

    with typed_errors("read", path):
        data = path.read_bytes()
    reports = decode_reports(data, str(path))
    found = [report for report in reports if report.bundle == bundle.digest]
    if not found:
        others = tuple(dict.fromkeys(report.bundle or "no bundle" for report in reports))
        raise NotFoundError(
            f"{path} has no verdict on the bundle {bundle.digest}; it has verdicts on {', '.join(others) or 'nothing'}",
            hint="verify this bundle: `aotc verify REF --json > FILE`",
            known=others,
        )
    return found


def _signature_text(seen: SeenSignature) -> str:
    if seen.claims is None:
        return "signed  in a form that cannot be read"
    by = f"by {seen.key}" if seen.key else "by none of AOTC_TRUSTED_KEYS, so none of this is verified"
    until = f", until {seen.claims.expires}" if seen.claims.expires else ""
    flaw = f", but {seen.flaw}" if seen.key and seen.flaw else ""
    name = seen.claims.name if re.fullmatch(r"[\w./:@-]*", seen.claims.name) else repr(seen.claims.name)
    return f"signed  for {name or 'no name'} at {seen.claims.signed or 'no time'}{until} {by}{flaw}"


def _with_reports(store: ReadableStore, artifact: BuiltArtifact) -> dict[str, Any]:
    from aotc.store.layout.built import read_report
    from aotc.store.layout.units import find_built

    data: dict[str, Any] = {**msgspec.to_builtins(artifact), "operators": msgspec.to_builtins(artifact.operators)}
    for variant, shown in zip(artifact.variants, data["variants"], strict=True):
        if report := read_report(store, variant):
            shown["kernels"] = msgspec.to_builtins(report.kernels)
            shown["patches"] = report.patches
        if (unit := find_built(store, variant.key)) and unit.times:
            shown["times"] = msgspec.to_builtins(unit.times)
    return data


def _files_of_variants(artifact: BuiltArtifact) -> list[File]:
    return [file for variant in artifact.variants for file in variant.files]


def _show_cache(cache: CompilerCache) -> None:
    """Whose files it holds, for which machine and versions, and each file."""
    needs = cache.environment
    versions = ", ".join(f"{name} {version}" for name, version in sorted(cache.packages.items()))
    echo()
    echo(f"{cache.target}  a compiler cache, saved with torch {needs.torch}; `aotc cache restore` writes its files")
    if versions:
        echo(f"  packages     {versions}")
    if cache.variables:
        variables = " ".join(f"{name}={value}" for name, value in sorted(cache.variables.items()))
        echo(f"  variables    {one_line(variables)}")
    if cache.code:
        echo(f"  code         {one_line(cache.code)}")
    on = f"{needs.gpu} of capability {needs.cuda_capability}, CUDA {needs.cuda}" if needs.cuda_capability else "CPU"
    echo(f"  machine      {needs.os} {needs.machine}, glibc {needs.libc or 'any'}, {one_line(on)}")
    total = sum(file.size for file in cache.files)
    echo(f"  size         {size_text(cache.pack.blob_size)} compressed, {size_text(total)} decompressed")
    for kind in dict.fromkeys(file.kind for file in cache.files):
        files = [file for file in cache.files if file.kind == kind]
        echo(f"  {kind}  {counted(len(files), 'file')}, {size_text(sum(file.size for file in files))}")
        for file in files:
            echo(f"    {one_line(file.path)}  {size_text(file.size)}")


def _show_artifact(store: ReadableStore, artifact: BuiltArtifact, verification: Verification | None) -> None:
    from aotc.records import bucket_name, part_name
    from aotc.store.layout.built import read_report
    from aotc.store.layout.bundle import each_file

    needs = artifact.environment
    files = {file.blob: file for file in each_file(artifact)}.values()
    echo()
    echo(f"{artifact.target}  built by aotc {artifact.aotc} with torch {needs.torch}")
    if artifact.untested:
        device = "CPU" if artifact.target.startswith("cpu:") else "GPU"
        echo(f"  untested     built without such a {device}{'' if verification else '; it has never run'}")
    for line in _verified_text(verification) if verification else ():
        echo(f"  verified     {line}")
    if artifact.method:
        echo(f"  method       {artifact.method}")
    if artifact.regions:
        echo("  regions      the rest of the model runs eagerly")
    if artifact.calls:
        echo(f"  padded to    {', '.join(bucket_name(call.bucket) for call in artifact.calls)}: the model's own calls")
    if artifact.parallel is not None:
        parallel = artifact.parallel
        echo(
            f"  parallel     the code of one of {parallel.size} ranks of {parallel.dim}: "
            "aotc.load needs ranks=aotc.Ranks(GROUP)"
        )
    for line in _gradients_text(artifact):
        echo(f"  train        {line}")
    for region in artifact.regions:
        count, tensors = counted(len(region.instances), "instance"), counted(len(region.state), "tensor")
        echo(f"    {region.name}  {count}, {tensors} each: {listed(region.instances, 4)}")
    if not artifact.regions:
        tensors = counted(len(artifact.state), "tensor")
        echo(f"  weights      {artifact.weights}, {tensors} of class {artifact.module.class_name}")
    for kind in (artifact, *artifact.kinds) if artifact.kinds else ():
        ranks = ", ".join(map(str, kind.parallel.ranks)) if kind.parallel else ""
        tensors, held = counted(len(kind.state), "tensor"), sum(one.blob_size for one in _files_of_variants(kind))
        echo(f"  rank {ranks:7} code of its own: {tensors}, {size_text(held)} compressed")
    libraries = ", ".join((f"glibc {needs.libc or 'any'}", *needs.libstdcxx))
    echo(f"  needs        {needs.os} {needs.machine}, {libraries}, {_needs_hardware(artifact)}")
    for line in _standalone_text(artifact):
        echo(f"  {line}")
    for need in artifact.operators:
        library = f", which loads {need.library}" if need.library else ""
        echo(f"  operator     {need.name}: import {need.module} first{library}")
    compressed, size = sum(file.blob_size for file in files), sum(file.size for file in files)
    echo(f"  size         {size_text(compressed)} compressed, {size_text(size)} decompressed")
    echo("  guards")
    _show_leaves("", () if artifact.regions else artifact.signature.leaves)
    for line in () if artifact.regions else _empty_text(artifact.signature.parameters):
        echo(f"    {line}")
    for region in artifact.regions:
        _show_leaves(f"{region.name} ", region.signature.leaves)
    modes = {**msgspec.structs.asdict(artifact.ambient), "training": artifact.module.training}
    modes["autocast"] = modes["autocast"] or "off"
    if differ := artifact.module.training_differs:
        other = counted(len(differ), "submodule")
        modes["training"] = f"{artifact.module.training} ({not artifact.module.training} in {other})"
    shown = (f"{name.replace('_', ' ')} {mode}" for name, mode in modes.items() if mode is not None)
    echo(f"    {', '.join(shown)}")
    reports = [read_report(store, variant) for variant in artifact.variants]
    patches = dict.fromkeys(name for report in reports if report for name in report.patches)
    if patches:
        echo(f"  patches of torch  {len(patches)} applied; --json has their names")
    bucket_of: dict[tuple[str, ...], str] = {}
    for variant, report in zip(artifact.variants, reports, strict=True):
        size = sum(file.blob_size for file in variant.files)
        name = part_name(variant.region, variant.bucket)
        echo(f"  bucket {name}  {size_text(size)}{_times_text(store, variant)}")
        if variant.untuned:
            echo(f"    untuned: {counted(len(variant.untuned), 'decision')} by Inductor's defaults; --json has them")
        for condition in variant.conditions:
            echo(f"    only where {condition}")
        kernels = _kernel_lines(report)
        if kernels and kernels in bucket_of:
            kernels = (f"    kernels as in bucket {bucket_of[kernels]}",)
        else:
            bucket_of[kernels] = name
        for line in kernels:
            echo(line)


def _standalone_text(artifact: BuiltArtifact) -> Iterator[str]:
    from aotc.standalone.misfits import misfits

    reasons = misfits(artifact)
    if reasons is None:
        yield "standalone   unknown: built by an aotc that did not record what its libraries import"
    elif not reasons:
        yield "standalone   fits: it can run without torch"
    else:
        yield f"standalone   no: {one_line(reasons[0])}"
        for reason in reasons[1:]:
            yield f"             and {one_line(reason)}"


def _times_text(store: ReadableStore, variant: BuiltVariant) -> str:
    """What a call takes, where the build's unit is in the store."""
    from aotc.store.layout.units import find_built

    unit = find_built(store, variant.key)
    if unit is None or unit.times is None:
        return ""
    compiled, eager = unit.times.compiled, unit.times.eager
    busy = ", on a busy machine" if unit.times.on_busy_machine else ""
    sizes = "".join(f" at {dim}={size}" for dim, size in unit.times.sizes.items())
    beside = f", in eager {eager.least_ms:.4g} ms" if eager else ""
    return f", a call{sizes} {compiled.least_ms:.4g} ms{beside}{busy}"


def _show_leaves(where: str, leaves: Sequence[Leaf]) -> None:
    from aotc.records import ConstantLeaf

    for leaf in leaves:
        if isinstance(leaf, ConstantLeaf):
            echo(f"    {where}{leaf.path} is {leaf.value!r}")
        else:
            shape = ", ".join(map(str, leaf.shape))
            left_out = "" if leaf.default is None else f", or left out, for {leaf.default}"
            echo(f"    {where}{leaf.path} is a {leaf.layout} {leaf.dtype} [{shape}]{left_out}")


def _gradients_text(artifact: BuiltArtifact) -> Iterator[str]:
    """Of a model with `train: true`: which tensors get gradients, and which do not."""
    from aotc.records import TensorLeaf

    if not any(variant.backward for variant in artifact.variants):
        return
    state: set[str] = set()
    leaves: set[int] = set()
    for variant in artifact.variants:
        leaves |= variant.with_gradients
        for gradient in variant.backward.gradients if variant.backward else ():
            if (name := variant.arguments[gradient.argument].state) is not None:
                state.add(name)
    inputs = [leaf.path for leaf in artifact.signature.leaves if isinstance(leaf, TensorLeaf)]
    given = {artifact.signature.leaves[index].path for index in leaves}
    for what, names, having in (
        ("module tensor", [spec.name for spec in artifact.state], state),
        ("input", inputs, given),
    ):
        for way, some in (
            ("with", [n for n in names if n in having]),
            ("without", [n for n in names if n not in having]),
        ):
            if some:
                yield f"{counted(len(some), what)} {way} gradient: {listed(some, 4)}"


def _empty_text(parameters: Sequence[Parameter]) -> Iterator[str]:
    """The guards of dict and list arguments that were empty at the build: they have no leaves."""
    from aotc.records import TUPLE

    for parameter in parameters:
        if parameter.tree in ({}, [], [TUPLE]):
            kind = "dict" if parameter.tree == {} else "tuple" if parameter.tree else "list"
            yield f"{parameter.name} is an empty {kind}"


def _kernel_lines(report: Report | None) -> tuple[str, ...]:
    return tuple(
        f"    {kernel.calls:4} × {kernel.kind:6} {kernel.name}: {' + '.join(kernel.operators)}"
        for kernel in (report.kernels if report else ())
    )


def _needs_hardware(artifact: BuiltArtifact) -> str:
    needs = artifact.environment
    if needs.cuda_capability:
        return f"a GPU of capability {needs.cuda_capability}, CUDA {needs.cuda}"
    return f"CPU features {' '.join(needs.cpu_features)}"
