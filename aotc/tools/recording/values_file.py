"""The file beside a manifest with values that the recorded calls had: see `aotc.manifest.recorded_values`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from aotc.manifest.inputs import TensorInput, parse_inputs
from aotc.manifest.read import read_manifest
from aotc.manifest.recorded_values import recorded_references
from aotc.tools.recording.seen_calls import SeenArgument, tensors_by_path

MOST_CALLS = 64
MOST_BYTES = 8 << 20
"""Of the calls of one kind whose values are kept, together."""


def values_file(manifest: Path) -> Path:
    """`recorded.values.safetensors` beside `recorded.yaml`; a name that a reference can hold."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", manifest.stem).lstrip("._-") or "manifest"
    return manifest.with_name(f"{stem}.values.safetensors")


def bytes_of(call: SeenArgument) -> int:
    """The bytes of the values that were kept of a call; 0 where none were."""
    return sum(tensor.values.nbytes for tensor in tensors_by_path(call).values() if tensor.values is not None)


def write_values(
    file: Path, models: Mapping[str, tuple[Mapping[str, Any], Sequence[Mapping[str, SeenArgument]]]]
) -> None:
    """Write the values that the inputs of these models refer to, from their calls; no file where they refer to none.

    `models`: the inputs, as the manifest has them, and the calls by the models' names.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, (inputs, calls) in models.items():
        leaves = [leaf for leaf in parse_inputs(inputs)[1] if isinstance(leaf, TensorInput)]
        paths = [leaf.path for leaf in leaves if isinstance(leaf.init, Mapping) and "recorded" in leaf.init]
        kept = [each for each in map(tensors_by_path, calls) if any(each[path].values is not None for path in paths)]
        for number, each in enumerate(kept):
            values = {path: each[path].values for path in paths}
            tensors |= {f"{name}/{number}/{path}": value for path, value in values.items() if value is not None}
        if kept:
            shapes = [{path: list(tensor.shape) for path, tensor in each.items()} for each in kept]
            metadata[name] = json.dumps(shapes, separators=(",", ":"))
    if tensors:
        save_file(tensors, file, metadata)


def keep_used_values(manifest: Path) -> None:
    """Remove from the values beside a manifest what it does not refer to, and the file if that is all."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    file = values_file(manifest)
    if not file.exists():
        return
    used: dict[str, set[str]] = {}
    for spec in read_manifest(manifest).models.values():
        for leaf, reference in recorded_references(spec):
            used.setdefault(reference.partition("#")[2], set()).add(leaf.path)
    with safe_open(file, "pt") as opened:
        metadata = {name: text for name, text in opened.metadata().items() if name in used}
        split = {key: key.split("/", 2) for key in opened.keys()}  # noqa: SIM118 - not a mapping
        tensors = {key: opened.get_tensor(key) for key, (name, _, path) in split.items() if path in used.get(name, ())}
    file.unlink()
    if tensors:
        save_file(tensors, file, metadata)
