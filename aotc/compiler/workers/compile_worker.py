"""The process that compiles one unit, or says where it was miscompiled.

    python -m aotc.compiler.workers.compile_worker JOB

Standard output carries `aotc.compiler.messages` for the parent. All other output goes to standard error,
which is the unit's log.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from aotc.compiler.cross_compile import stand_in
from aotc.compiler.messages import Doing, Job, Message, Progress, Reply, UnitCompiled, UnitFailed, wait_here
from aotc.machine.gpus import attributes
from aotc.machine.locks import listening
from aotc.machine.processes import Parent
from aotc.records import decode


class Reporter:
    """Sends messages to the parent, from all of Inductor's threads."""

    def __init__(self) -> None:
        self._parent = Parent()
        self.stage_name = "start"

    def stage(self, name: str) -> None:
        self.stage_name = name
        self.say(Doing(name))

    def doing(self, detail: str) -> None:
        self.say(Doing(self.stage_name, detail))

    def say(self, said: Progress | Reply) -> None:
        self._parent.send(Message(said))


def main() -> int:
    reporter = Reporter()
    reporter.stage("import")
    from torch._inductor import config

    from aotc.compiler.autotune.benchmarks import cpu_benchmarks_alone
    from aotc.compiler.explain_failure import explain_failure
    from aotc.compiler.unit import compile_unit
    from aotc.compiler.workers.inductor_progress import observed
    from aotc.compiler.wrong_code.diagnose_unit import wrong_part

    config.compile_threads = config.decide_compile_threads()  # from this process's environment, not its parent's
    try:
        job = decode(Path(sys.argv[1]).read_bytes(), Job)
        if gpu := job.unit.gpu:
            stand_in.become(gpu.name, gpu.memory, attributes(gpu, job.unit.target))
        waits = listening(lambda *wait: reporter.say(wait_here(*wait)))
        said: Reply
        with waits, observed(reporter.doing, reporter.say), cpu_benchmarks_alone():
            if job.miscompiled:
                reporter.stage("bisection")
                said = wrong_part(job)
            else:
                said = UnitCompiled(compile_unit(job, reporter.stage))
    except Exception as error:
        traceback.print_exc()
        failure = explain_failure(error, reporter.stage_name)
        stage, source = failure.fields.get("stage", ""), failure.fields.get("source", "")
        reporter.say(UnitFailed(failure.message, failure.hint, stage, source, tuple(failure.issues)))
        return 1
    reporter.say(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
