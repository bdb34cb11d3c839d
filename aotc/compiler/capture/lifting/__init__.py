"""From an exported program to a graph whose every input and output is named.

- `lift`: the whole of it, with `mutations` (the graph's writes), `result_tree` (the structure of the model's result)
  and `shared_memory` (tensors and values that share memory). `views`: results that are views of arguments.
- `export_errors`: the reasons why a graph cannot be lifted.
"""
