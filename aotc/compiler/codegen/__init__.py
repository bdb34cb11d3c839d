"""From a graph to a library.

In the order in which a unit meets the modules:

- `option_check`: what a manifest says of Inductor's options, before anything is compiled.
- `inductor_options`: the options of a unit.
- `aot_inductor`: the call, with all that is in force around it: patches, picks, the toolchain.
- `instruction_sets`: which instructions of the CPU the code may use.
- `library_constants`: frozen weights, beside the library.
- `generated_kernels`: what Inductor wrote, for the report.
"""
