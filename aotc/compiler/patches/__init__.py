"""The changes that aotc makes to torch's compiler while a unit compiles: one file for each patch.

A file has the issue as its docstring, `PATCH`, which says where the patch is applied, the fix, `apply()`, and
`reproduce()`, which fails where torch has the bug. README.md has the table of all.

- `machinery`: how patches are found, applied, checked and described.
- `shared`: what several patches, or a patch and another room of the compiler, have in common.
"""
