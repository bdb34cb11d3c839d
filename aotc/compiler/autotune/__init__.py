"""Autotuning: where Inductor measures, a decision is answered from a pin, or measured and written down as a pick.

In the order in which a unit meets the modules:

- `picks_file`: the lock file (`aotc build --picks`), and what of it is for the unit: its pins.
- `picker`: the unit's decisions. It answers questions from pins, then from `shared_picks`, what the other units of the
  build have measured; what it is told of a measurement it remembers, with all candidates and their times.
- `benchmarks`: a measurement has its device to itself.
- `attention`: before Inductor begins, which of torch's attentions, or a template.
- `hooks`: has Inductor ask the picker, by the next four.
- `padding`: whether a matrix product is padded (`pad_mm`).
- `algorithm_selection`: which library call or template does a matrix product, … (`AlgorithmSelectorCache`).
- `fusion`: whether a template is fused with its neighbour (`Scheduler.speedup_by_fusion`).
- `triton_configs`: the configuration of each Triton kernel (`CachingAutotuner`).
- After the smoke run, `aotc.compiler.smoke.launch`: a direct launch or a CUDA graph.

Nothing else in a build depends on time. A pinned decision's candidates are neither compiled nor timed, and the code
takes the path that it takes after a measurement: equal picks give equal code. Nor is what another unit of the build has
measured; it answers with every candidate's time, so that what is decided later by these times is decided as if they had
been measured here.
"""
