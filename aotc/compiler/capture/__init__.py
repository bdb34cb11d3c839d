"""From a module and example inputs to a checked graph.

In the order in which a unit meets the modules:

- `equal_regions`: while the build plans, find equal submodules, and the inputs that they are called with.
- `unit_graph`: calls the rest, from a unit's module to its graph and the facts of its record.
- `dynamic_shapes`, `range_solver`: ranges for torch.export, and proofs of its conditions; `bucket_proposals`: the edit
  to propose where a range is refused.
- `attribute_reads`, `build_only`: note the attributes that forward reads, and its side effects, during the export.
- `export`, `lifting` (with `mutations`, `shared_memory`, `result_tree`, `lifting_errors`): the graph, with every input
  and output named. Meanwhile `tensor_subclasses` makes quantised weights plain; `recurrent` and `spectra` replace
  functions that torch.export unrolls or specialises to one size.
- Checks that call the model and compare: `hidden_state_check`, `trace_check`, `zero_one_check`. They share
  `captured_graph`, which calls the graph as the model is called, and `module_objects`, which restores the model.
- Further facts of the record, found by calling the model: `argument_forms` (by `operator_trace`),
  `assigned_attributes`, `output_dims`; `custom_operators`: the modules that register the library's operators.

Beside it: `suggest_regions`, for `aotc build --suggest-regions`.
"""
