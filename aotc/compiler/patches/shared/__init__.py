"""What several patches, or a patch and another room of the compiler, have in common.

- `decompositions`: decompose operators by other functions. `patterns`: narrow the matches of Inductor's patterns.
- `conditions`: operands of a condition or a loop. `serialised_calls`: calls of operators by name.
- `kernel_errors`: errors that C++ kernels find. `rewriting`: rewrite generated code.
- `convolutions`, `tma_templates`, `rounded_tf32`: races on GPUs, and what a kernel asks of Triton.
- `inductor`: import Inductor's modules on demand.
"""
