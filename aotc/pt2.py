"""An artifact as an AOTInductor package (`.pt2`), for programs without Python.

torch's own `AOTIModelPackageLoader` opens it, in C++ and in Python. The package holds the libraries and no guards: the
program that calls one passes what the artifact's record asks for, and nothing compares it.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

from aotc.errors import LibraryError
from aotc.records import CONSTANTS, Artifact, Output, TensorLeaf, Variant, bucket_name
from aotc.store.files.writing import write_output
from aotc.store.layout.blob_reader import BlobReader


def package_names(artifact: Artifact) -> dict[str, Variant]:
    """The variants by their names in a package: the bucket's, or torch's default, `model`, where it is the only one."""
    if len(artifact.variants) == 1:
        return {"model": artifact.variants[0]}
    return {bucket_name(variant.bucket): variant for variant in artifact.variants}


def write_package(artifact: Artifact, source: BlobReader, path: Path) -> dict[str, Variant]:
    """Write the package, whole or not at all; `source` has the artifact's files. Gives the variants by their names.

    Raises LibraryError for an artifact whose code needs more than its libraries: regions run in the module's forward,
    frozen weights beside a library and operators of Python are attached by aotc. Raises what `source.unpack` raises.
    """
    _check(artifact)
    from torch.export.pt2_archive._package import PT2ArchiveWriter
    from torch.export.pt2_archive.constants import AOTINDUCTOR_DIR

    packed = io.BytesIO()
    named = package_names(artifact)
    with PT2ArchiveWriter(packed) as archive:
        for name, variant in named.items():
            folder = f"{AOTINDUCTOR_DIR}{name}/"
            for file in variant.files:
                source.unpack(file, content := io.BytesIO())
                archive.write_bytes(folder + file.name, content.getvalue())
            archive.write_string(
                f"{folder}{Path(variant.library).stem}_metadata.json", json.dumps(call_metadata(artifact, variant))
            )
    write_output(path, packed.getvalue())
    return named


def call_metadata(artifact: Artifact, variant: Variant) -> dict[str, str]:
    """What the loader's `get_metadata` gives for a variant: the device, and how its library is called.

    `aotc.arguments` has a line for each tensor that the library takes: `input PATH` or `state NAME`, a parameter or
    buffer of the module. `aotc.results` has one for each value of the model's result, flattened: `output INDEX` of the
    library's, `input PATH` and `state NAME` for an argument given back, or `constant JSON`.
    """
    leaves = artifact.signature.leaves
    arguments = [
        f"input {leaves[one.leaf].path}" if one.leaf is not None else f"state {one.state}" for one in variant.arguments
    ]
    shapes = [
        f"{leaf.path} {leaf.dtype} [{', '.join(map(str, leaf.shape))}]"
        for leaf in leaves
        if isinstance(leaf, TensorLeaf)
    ]
    return {
        "AOTI_DEVICE_KEY": artifact.target.partition(":")[0],
        "aotc.model": artifact.model,
        "aotc.target": artifact.target,
        "aotc.bucket": bucket_name(variant.bucket),
        "aotc.inputs": "\n".join(shapes),
        "aotc.arguments": "\n".join(arguments),
        "aotc.results": "\n".join(_result(artifact, output) for output in variant.outputs),
    }


def _result(artifact: Artifact, output: Output) -> str:
    if output.index is not None:
        return f"output {output.index}"
    if output.leaf is not None:
        return f"input {artifact.signature.leaves[output.leaf].path}"
    return f"state {output.state}" if output.state is not None else f"constant {json.dumps(output.constant)}"


def _check(artifact: Artifact) -> None:
    if artifact.regions:
        raise LibraryError(
            f"`{artifact.model}` is compiled by regions, which the module's forward calls; a package holds no forward",
            hint="build the whole model, without `regions`, for programs without Python",
        )
    if artifact.trains:
        raise LibraryError(
            f"`{artifact.model}` was built to be trained, and gradients are the work of Python's autograd",
            hint="build the model without `train: true` for programs without Python",
        )
    if artifact.kinds:
        raise LibraryError(
            f"the ranks of `{artifact.model}` run different code, and a package holds that of one",
            hint="let the factory make equal parts, or load it with aotc.load",
        )
    if needs := artifact.operators:
        raise LibraryError(
            f"`{artifact.model}` calls {needs[0].name}, which {needs[0].module} registers in Python",
            hint="load it with aotc.load, or compute this part outside the model",
        )
    for variant in artifact.variants:
        if any(file.name == CONSTANTS for file in variant.files):
            raise LibraryError(
                f"the frozen weights of `{artifact.model}` lie beside its libraries, in a form that aotc.load attaches",
                hint="build it with `weights: live`: the program then passes the weights as arguments",
            )
