"""From what is remembered of a module to its manifest."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotc.amounts import listed
from aotc.errors import ManifestError, NotFoundError
from aotc.records import Dims
from aotc.store.reference import is_remote
from aotc.tools.recording.check_written import check_written
from aotc.tools.recording.made_again import relative_to
from aotc.tools.recording.manifest_text import bucket_lines, model_lines, writing
from aotc.tools.recording.module_factories import Made
from aotc.tools.recording.seen_calls import inputs_of_calls
from aotc.tools.remembering.memory.memory import Kind, Memory, Place, remembered_in
from aotc.tools.remembering.memory.remembered_calls import from_json

_log = logging.getLogger("aotc")


def manifest_of(
    memory: Memory, models: Mapping[str, Kind], folder: Path, *, wide: bool
) -> tuple[str, dict[str, list[Dims]]]:
    """The text of a manifest in `folder` of these kinds by the names of their models, and the sizes of each one's
    calls. `wide`: ranges that were seen are widened, so that not each further length needs a build."""
    ranges, dynamic = memory.asked.get("ranges") or {}, memory.asked.get("dynamic")
    made = relative_to(folder, {"factory": memory.factory, "kwargs": memory.kwargs})
    lines, sizes = ["# By `aotc.compile`, from the calls that a program made.", "version: 1", "models:"], {}
    for model, kind in models.items():
        calls = inputs_of_calls([from_json(call) for call in kind.calls])
        asked = memory.asked.get("regions")
        settings = {
            "dtype": memory.dtype,
            "mode": memory.asked.get("mode"),
            **kind.ambient,
            "train": memory.asked.get("train"),
            "make_contiguous": True,
            "method": memory.asked.get("method"),
            "regions": kind.regions or (asked if asked != "auto" else None),
            "targets": [memory.facts["target"]],
        }
        lines += model_lines(model, Made(**made), settings, calls.inputs)
        buckets = [
            {dim: ranges.get(dim) or (_widened(size, dynamic) if wide else size) for dim, size in bucket.items()}
            for bucket in (calls.sizes if dynamic is False else calls.buckets)
        ]
        lines += bucket_lines([bucket for index, bucket in enumerate(buckets) if bucket not in buckets[:index]])
        sizes[model] = calls.sizes
    return "\n".join(lines) + "\n", sizes


def write_remembered(output: Path, store: str | Path, name: str, *, check: bool) -> str:
    """Write the manifest of what a store remembers of a module, and give its text; `check` as in `aotc init`, but not
    where others may write to the store: it would import the factory that the store names. Raises ManifestError where
    `output` exists or cannot be written, and NotFoundError."""
    from aotc.tools.remembering.memory.remote_memory import remembered_of  # not where a program records its calls

    place = Place(remembered_in(store), name)
    if (memory := remembered_of(str(store), name)) is None:
        known = tuple(sorted(path.stem for path in place.folder.glob("*.json")))
        message = f"{store} remembers nothing of {name}"
        raise NotFoundError(message, hint=f"it remembers {listed(known, 10) if known else 'nothing'}", known=known)
    if output.exists():
        raise ManifestError(f"{output} exists", hint="name another file with --output")
    models = {place.model(number): kind for number, kind in enumerate(memory.kinds)}
    text, sizes = manifest_of(memory, models, output.absolute().parent, wide=True)
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    if check and (is_remote(str(store)) or os.environ.get("AOTC_TRUSTED_KEYS")):
        _log.warning("%s is not checked: the factories in it are those that %s names. Read them first", output, store)
    elif check:
        check_written(output, sizes)
    return output.read_text()


def _widened(size: Any, dynamic: bool | None) -> Any:
    """A range from 2, or less, to a power of two; `dynamic`: of a size of 2 or more that did not vary, too."""
    if dynamic and isinstance(size, int) and size > 1:
        size = [size, 2 * size]
    return [min(2, size[0]), 1 << (size[1] - 1).bit_length()] if isinstance(size, list) else size
