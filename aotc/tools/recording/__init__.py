"""From a model that runs to its manifest.

- `record`: the calls that a program makes (`aotc.record`); `recorded_manifest`: their manifest.
- `first_manifest`: from a module and one call (`aotc init`).
- `manifest_text`: the text and the file, of these two and of `aotc.compile`.
- `check_written`: other buckets, and regions, where a model cannot be captured as it was written.
- `values_file`: integers that the model reads as values, beside the manifest.
- `seen_calls`: inputs and buckets from calls. `module_factories`: the factory of a module that is there.
- `made_again`: how a build makes a module again: its factory, and what was done to it since, by these:
  `peft_adapters`: how adapters stand in a module, as data. `part_modes`: parts in another training mode.
  `weight_layouts`: weights in another order in memory, as of `channels_last`.
"""
