"""`aotc.compile`: code that is compiled as a module is used, and remembered.

- `compile`: the function, and the module that stands in the place of another one.
- `compile_options`: what it was asked for. `compile_context`: what all that follows shares; `known_module`: what is
  known of the module as it is; `compile_state`: what is told of it.
- `remembering`: its calls, in the order in which they meet things; `forms`: what each call is looked at for.
- `module_changes`: what the module is now. `code_loading`: the code for it. `call_memory`: which of its calls are
  remembered, `remembered_calls` how, and `kind_index` which are known.
- `torch_arguments`: which arguments of torch.compile it takes.
- `methods`: the same of a method, and as a decorator. `compiled_functions`: of a function that takes its module first,
  which is the forward of a module of `functions`.
- `by_mode`: calls in training mode beside the others.
- `region_calls`: how a module runs compiled regions, in these calls alone.
- `call_counts`: what calls ran, by form, and why in eager.
- `cache_arguments`: calls with a cache of transformers, which `cache_structure` takes apart into data and tensors, and
  `cache_module` takes as arguments. `part_modes`: parts in another training mode.
- `peft_adapters`: how adapters stand in a module, as data, by which a build puts them into a new one.
- `counting_attributes`: numbers that calls add to, found by trying.
- `wrapped_forward`: accelerate's forwards, around compiled code.
- `builds`: when code is built, and by which process. `while_waiting`: how far that is, and what it costs.
- `module_look`: whether the module is as it was, asked in each call in eager.
- `identity`: what a module's name in the store depends on. `memory`: the files beside the store's own;
  `checked_kinds`: what may stand in them.
- `remote_memory`: what a store at a URL remembers, for many machines.
- `cells`: a file for a class that a notebook's cell defines.
- `manifest`: from the memory to a manifest. `build_process`: the process that builds, which alone imports the compiler.
"""
