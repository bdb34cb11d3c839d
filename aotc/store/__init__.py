"""The store: an OCI image layout on disk, whose bytes `FORMAT.md` specifies. Imports neither torch nor yaml.

- `reference`: how a bundle is named; `opening`: the store, registry or bucket that a name leads to, as `readable`.
- `layout`: the folder itself: blobs, `index.json`, bundles, units. `files`: writing and locking of files.
- `remote`: registries, object storage, push and fetch. `signing`: keys, signatures, attestations, trust.
- `cache_folder`: what aotc keeps on this host. `compile_cache`: compiled files in it, by the digest of their inputs.
- `maintenance`: fsck and gc. `tagging`: tags that are set and removed.

A load imports what it needs of them, and no more.
"""
