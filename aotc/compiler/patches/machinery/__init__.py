"""How patches of torch are found, applied, checked and described.

- `graph_operators`: the operators of a graph, which advisories ask for.
- `patch`: the record of a patch. `registry`: finds all patches, and lists the hooks. `apply`: applies those of a stage.
- `replacing`: replaces a function under its own name. `reproducing`: what reproducers have in common. `check`:
  runs the reproducers of all patches.
- `pages`: writes README's table and UPSTREAM.md.
"""
