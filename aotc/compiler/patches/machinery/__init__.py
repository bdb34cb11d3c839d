"""How patches of torch are described, applied and checked.

- `patch`: the record of a patch. `registry`: the list of all, in order. `apply`: applies those of a stage.
- `reproducers`: for each bug, code that fails without its patch. `check`: runs them, and writes README's table.
"""
