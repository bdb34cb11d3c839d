"""How patches of torch are found, applied and checked.

- `patch`: the record of a patch. `registry`: finds all patches, and lists the hooks. `apply`: applies those of a stage.
- `reproducing`: what reproducers have in common. `check`: runs the reproducers, and writes README's table.
"""
