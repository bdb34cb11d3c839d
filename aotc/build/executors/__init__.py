"""Who runs the units of a build: this machine's cores, or a cluster. The build plans, an executor compiles."""

from aotc.build.executors.executor import Compiled, Executor, Task
from aotc.build.executors.local import LocalExecutor, default_jobs

__all__ = ["Compiled", "Executor", "LocalExecutor", "Task", "default_jobs"]
