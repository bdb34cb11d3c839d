"""The changes that aotc makes to torch's compiler while a unit compiles; README.md has the table of them.

- `patch`: the record of a patch. `registry`: the list of all, in order. `apply`: applies those of a stage.
- `bugs`, `performance`, `determinism`: the patches themselves. `rewriting`, `inductor`, `decompositions`: their tools.
- `reproducers`: for each bug, code that fails without its patch. `check`: runs them, and writes README's table.
"""
