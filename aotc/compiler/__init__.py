"""From a manifest to a bundle. `pipeline.build` is the whole of it.

In the order in which a unit meets them:

- `request`: what a build is asked for. `option_check` in `codegen` has looked at the options before.
- `plan`: the units of a manifest; `key` (of `sources` and others): what each depends on. `shards`: one machine's part.
- `cache_lookup`: what the store holds of a unit, or why it must be compiled. `estimate`: what it will cost.
- `executors`: this machine or a cluster; `scheduling`: in which order. A `task` goes in, what was compiled comes out.
- `workers`: the processes of a unit, what they say (`messages`), and how they fail (`process_failure`).
- `unit`: what the first of them does, in three rooms: `capture`, `codegen` with `patches` of torch, and around it
  `autotune`, which decides, and `toolchain`, which runs compilers. `explain_failure`: what to change in the model.
- `smoke`: what the second one does: run the result once, as a service would.
- `publish`: its record and files, one artifact for each target, one bundle for each model. `report`: the outcome.
- `rebuild_check`: all of it again, to compare.
"""
