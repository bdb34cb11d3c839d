"""The processes of a build.

- `unit_servers`, `fork_server`: fork processes that have torch and its compiler imported. `module_holder`: slow models,
  built before the fork.
- `unit_process`: the processes of one unit, one after the other. `compile_worker`: the first, which compiles;
  `aotc.compiler.smoke.smoke_run`: the second. Where that finds wrong results, the first again, which says where.
- `process_group`: all processes of a build, ended at once.
- `inductor_progress`: progress reports from Inductor. `build_trace`: the trace of a build.
- `process_failure`: the log of a unit, and the error of a process that failed or died.
- `shared_folder`: the folder that the units of a build share.
"""
