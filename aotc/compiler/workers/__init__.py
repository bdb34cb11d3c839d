"""The processes of a build, and their messages.

- `forks`, `fork_server`: fork processes that have torch and its compiler imported. `pattern_warmup`: Inductor's
  patterns, built before the fork. `module_holder`: slow models, built before the fork. `ray_task`: a node's task.
- `unit_process`: the processes of one unit, one after the other. `worker`: the first, which compiles;
  `aotc.compiler.smoke.smoke_run`: the second. Where that finds wrong results, the worker again, which says where.
  `process_group`: all processes of a build, ended at once.
- `messages`: the types of all messages. `inductor_progress`: progress reports from Inductor. `stage_costs`, `memory`:
  seconds and bytes of each stage. `unit_log`, `build_trace`: the log of a unit, the trace of a build.
- `process_failure`: the error of a process that failed or died.
- `shared_folder`: the folder that the units of a build share.
"""
