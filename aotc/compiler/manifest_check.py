"""The process in which `aotc.record` and `aotc init` check what they wrote: models are captured, none is compiled.

    python -m aotc.compiler.manifest_check PARENT MANIFEST MODEL...

It writes a line of JSON for each model: a `ModelEdit`. The process that records imports no compiler.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from aotc.compiler.fix_buckets import in_parts
from aotc.errors import AotcError
from aotc.machine.processes import die_with_parent, message_stream
from aotc.manifest import Manifest, ModelSpec, read_manifest
from aotc.manifest.edit import ModelEdit, Problem
from aotc.models.auto_inputs import with_inputs
from aotc.models.factory import build_module


def main(parent: str, path: str, *models: str) -> None:
    die_with_parent(int(parent))
    stream = message_stream()
    manifest = read_manifest(Path(path), models)
    for spec in manifest.models.values():
        stream.write(msgspec.json.encode(_edit_of(manifest, spec)).decode() + "\n")


def _edit_of(manifest: Manifest, spec: ModelSpec) -> ModelEdit:
    try:
        full = with_inputs(manifest, spec, build_module(spec, manifest.folder))
        return in_parts(full, manifest.folder)
    except AotcError as error:
        issue = error.issues[0] if error.issues else None
        return ModelEdit(spec.name, problem=Problem({}, issue.message if issue else error.message, error.hint))


if __name__ == "__main__":
    main(*sys.argv[1:])
