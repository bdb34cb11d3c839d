"""`aotc.compile`: code that is compiled as a module is used, and remembered.

- `compile`: the function, and the module that stands in the place of another one.
- `compile_options`: what it was asked for. `compile_context`: what all that follows shares; `known_module`: what is
  known of the module as it is; `compile_state`: what is told of it.
- `remembering`: its calls, in the order in which they meet things; `forms`: what each call is looked at for.
- `module_changes`: what the module is now. `code_loading`: the code for it.
- `torch_arguments`: which arguments of torch.compile it takes.
- `methods`: the same of a method, and as a decorator. `compiled_functions`: of a function that takes its module first.
- `by_mode`: calls in training mode beside the others.
- `region_calls`: how a module runs compiled regions, in these calls alone.
- `call_counts`: what calls ran, by form, and why in eager.
- `module_look`: whether the module is as it was, asked in each call in eager.

The rooms: `caches`: calls with a cache of transformers. `memory`: what is remembered of a module and its calls.
`making`: how a build makes the module again, with adapters of peft and all else that was done to it. `building`: when
and by which process.
"""
