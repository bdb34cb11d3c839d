"""Checks of a captured graph that call the model and compare.

- `hidden_state`: a model that keeps a value of one call for the next.
- `repeated_calls`: a model that reads what changes from call to call behind objects of C.
- `left_out`: a default of an input that is not what the model does without it.
- `graph_run`: a model that takes another branch while it is traced.
- `specialization`: the graph at sizes 0 and 1, which torch.export leaves out of a range.
- `captured_graph`: calls the graph as the model is called.
"""
