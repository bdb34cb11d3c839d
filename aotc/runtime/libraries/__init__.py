"""The compiled libraries of a variant.

- `files`: a library's files in memory, checked, mapped once; `on_disk`: others. `frozen_weights`: frozen weights,
  mapped.
- `required_operators`: registers operators that a library calls by name.
- `library`: opens and runs one through AOTInductor's C interface; `runner`: those that torch's own runner opens.
- `openmp`: how long the threads of a library wait for each other before they sleep.
- `torch_abi`: has this torch each symbol that code of another torch minor calls?
"""
