"""From a manifest to the units to compile.

- `plan`: every unit; of a model by regions, its regions. `key`: the named inputs of each, `model_sources` among them.
- `cache_lookup`: a unit's finished record, or why it must be compiled.
- `shards`: one machine's part of the units. `estimate`: seconds and memory of a build, by earlier ones.
"""
