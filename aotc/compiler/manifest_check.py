"""The process in which `aotc.record` and `aotc init` check what they wrote: models are captured, none is compiled.

    python -m aotc.compiler.manifest_check JOB.json

It sends a `ModelEdit` for each model; and another one where regions help, which are tried when all models have been
captured, since that takes long. The process that records imports no compiler.
"""

from __future__ import annotations

from pathlib import Path

from aotc.compiler.fix_buckets import fix_buckets, in_parts
from aotc.errors import AotcError
from aotc.machine.processes import Parent
from aotc.manifest import ModelSpec, read_manifest
from aotc.manifest.edit import CheckJob, ModelEdit, Problem
from aotc.models.auto_inputs import with_inputs
from aotc.models.factory import build_module


def main() -> None:
    parent = Parent()
    job = parent.job(CheckJob)
    manifest = read_manifest(Path(job.manifest), job.models)
    refused: list[tuple[ModelSpec, Problem]] = []
    for spec in manifest.models.values():
        try:
            full = with_inputs(manifest, spec, build_module(spec, manifest.folder))
            found = fix_buckets(full, manifest.folder)
        except AotcError as error:
            issue = error.issues[0] if error.issues else None
            found = ModelEdit(spec.name, problem=Problem({}, issue.message if issue else error.message, error.hint))
        parent.send(found)
        if found.problem is not None and found.problem.in_parts:
            refused.append((full, found.problem))
    for spec, problem in refused:
        if edit := in_parts(spec, manifest.folder, problem):
            parent.send(edit)


if __name__ == "__main__":
    main()
