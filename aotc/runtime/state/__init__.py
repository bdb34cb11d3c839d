"""The module that compiled code is bound to.

- `module`: the check at the load that it is the module that was captured; `watch`: the same in each call.
- `weights`: its tensors, as a call passes them, and `gate`, the lock while they are replaced.
- `subclasses`: tensors within tensor subclasses.
- `frozen`: the weights of a library that holds them.
"""
