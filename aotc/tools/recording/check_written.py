"""Check a manifest that was written, and mend it: buckets that can be captured, regions of a model that cannot."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from torch import nn

from aotc.amounts import counted, listed
from aotc.errors import ManifestError
from aotc.machine.processes import Child, child_environment, last_lines
from aotc.manifest.edit import BucketChange, CheckJob, ModelEdit, Problem, edited, rewrite, with_lines
from aotc.reads.tensors import plain_state
from aotc.records import Bucket, Dims, takes
from aotc.tools.recording.values_file import keep_used_values

_log = logging.getLogger("aotc")

SECONDS = 60.0
"""Of CPU time of the thread that captures, for all models of a manifest, with the import of torch's compiler: on a busy
machine it is as much as on a quiet one."""

WAITING = 10
"""How many times as long the check may take, whatever it waits for."""

MOST_BYTES = 2 << 30
"""Parameters and buffers of a model that is made a second time for the check."""


def is_small(module: nn.Module) -> bool:
    """Whether a module can be made a second time for the check."""
    return sum(tensor.nbytes for tensor in plain_state(module).values()) <= MOST_BYTES


def check_written(path: Path, models: Mapping[str, Sequence[Dims]], seconds: float = SECONDS) -> None:
    """Capture these models of the manifest in another process, and write what it found: other buckets, regions, or why
    a model cannot be captured. `models` have the sizes that their buckets must take.

    Recorded values that the model can do without are removed. What is not checked within `seconds` of CPU time stays as
    it was, which is logged as a warning, as are the problems.
    """
    text = path.read_text()
    checked = {edit.model: edit for edit in _edits(path, list(models), seconds)}
    for edit in checked.values():
        text = _mended(text, path, edit, models[edit.model])
    try:
        rewrite(path, text)
    except ManifestError as error:  # a setting of the manifest that does not go with what was found
        _log.warning("%s stays as it was recorded: %s", path, error)
    keep_used_values(path)
    left = [name for name in models if name not in checked]
    left += [f"{counted(edit.left, 'bucket')} of {name}" for name, edit in checked.items() if edit.left]
    if left:
        told = (
            "%s: not checked in %.0f s of CPU time: %s; what was found is written, `aotc build --fix-buckets` goes on"
        )
        _log.warning(told, path, seconds, listed(left, 3))


def _edits(path: Path, models: Collection[str], seconds: float) -> Iterator[ModelEdit]:
    """What the process finds in so many seconds of CPU time; of a model, the last is the best."""
    over = threading.Event()
    with tempfile.TemporaryDirectory(prefix="aotc-check-") as work:
        folder, job = Path(work), CheckJob(str(path), tuple(models))
        environment = child_environment()
        with (
            (folder / "log").open("wb") as log,
            Child("aotc.compiler.fix_buckets", job, folder, environment, log=log) as child,
        ):
            done = threading.Event()
            threading.Thread(target=_end_in_time, args=(child, seconds, done, over), daemon=True).start()
            try:
                yield from child.messages(ModelEdit)
                ended = child.ended()
            finally:
                done.set()
        if ended and not over.is_set():
            last = last_lines(folder / "log", 1)
            _log.warning("%s: the check of the manifest failed: %s", path, *last or [ended])


def _end_in_time(child: Child, seconds: float, done: threading.Event, over: threading.Event) -> None:
    """Kill the child when it has used its CPU time, or waited long."""
    ends = time.monotonic() + WAITING * seconds
    while not done.wait(min(1.0, seconds / 10)):
        if child.cpu_seconds() >= seconds or time.monotonic() >= ends:
            over.set()
            child.kill()
            return


def _mended(text: str, path: Path, edit: ModelEdit, sizes: Sequence[Dims]) -> str:
    free = [{dim: size for dim, size in dims.items() if dim not in edit.related} for dims in sizes]
    edit = _with_all_sizes(edit, free)
    mended, errors = edited(text, [edit])
    for error in errors:
        _log.warning("%s: %s", path, error)
    problem = edit.problem
    if edit.regions is not None and problem is not None:
        outside = f" Outside of them: {listed(edit.regions.eager, 5)}." if edit.regions.eager else ""
        share = f"{edit.regions.share:.0%} of the time of a call in eager"
        told = f"cannot be captured whole: {_told(problem)}. These parts are compiled, {share}; all else runs in eager."
        return with_lines(mended, edit.model, told + outside, [f"regions: {json.dumps(edit.regions.patterns)}"])
    if problem is not None:
        _log.warning("%s: %s cannot be captured: %s", path, edit.model, _told(problem))
        hint = f"; {problem.hint}" if problem.hint else ""
        return with_lines(mended, edit.model, f"cannot be captured: {_told(problem)}{hint}")
    return mended


def _told(problem: Problem) -> str:
    first = problem.message.splitlines()[0]
    return f"{first}, at {problem.source}" if problem.source else first


def _with_all_sizes(edit: ModelEdit, sizes: Sequence[Dims]) -> ModelEdit:
    """The edit with a bucket of its own for each of these sizes that a bucket of the manifest takes and none of the
    buckets in its place does."""
    changes = [_with_sizes(change, [dims for dims in sizes if _takes(change.bucket, dims)]) for change in edit.changes]
    return msgspec.structs.replace(edit, changes=tuple(changes))


def _with_sizes(change: BucketChange, sizes: Sequence[Dims]) -> BucketChange:
    lost = [dict(dims) for dims in sizes if not any(_takes(bucket, dims) for bucket in change.instead)]
    distinct: list[Bucket] = [dict(dims) for index, dims in enumerate(lost) if dims not in lost[:index]]
    return msgspec.structs.replace(change, instead=(*change.instead, *distinct))


def _takes(bucket: Bucket, dims: Dims) -> bool:
    return bucket.keys() == dims.keys() and all(takes(size, dims[dim]) for dim, size in bucket.items())
