"""`aotc bench`: eager, `torch.compile` and aotc side by side on a user's own model.

In the order of use:

- `subject`: the model, its buckets and its artifact, from a reference or a manifest
- `contenders`: the table of the ways to serve a model; each says how it gets from a module to a callable
- `peers`: other runtimes, from an ONNX file
- `contender_caches`: caches of a contender's own, empty or left by another one's process
- `bench_setup`: the inputs, the checkpoint and eager's output, written once for all contenders
- `contender_messages`: what the measuring process is asked and what it answers
- `measure_worker`: the measuring process; one for each start of a contender
- `contender_process`: a measuring process, seen from its parent
- `bench_run`: the order of all measurements
- `latency_comparison`: percentiles, paired ratios with their interval, and the verdict
- `measurements`: everything that was measured, as typed data
- `bench_page`: the report as an HTML page
"""
