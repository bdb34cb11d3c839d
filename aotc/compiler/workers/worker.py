"""The process that compiles one unit: `python -m aotc.compiler.workers.worker JOB.json`.

Standard output carries one JSON object a line, for the parent: `{"stage": …}` as each stage begins, `{"doing": …}` and
`{"span": …}` for what Inductor does and has done within it, and at the end `{"done": …}` or `{"failed": …}`. All else
that anybody prints goes to standard error, which is the unit's log.
"""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec

from aotc.machine.processes import die_with_parent, message_stream
from aotc.records import decode


class Reporter:
    """Tells the parent, from all of Inductor's threads."""

    def __init__(self) -> None:
        self._stream = message_stream()
        self.stage_name = "start"
        self._lock = threading.Lock()

    def stage(self, name: str) -> None:
        self.stage_name = name
        self.send(stage=name)

    def send(self, **message: Any) -> None:
        with self._lock:
            self._stream.write(msgspec.json.encode(message).decode() + "\n")


def main() -> int:
    die_with_parent()
    reporter = Reporter()
    reporter.stage("import")
    from torch._inductor import config

    from aotc.compiler.autotune.cpu_benchmarks import cpu_benchmarks_alone
    from aotc.compiler.failure import explain_failure
    from aotc.compiler.job import Job
    from aotc.compiler.unit import compile_unit
    from aotc.compiler.workers.inductor_progress import observed

    config.compile_threads = config.decide_compile_threads()  # by this process's environment, whoever imported it
    try:
        job = decode(Path(sys.argv[1]).read_bytes(), Job)
        watched = observed(lambda doing: reporter.send(doing=doing), lambda span: reporter.send(span=span))
        with watched, cpu_benchmarks_alone():
            autotuned = compile_unit(job, reporter.stage)
    except Exception as error:
        traceback.print_exc()
        failure = explain_failure(error, reporter.stage_name)
        reporter.send(
            failed={
                "message": failure.message,
                "hint": failure.hint,
                "stage": failure.fields.get("stage", ""),
                "source": failure.fields.get("source", ""),
                "issues": failure.issues,
            }
        )
        return 1
    reporter.send(done=True, autotuned=autotuned)
    return 0


if __name__ == "__main__":
    sys.exit(main())
