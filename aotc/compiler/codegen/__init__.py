"""From a graph to a library.

In the order in which a unit meets the modules:

- `option_check`: check the options and patches in a manifest, before anything is compiled.
- `inductor_options`: the options of a unit.
- `graph_key`: the key of a unit's code, from its graph.
- `stored_code`: the code of a stored unit with that key, in the place of the next steps.
- `aot_inductor`: call AOTInductor, with patches, picks and the toolchain active.
- `instruction_sets`: the CPU instructions that the code may use.
- `library_constants`: frozen weights, in files beside the library.
- `called_operators`: operators that a library calls by name, with arguments that it can pass.
- `library_imports`: what a library takes from torch's, with the lines of the model that call operators.
- `standalone_code`: for `runtime: standalone`, avoid operators, and refuse those that the runtime lacks.
- `standalone_attention`: for `runtime: standalone`, generate the kernels of attention on a GPU.
- `standalone_convolutions`: likewise, those of convolutions for which Inductor has no template.
- `generated_kernels`: the kernels that Inductor generated, for the report.
"""
