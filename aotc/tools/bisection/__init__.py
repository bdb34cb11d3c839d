"""`aotc verify --bisect`: why compiled code differs from eager.

The ladder from eager to the library, one step at a time, in a process of its own; then the smallest part of the graph
that differs, and what mends it. In the order in which a bisection meets the modules:

- `bisect_run`: from a report of `aotc verify` to a process, and its answer.
- `bisect_worker`: the process. From the exported program on, it goes through `aotc.compiler.wrong_code`.
- `foreign_weights`: the artifact's weights against the module's.
- `divergence`: the operator at which the exported program leaves what eager computes.
- `bisection_messages`: what the process is asked, and its answer, as data and as text.
"""
