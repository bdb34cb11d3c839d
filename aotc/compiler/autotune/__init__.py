"""Autotuning: each decision of Inductor that depends on a measurement is taken from a pin, or measured and recorded as
a pick.

In the order in which a unit meets the modules:

- `picks_file`: the lock file (`aotc build --picks`), and the pins in it for a unit.
- `picker`: the unit's decisions. It answers questions from pins, then from `shared_picks`, the measurements of the
  build's other units; it records each measurement, with all candidates and their times.
- `benchmarks`: a measurement has its device to itself.
- `attention`: before Inductor begins, choose one of torch's attention backends.
- `inductor_hooks`: make Inductor ask the picker, through the next four.
- `algorithm_selection`: the library call or template of a matrix product, … (`AlgorithmSelectorCache`).
- `fusion`: whether a template is fused with its neighbour (`Scheduler.speedup_by_fusion`).
- `triton_configs`: the configuration of each Triton kernel (`CachingAutotuner`).
- After the smoke run, `aotc.compiler.smoke.launch_choice`: a direct launch or a CUDA graph.

Nothing else in a build depends on time. The candidates of a pinned decision are neither compiled nor timed, and the
code path is the one after a measurement: equal picks give equal code. The same holds for decisions measured by another
unit of the build; these come with every candidate's time, so that later decisions that depend on the times are the same
as after a measurement in this unit.
"""
