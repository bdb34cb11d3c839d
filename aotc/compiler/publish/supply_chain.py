"""What `aotc build --attest` states of its bundles: where they come from (SLSA) and what is in them (CycloneDX).

Both are plain JSON of their specifications: https://slsa.dev/spec/v1.1/provenance, https://cyclonedx.org/docs/1.6/json.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import aotc
from aotc.provenance import BuiltArtifact
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import Bundle, each_file, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import Reference
from aotc.store.signing.attachments import SIGNATURE, Layer
from aotc.store.signing.attestations import PREDICATE_TYPE, add_envelopes, encode_statement
from aotc.store.signing.build_statements import PREDICATES, statements_of
from aotc.store.signing.keys import PrivateKey

BUILD_TYPE = "https://aotc.dev/build/v1"
"""Of the provenance: `externalParameters` has the model's entry of the manifest and the targets, `internalParameters`
Inductor's options by target."""
UNKNOWN_BUILDER = "https://aotc.dev/builder/unknown"
ROOTS = ("aotc", "torch", "triton")
_REQUIRED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def attest_bundles(
    store: Store, bundles: Mapping[str, str], began: datetime, key: PrivateKey | None = None
) -> Iterator[str]:
    """Attach provenance and an SBOM to bundles of the store, which are digests by model. Gives the models.

    A bundle that has them already, by this key if one is given, keeps those: nothing of it was built anew. Raises
    StoreError, CorruptError.
    """
    ended, keys = datetime.now(UTC), [] if key is None else [key.public]
    for model, digest in bundles.items():
        there = {one.kind for one in statements_of(store, digest, keys) if one.key or key is None}
        if there == {*PREDICATES}:
            continue
        bundle = read_bundle(store, Reference(None, model, digest=digest))
        artifacts = [read_built(store, entry) for entry in bundle.artifacts]
        packages = list(packages_of([one.manifest for one in artifacts]))
        predicates = {
            "provenance": slsa_provenance(bundle, artifacts, packages, began, ended),
            "sbom": cyclonedx_bom(bundle, artifacts, packages, ended),
        }
        layers = [
            Layer(
                encode_statement(digest, model, PREDICATES[kind], predicate, key),
                ((SIGNATURE, ""), (PREDICATE_TYPE, PREDICATES[kind])),
            )
            for kind, predicate in predicates.items()
        ]
        add_envelopes(store, digest, layers, keys)
        yield model


# -- where it comes from -----------------------------------------------------------------------------------------------


def slsa_provenance(
    bundle: Bundle, artifacts: Sequence[BuiltArtifact], packages: Iterable[Package], began: datetime, ended: datetime
) -> dict[str, Any]:
    """The predicate `https://slsa.dev/provenance/v1`."""
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "model": bundle.model,
                "manifest": artifacts[0].manifest,
                "targets": [one.target for one in artifacts],
            },
            "internalParameters": {"options": {one.target: one.options for one in artifacts}},
            "resolvedDependencies": [*_sources(os.environ), *({"uri": purl} for _, _, purl in packages)],
        },
        "runDetails": {
            "builder": {"id": builder_id(os.environ), "version": {"aotc": aotc.__version__}},
            "metadata": {
                "invocationId": _job(os.environ) or f"urn:uuid:{uuid.uuid4()}",
                "startedOn": _text(began),
                "finishedOn": _text(ended),
            },
        },
    }


def builder_id(variables: Mapping[str, str]) -> str:
    """`AOTC_BUILDER_ID`, else the workflow of GitHub, or the project of GitLab, that runs this."""
    if given := variables.get("AOTC_BUILDER_ID"):
        return given
    if "GITHUB_WORKFLOW_REF" in variables:
        return f"{variables.get('GITHUB_SERVER_URL', 'https://github.com')}/{variables['GITHUB_WORKFLOW_REF']}"
    if "CI_PROJECT_URL" in variables:
        return f"{variables['CI_PROJECT_URL']}//{variables.get('CI_CONFIG_PATH', '.gitlab-ci.yml')}"
    return UNKNOWN_BUILDER


def _sources(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """The commit that is built, as CI names it."""
    server, repository = variables.get("GITHUB_SERVER_URL"), variables.get("GITHUB_REPOSITORY")
    url = f"{server}/{repository}" if server and repository else variables.get("CI_PROJECT_URL", "")
    commit = variables.get("GITHUB_SHA") or variables.get("CI_COMMIT_SHA")
    return [{"uri": f"git+{url}@{commit}", "digest": {"gitCommit": commit}}] if url and commit else []


def _job(variables: Mapping[str, str]) -> str:
    if "GITHUB_RUN_ID" in variables and "GITHUB_REPOSITORY" in variables:
        server = variables.get("GITHUB_SERVER_URL", "https://github.com")
        return f"{server}/{variables['GITHUB_REPOSITORY']}/actions/runs/{variables['GITHUB_RUN_ID']}"
    return variables.get("CI_JOB_URL", "")


def _text(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


# -- what is in it -----------------------------------------------------------------------------------------------------

Package = tuple[str, str, str]
"""Name, version, and package URL (https://github.com/package-url/purl-spec)."""


def packages_of(manifests: Iterable[Mapping[str, Any]]) -> Iterator[Package]:
    """The installed distributions that took part: aotc, torch, Triton, those of the models' factories, and all that
    these require without an extra."""
    providers = metadata.packages_distributions()
    tops = {str(one.get("factory", "")).partition(":")[0].partition(".")[0] for one in manifests}
    wanted, found = [*ROOTS, *(name for top in sorted(tops) for name in providers.get(top, ()))], set[str]()
    packages: list[Package] = []
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        packages.append((name, installed.version, f"pkg:pypi/{name}@{installed.version.replace('+', '%2B')}"))
        for text in installed.requires or ():
            if "extra ==" not in text and (required := _REQUIRED_NAME.match(text)):
                wanted.append(required[0])
    yield from sorted(packages)


def cyclonedx_bom(
    bundle: Bundle, artifacts: Sequence[BuiltArtifact], packages: Iterable[Package], ended: datetime
) -> dict[str, Any]:
    """The predicate `https://cyclonedx.org/bom`: the packages by which the code was made, and the bundle's files."""
    libraries = [
        {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        for name, version, purl in packages
    ]
    files = {
        file.digest: {
            "type": "file",
            "bom-ref": file.digest,
            "name": f"{artifact.target}/{file.name}",
            "hashes": [{"alg": "SHA-256", "content": file.digest.removeprefix("sha256:")}],
        }
        for artifact in artifacts
        for file in each_file(artifact)
    }
    digest = bundle.digest.removeprefix("sha256:")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, bundle.digest)}",
        "version": 1,
        "metadata": {
            "timestamp": _text(ended),
            "tools": {"components": [{"type": "application", "name": "aotc", "version": aotc.__version__}]},
            "component": {
                "type": "machine-learning-model",
                "bom-ref": bundle.digest,
                "name": bundle.model,
                "version": bundle.digest,
                "hashes": [{"alg": "SHA-256", "content": digest}],
            },
        },
        "components": [*libraries, *files.values()],
        "dependencies": [{"ref": bundle.digest, "dependsOn": [*(one["bom-ref"] for one in libraries), *files]}],
    }
