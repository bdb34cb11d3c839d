"""The tensors of the module that compiled code is bound to.

- `weights`: the module's tensors, as a call passes them, and `gate`, the lock while they are replaced.
- `subclasses`: tensors within tensor subclasses.
- `frozen`: the weights of a library that holds them.
"""
