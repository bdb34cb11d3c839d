"""From a module and example inputs to a checked graph.

In the order in which a unit meets the modules:

- `equal_regions`: while the build plans, which submodules are equal, and what they are called with.
- `unit_graph`: the order of the rest, from a unit's module to all that its graph holds good for.
- `dynamic_shapes`, `range_solver`: what torch.export is told of ranges; `bucket_proposals`: what to write where it
  refuses.
- `attribute_reads`, `build_only`: what forward reads of its module, and does outside of it, while it is exported.
- `export`, `lifting` (with `mutations`, `result_tree`): the graph, its every input and output named. Quantised weights
  are plain ones meanwhile: `tensor_subclasses`. `recurrent` and `spectra` have what is captured in the place of
  functions that torch.export unrolls, or takes for one size.
- Checks against the model, which is called for them: `hidden_state_check`, `trace_check`, `zero_one_check`. They share
  `captured_graph`, which calls the graph as the model is called, and `module_objects`, which puts the model back.
- What else the record says, by calling the model: `argument_forms` (by `operator_trace`), `assigned_attributes`,
  `output_dims`; `custom_operators`: who registers the operators that the library calls.

Beside it: `suggest_regions`, for `aotc build --suggest-regions`.
"""
