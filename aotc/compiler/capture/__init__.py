"""From a module and example inputs to a checked graph.

In the order in which a unit meets the modules:

- `regions`: while the build plans, find equal submodules.
- `unit_graph`: calls the rest, from a unit's module to its graph and the facts of its record.
- `export`: torch.export, with `ranges` for buckets with ranges. Meanwhile `tensor_subclasses` makes quantised weights
  plain, `distributed_tensors` those of several ranks; `replaced_functions` are in the place of those that torch.export
  unrolls, specialises to one size or cannot follow; `custom_backward` keeps the backward of a
  `torch.autograd.Function`; `legacy_collectives` says which collective torch.export cannot take.
- `lifting`: the graph, with every input and output named. `collectives` names the group of a parallel model's.
- `checks`: the graph against the model, which is called for them. `module_objects` restores the model.
- `analysis`: further facts of the record, found by calling the model. `operator_trace` compares calls by operators.
"""
