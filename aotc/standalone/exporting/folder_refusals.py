"""What an artifact has that an exported folder does not do: it is said at the export, all at once."""

from __future__ import annotations

from collections.abc import Iterator

from aotc.errors import Issue, LibraryError
from aotc.records import Artifact, Variant, bucket_name
from aotc.standalone.call_rows import result_names
from aotc.standalone.loading import other_torch
from aotc.standalone.unsupported import unsupported


def refuse_for_folder(artifact: Artifact) -> None:
    """Raises LibraryError with all reasons why the artifact cannot be exported without Python, except operators."""
    issues = dict.fromkeys([*_of_code(artifact), *unsupported(artifact), *_of_calls(artifact)])
    if issues:
        raise LibraryError(
            f"`{artifact.model}` for {artifact.target} has what an exported folder does not do",
            issues=tuple(issues),
            hint="load it with aotc.standalone.load, or with aotc.load, where torch is installed",
        )


def _of_code(artifact: Artifact) -> Iterator[Issue]:
    yield from other_torch(artifact)
    if not artifact.target.startswith("cpu:"):
        hint = "export the artifact of a CPU target, as `--target cpu:x86-64-v3`"
        yield Issue("it is for a GPU", expected="a CPU", actual=artifact.target, hint=hint)


def _of_calls(artifact: Artifact) -> Iterator[Issue]:
    first = list(result_names(artifact.variants[0])) if artifact.variants else []
    for variant in artifact.variants:
        yield from _of_variant(variant, first)


def _of_variant(variant: Variant, first: list[str]) -> Iterator[Issue]:
    where, found = f"bucket {bucket_name(variant.bucket)}", result_names(variant)
    if variant.mutated_leaves or variant.storage_leaves:
        yield Issue("the model writes to its inputs, or reads their storage", where=where)
    if variant.mutated_state:
        yield Issue(f"the model writes to its buffers: {', '.join(variant.mutated_state[:3])}", where=where)
    if any(output.view for output in variant.outputs):
        yield Issue("a result is a view of an argument or of a weight", where=where, hint="let forward return a clone")
    for name in (name for name, output in found.items() if output.axis is not None):
        yield Issue(f"the result `{name}` is a size of an input, and not a tensor", where=where)
    if list(found) != first:
        said = f"it gives {', '.join(found) or 'no tensors'}, and the first bucket {', '.join(first) or 'none'}"
        yield Issue(said, where=where, expected=", ".join(first), actual=", ".join(found))
