"""Find the part of a graph for which torch's compiler generates wrong code. A build asks where its smoke run finds
wrong values or gradients, and `aotc verify --bisect` does.

- `lowering`: a graph through torch's decompositions, and through Inductor.
- `subgraphs`: parts of a graph, and their values and gradients in eager and in float64.
- `trials`: within a budget, and in forks where compiled code may end its process.
- `search`: the smallest part that differs.
- `ladder`: one step of the compiler after the other, up to the first wrong one.
- `remedies`: options and patches without which a part is right.
- `bisection_records`: the result, as data.
- `diagnose_unit`: that of a unit whose smoke run has failed.
"""
