"""How patches of torch are found, applied and checked.

- `patch`: the record of a patch. `registry`: finds all patches, and lists the hooks. `apply`: applies those of a stage.
- `reproducers`: for each bug, code that fails without its patch. `check`: runs them, and writes README's table.
"""
