"""Who runs the units of a build: this machine's cores, or a cluster. The build plans, an executor compiles."""

from aotc.compiler.executors.executor import Executor
from aotc.compiler.executors.local import LocalExecutor, jobs_for, targets_of_many

__all__ = ["Executor", "LocalExecutor", "jobs_for", "targets_of_many"]
