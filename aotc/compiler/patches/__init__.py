"""The changes that aotc makes to torch's compiler while a unit compiles; README.md has the table of them.

- `bugs`, `performance`, `determinism`: the patches themselves. `shared`: what several of them have in common.
- `machinery`: how patches are described, applied and checked.
"""
