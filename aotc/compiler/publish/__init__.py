"""From compiled units to the bundles that tags name.

- `record`: in the unit's process, its record, and the files beside its library.
- `unit_files`: these into the store, as blobs, under the unit's key.
- `target_artifacts`: units of one target become one artifact. `bundles`: artifacts of a model become its bundle.
- `merging`: the same from the stores of several machines (`aotc merge`). `url_store`: into a store at a URL.
"""
