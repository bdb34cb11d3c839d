"""A freshly compiled unit, run once before anything is published. As in a service, no compiler is imported here.

- `smoke_run`: the process: load, run, compare with the model.
- `launch`: on a GPU, directly or as a CUDA graph.
- `region_cost`: what a call through a region costs.
"""
