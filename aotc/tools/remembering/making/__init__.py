"""How a build makes the module of a program again.

- `made_from`: its factory and the arguments, as a manifest names them.
- `peft_adapters`: how adapters stand in a module, as data, by which a build puts them into a new one.
- `functions`: a module whose forward is a function. `part_modes`: parts in another training mode.
- `wrapped_forward`: accelerate's forwards, around compiled code.
- `cells`: a file for a class that a notebook's cell defines.
"""
