"""How a build makes the module of a program again.

- `made_from`: its factory and the arguments, as a manifest names them: by `aotc.tools.recording.made_again`.
- `functions`: a module whose forward is a function.
- `wrapped_forward`: accelerate's forwards, around compiled code.
- `cells`: a file for a class that a notebook's cell defines.
"""
