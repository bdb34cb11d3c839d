"""What is remembered of a module, and of its calls.

- `call_memory`: which calls are remembered, `remembered_calls` how, and `kind_index` which are known.
- `identity`: what a module's name in the store depends on. `memory`: the files beside the store's own;
  `checked_kinds`: what may stand in them.
- `remote_memory`: what a store at a URL remembers, for many machines.
- `manifest`: from the memory to a manifest.
"""
