"""From a manifest to a bundle: `pipeline.build` is the whole build, `messages` what its parts say to each other.

In the order in which a unit meets them:

- `request`: the arguments of a build. Their Inductor options are checked by `option_check` in `codegen`.
- `mistakes`: all those of a manifest at once.
- `planning`: the units of a manifest, the key of each, and the records of those that are finished.
- `executors`: this machine or a cluster; the order of units. An executor turns a task into files.
- `workers`: the two processes of a unit, and their failures (`process_failure`).
- `unit`: the first process. `capture` exports the graph; `codegen` compiles it, with `patches` of torch, picks by
  `autotune` and compilers run by `toolchain`; `training`: its forward and its backward. `explain_failure`: what to
  change in the model. `rank_kinds`: which ranks of a parallel model run that code. `scoped`: what observes or directs
  a step of torch, and corrects nothing.
- `smoke`: the second process, which runs the result once, as a service would.
- `wrong_code`: a third process, where the second finds wrong results: the operator and the line.
- `cross_compile`: compile for a GPU that this machine lacks; such a unit has no second process.
- `publish`: the unit's record and files, an artifact for each target, a bundle for each model. `build_report`: the
  outcome.
- `value_trials`: which recorded integers a model takes as values.
- `fix_buckets`: before a build, other buckets for those that cannot be captured, and regions; also the process in
  which a recorded manifest is checked.
- `rebuild_check`: compile again and compare.
"""
