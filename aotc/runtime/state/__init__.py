"""The tensors of the module that compiled code is bound to.

- `weights`: the module's tensors, as a call passes them, and `read_write_lock`, the lock while they are replaced.
- `inner_tensors`: tensors within tensor subclasses.
- `frozen`: the weights of a library that holds them.
"""
