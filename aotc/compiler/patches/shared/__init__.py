"""What several patches, or a patch and another room of the compiler, have in common.

- `inductor`: its modules, and changes of its decompositions, patterns, templates and calls by name.
- `conditions`: operands of a condition or a loop. `generated_code`: rewritten, and the errors that C++ kernels find.
- `convolutions`, `rounded_tf32`: races on GPUs, and what a kernel asks of Triton.
- `operators`: groups of operators and dtypes that patches mend.
"""
