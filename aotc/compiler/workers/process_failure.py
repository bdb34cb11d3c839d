"""The log of a unit: the output of its processes, kept if the unit failed. The error of a process that failed, from its
message and that log, or that died."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

from aotc.compiler.explain_failure import hint_for
from aotc.compiler.messages import Unit, UnitFailed, WrongPart
from aotc.compiler.workers.unit_servers import SMOKE
from aotc.errors import BuildError
from aotc.machine.cpp_compiler import compiler_name
from aotc.machine.processes import CRASHES, how_ended
from aotc.store.files.disk import typed_errors

LOG_TAIL = 20_000
"""Characters at the end of a log that are searched for the cause of a failed run."""


def begin_log(path: Path) -> None:
    """Create an empty log. A file of another build is removed first, and so is a link or a pipe.

    Raises StoreError.
    """
    with typed_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(exist_ok=False)


def failed(module: str, unit: Unit, said: UnitFailed, work: Path, log: Path, logged: int) -> BuildError:
    """The error for the message of a failed process; `logged` bytes were in its log before."""
    return BuildError(
        said.message,
        hint=hint_of(module, said.hint, work, log, logged),
        issues=said.issues,
        unit=unit.name,
        stage=said.stage,
        source=said.source,
        log=str(log),
        miscompiled=said.miscompiled,
        extremes=said.extremes,
    )


def with_part(error: BuildError, part: WrongPart) -> BuildError:
    """The error of a unit that was miscompiled, with the part of the model that was."""
    if not part.operators:
        return BuildError(error.message, hint=f"{part.hint}; {error.hint}", issues=error.issues, **error.fields)
    message = f"{error.message}; torch's compiler makes wrong code of {part.operators}"
    fields = {**error.fields, "source": part.source}
    return BuildError(message, hint=part.hint, issues=error.issues, **fields)


def died(module: str, unit: Unit, status: int, stage: str, work: Path, log: Path) -> BuildError:
    """The error for a process that ended without a reply."""
    how = how_ended(status) or "ended without an answer"
    smoke = module == SMOKE
    hint, cause = "see the log", statically_linked_libstdcxx(work / "out") if smoke else ""
    if status == -signal.SIGKILL:
        hint = "the kernel's out-of-memory killer does this: give the machine more memory, or use fewer --jobs"
    elif cause:
        hint = cause
    elif smoke:
        hint = (
            "the library crashes when it is loaded or run; it was not published. Try another version of torch, or "
            "leave parts of the model to eager: `aotc build MANIFEST --suggest-regions`"
        )
    return BuildError(
        f"the process that {'runs the result once' if smoke else 'compiles'} {how} during: {stage}",
        hint=hint,
        unit=unit.name,
        stage="smoke run" if smoke else stage,
        source="",
        log=str(log),
        crashed=smoke and not cause and -status in CRASHES,
    )


def hint_of(module: str, given: str, work: Path, log: Path, logged: int) -> str:
    """The hint for a failed process. A library's own error is not in the smoke run's message, only in its log."""
    if module != SMOKE:
        return given
    with suppress(OSError):
        said = log.read_bytes()[logged:].decode(errors="replace")
        return statically_linked_libstdcxx(work / "out") or given or hint_for(said[-LOG_TAIL:])
    return given


def statically_linked_libstdcxx(folder: Path) -> str:
    """A hint if a library links libstdc++ statically, "" otherwise: such a copy clashes with torch's and crashes."""
    for library in folder.glob("*.so"):
        if b"libstdc++.so" not in library.read_bytes():
            compiler = compiler_name()
            return (
                f"the C++ compiler ({compiler}) linked libstdc++ statically, and every such library crashes on load "
                "beside torch's own: set CXX to a compiler that links the shared libstdc++.so, like CXX=g++"
            )
    return ""
