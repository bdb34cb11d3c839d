"""The tensors of the module that compiled code is bound to.

- `call_state`: those of one call, and what each must be. `weights`: the module's, and `read_write_lock`, the lock while
  they are replaced; `inner_tensors`: tensors within tensor subclasses, which `descriptions` compares with the build's.
- `frozen`: the weights of a library that holds them. `binding` chooses among these; `state_source` is their protocol.
"""
