"""Further facts of a unit's record, found by calling the model or while it is exported.

- `attribute_reads`, `build_only`: the attributes that forward reads, and its side effects, noted during the export.
- `outside_reads`: clocks that forward reads, and global variables that other code may change.
- `argument_forms`: other forms of arguments that give the same call.
- `assigned_attributes`: public attributes that forward sets.
- `output_dims`: the sizes of outputs, in the model's dims.
- `custom_operators`: the modules that register the library's operators.
"""
