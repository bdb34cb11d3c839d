"""Executors compile the units of a build: on this machine's cores (`local`, once `host` finds that it can), or on a
cluster (`ray`)."""

from aotc.compiler.executors.executor import Executor
from aotc.compiler.executors.local import LocalExecutor, jobs_for, targets_of_many

__all__ = ["Executor", "LocalExecutor", "jobs_for", "targets_of_many"]
