"""Run a freshly compiled unit once before anything is published. As in a service, no compiler is imported here.

- `smoke_run`: the process: load, run, compare with the model.
- `gradient_check`: compare the gradients of a model that is trained with eager's, and with those in float64.
- `call_times`: measure the time of one call, compiled and in eager.
- `launch_choice`: on a GPU, choose between a direct launch and a CUDA graph.
- `region_cost`: measure the cost of a call through a region.
"""
