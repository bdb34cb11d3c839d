"""Caches of compilers: the files that torch.compile, Triton and vLLM leave in their cache folders, kept in a store.

For models that cannot be exported. A process that starts with a restored cache compiles less, and not nothing: only an
artifact of `aotc build` needs no compiler. In the order of a save and a restore:

- `folders`: where each compiler has its cache, and which of its files are worth keeping.
- `origin`: the machine and the versions that a cache comes from, as its key, and the rules by which another fits.
- `save`: files to a bundle in a store.
- `restore`: a bundle to files, after all its checks.
- `receipt`: what became of the files in a start, as `watched/aotc_watching` wrote it down in each process.
- `stores`: a cache by its reference, in a folder or a remote store.

The record and its bytes are the store's: `aotc.store.layout.compiler_cache`.
"""
