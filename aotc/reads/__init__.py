"""What a forward reads beside its inputs: found by `aotc.compiler.capture.analysis`, and compared at three moments.

Compiled code has taken in more than shapes: the module tree, Python attributes (`self.heads`), the code of classes and
functions, names outside the module, tied weights, and modes of the process. Each is plain data here.

- `attributes`, `outside`, `sources`, `state_specs`, `modes`: one kind each, as this module and this process have it;
  `module_specs`, `imported_files`, `syntax`, `tensors`: files of Python modules, what they import, the digest of their
  code, and values of tensors.
- `module_identity`: all of these of a module, as one answer to what it is: for keys, records and `aotc.compile`.
- `module_check`: how the record of a capture differs from them, which the next build asks of units under their key, and
  at a load also the module's class, code and hooks.
- `watch`: what can change in a process, in each call; as rows of `facts`, which the evaluator in C++ reads, too.
"""
