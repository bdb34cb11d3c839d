"""The process in which `aotc.record` and `aotc init` check what they wrote: models are captured, none is compiled.

    python -m aotc.compiler.manifest_check PARENT MANIFEST MODEL...

It writes a line of JSON for each model, a `ModelEdit`; and another one where regions help, which are tried when all
models have been captured, since that takes long. The process that records imports no compiler.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from aotc.compiler.fix_buckets import fix_buckets, in_parts
from aotc.errors import AotcError
from aotc.machine.processes import die_with_parent, message_stream
from aotc.manifest import ModelSpec, read_manifest
from aotc.manifest.edit import ModelEdit, Problem
from aotc.models.auto_inputs import with_inputs
from aotc.models.factory import build_module


def main(parent: str, path: str, *models: str) -> None:
    die_with_parent(int(parent))
    stream = message_stream()
    manifest = read_manifest(Path(path), models)

    def write(edit: ModelEdit) -> None:
        stream.write(msgspec.json.encode(edit).decode() + "\n")

    refused: list[tuple[ModelSpec, Problem]] = []
    for spec in manifest.models.values():
        try:
            full = with_inputs(manifest, spec, build_module(spec, manifest.folder))
            found = fix_buckets(full, manifest.folder)
        except AotcError as error:
            issue = error.issues[0] if error.issues else None
            found = ModelEdit(spec.name, problem=Problem({}, issue.message if issue else error.message, error.hint))
        write(found)
        if found.problem is not None and found.problem.in_parts:
            refused.append((full, found.problem))
    for spec, problem in refused:
        if edit := in_parts(spec, manifest.folder, problem):
            write(edit)


if __name__ == "__main__":
    main(*sys.argv[1:])
