"""What several patches, or a patch and another room of the compiler, have in common.

- `decompositions`: decompose operators by other functions. `rewriting`: rewrite generated code.
- `inductor`: import Inductor's modules on demand.
"""
