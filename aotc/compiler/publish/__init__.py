"""From compiled units to tagged bundles.

- `unit_record`: in the unit's process, write its record, and the files beside its library.
- `unit_files`: put these files into the store as blobs, and the record under the unit's key.
- `target_artifacts`: units of one target become one artifact. `bundles`: artifacts of a model become its bundle.
  `supply_chain`: a bundle's SBOM and provenance.
- `merging`: the same from the stores of several machines (`aotc merge`). `url_store`: build into a store at a URL.
- `supply_chain`: what `aotc build --attest` states of the bundles.
"""
