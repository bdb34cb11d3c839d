"""The processes of a build, and what they report.

- `forks`, `fork_server`: processes that find torch and its compiler imported. `pattern_warmup`: what they find made.
  `module_holder`: the models, too, where making them takes long. `ray_task`: the same on a node of a cluster.
- `unit_process`: the two processes of one unit, one after the other. `worker`: the first, which compiles;
  `aotc.compiler.smoke.smoke_run`: the second. `process_group`: all of a build's, ended at once.
- `messages`: all that they say to each other. `inductor_progress`: where they hear it from Inductor. `stage_costs`,
  `memory`: seconds and bytes of each stage. `unit_log`, `build_trace`: where it is written.
- `process_failure`: what a process said of its failure, or how it died.
- `shared_folder`: what the units of a build have in common.
"""
