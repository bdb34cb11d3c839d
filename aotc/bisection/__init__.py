"""`aotc verify --bisect`: why compiled code differs from eager.

The ladder from eager to the library, one step at a time, in a process of its own; then the smallest part of the graph
that differs, and what mends it. In the order in which a bisection meets the modules:

- `run`: from a report of `aotc verify` to a process, and its answer.
- `worker`: the process, and the ladder.
- `weights`: the artifact's weights against the module's.
- `divergence`: the operator at which the exported program leaves what eager computes.
- `subgraphs`: parts of a graph, and their values in eager and in float64.
- `lowering`: a graph through torch's decompositions, and through Inductor.
- `search`: the smallest part that differs.
- `remedies`: options and patches without which it does not.
- `report`: the result, as data and as text.
"""
